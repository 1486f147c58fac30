"""What the rubric says about small cases, computed by hand."""

import dataclasses
import inspect

import pytest

from minimgrpo import experts, tasks
from minimgrpo.experts import Rating, Rubric
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory

FOUND = "Ghana: The capital of Ghana is Accra and its currency is the Cedi. [id 12]"


def call(name, output, ok=True, **arguments):
    return {"name": name, "arguments": arguments, "output": output, "ok": ok}


def trajectory(task, result, *calls):
    t = Trajectory("executor", "q", 0, stop_reason="result", result=result, tool_calls=list(calls))
    t.messages = [{"role": "system", "content": "You are the executor."}, {"role": "user", "content": task}]
    return t


def rate(task, result, *calls):
    [rating] = Rubric().rate([trajectory(task, result, *calls)])
    assert rating.score == pytest.approx(sum(rating.criteria.values()) / 4) and 0 <= rating.score <= 1
    return rating.criteria


SEARCH = call("search", FOUND, query="capital Ghana")


def test_one_good_search_and_a_short_report_is_full_marks():
    found = rate("Find the capital of Ghana", "Accra", SEARCH)
    assert found == {"tools": 1.0, "grounded": 1.0, "answers": 1.0, "economy": 1.0}


def test_a_report_without_a_tool_call_is_worth_nothing():
    assert set(rate("Find the capital of Ghana", "Accra").values()) == {0.0}


def test_a_report_that_no_tool_output_contains_is_not_grounded():
    assert rate("Find the capital of Ghana", "Kumasi", SEARCH)["grounded"] == 0.0
    assert rate("Find the capital of Ghana", "Accra, surely", SEARCH)["grounded"] == 0.0


def test_the_share_of_the_task_that_the_output_speaks_of():
    """Of 'area', 'Ghana' and 'Togo' (the other words are idle) the output has one."""
    assert rate("Find the area of Ghana and of Togo", "Accra", SEARCH)["answers"] == pytest.approx(1 / 3, abs=1e-4)


def test_words_of_the_code_that_ran_count_as_answered():
    assert rate("Compute 12 + 30", "42", call("python", "42", code="12 + 30"))["answers"] == 1.0
    failed = rate("Compute 12 + 30", "42", call("python", "SyntaxError", ok=False, code="12 + 30"))
    assert failed["answers"] == failed["tools"] == failed["grounded"] == 0.0


def test_a_failed_call_and_one_more_call_cost():
    found = rate("Find the capital of Ghana", "Accra", call("visit", "No page.", ok=False, id="x"), SEARCH)
    assert found == {"tools": 0.5, "grounded": 1.0, "answers": 1.0, "economy": 0.5}


def test_a_report_of_more_than_twelve_words_costs():
    assert rate("Find the capital of Ghana", "Accra " * 12, SEARCH)["economy"] == 1.0
    assert rate("Find the capital of Ghana", "Accra " * 24, SEARCH)["economy"] == 0.5


def test_a_search_that_found_nothing_gives_nothing_to_read(request):
    """Else 'no results' would be a well-grounded report."""
    output = Tools(tasks.load_pages()).run("search", {"query": "zzzzqx"}).text
    assert output == "No results."
    found = rate("Find the capital of Ghana", "No results", call("search", output, query="zzzzqx"))
    assert found["tools"] == found["grounded"] == found["answers"] == 0.0


def test_no_report_is_rated_without_a_division_by_zero():
    found = rate("Find the capital of Ghana", "", SEARCH)
    assert found == {"tools": 1.0, "grounded": 0.0, "answers": 0.0, "economy": 0.0}
    assert rate("", "Accra", SEARCH)["answers"] == 0.0


def test_ratings_come_in_the_order_of_the_trajectories():
    good, bad = trajectory("Find the capital of Ghana", "Accra", SEARCH), trajectory("Find it", "Accra")
    first, second = Rubric().rate([bad, good])
    assert first.score < second.score and Rubric().rate([]) == []


def test_an_expert_sees_trajectories_and_a_trajectory_has_no_gold_answer():
    assert list(inspect.signature(Rubric.rate).parameters) == ["self", "trajectories"]
    fields = {field.name for field in dataclasses.fields(Trajectory)}
    assert not {name for name in fields if "gold" in name or "answer" in name}
    assert not hasattr(experts, "tasks") and Rating(0.5, {}).score == 0.5
