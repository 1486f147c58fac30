"""What the rubric and the team's metrics say about small cases, computed by hand."""

import dataclasses
import inspect

import pytest

from minimgrpo import experts, metrics, tasks
from minimgrpo.experts import Rating, Rubric
from minimgrpo.tasks import Question
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


# -------------------------------------------------------------------------------------------------------------- metrics


def question(task_id, kind, *keys):
    return Question(task_id, "?", 1, "gold", kind, (), keys, ())


def planner(task_id, calls, correct, stop="result"):
    t = Trajectory("planner", task_id, 0, stop_reason=stop, reward_parts={"correct": correct})
    t.tool_calls = [call("executor", "x", task="y")] * calls
    return t


def executor(task_id, *queries, expert=1.0, stop="result"):
    t = Trajectory("executor", task_id, 0, stop_reason=stop, reward_parts={"expert": expert})
    t.tool_calls = [call("search", "x", query=query) for query in queries]
    return t


QUESTIONS = [question("p", "puzzle"), question("l", "lookup", "Ghana"), question("t", "two-hop", "Accra", "Ghana")]


def test_the_metrics_of_a_small_batch_by_hand():
    planned = [
        planner("p", 0, 1.0),
        planner("p", 1, 0.0),
        planner("l", 1, 1.0),
        planner("l", 0, 0.0, stop="length"),
        planner("t", 2, 0.0),
    ]
    executed = [
        executor("p", "puzzle", expert=0.0),  # a puzzle has no key: its queries do not count
        executor("l", "capital Ghana", expert=0.5),
        executor("t", "capital", "capital accra", expert=1.0, stop="calls"),
    ]
    assert metrics.team(QUESTIONS, planned, executed) == {
        "format": 4 / 5,
        "executor_format": 2 / 3,
        "accuracy": 2 / 5,
        "puzzle_delegation": 1 / 2,
        "lookup_delegation": 1 / 2,
        "query_specificity": 2 / 3,
        "expert": 0.5,
        "calls": {0: 2, 1: 2, 2: 1},
    }


def test_a_share_of_nothing_is_none_and_not_zero():
    found = metrics.team(QUESTIONS, [planner("t", 0, 1.0)], [])
    nothing = ("executor_format", "puzzle_delegation", "lookup_delegation", "query_specificity", "expert")
    assert all(found[name] is None for name in nothing) and found["accuracy"] == 1.0


@pytest.mark.parametrize(
    "query, keys, specific",
    [
        ("capital Ghana", ["Ghana"], True),
        ("CAPITAL OF GHANA?", ["Ghana"], True),
        ("capital", ["Ghana"], False),
        ("Ghanaian capital", ["Ghana"], False),  # whole words only
        ("area of Isle of Man", ["Isle of Man"], True),
        ("Isle Man of", ["Isle of Man"], False),
        ("domain gh", [".gh"], True),  # marks do not matter
        ("atomic number 79", ["7", "9"], False),
        ("capital Accra", ["Togo", "Accra"], True),
        ("", ["Ghana"], False),
    ],
)
def test_when_a_query_is_specific(query, keys, specific):
    assert metrics.is_specific(query, keys) is specific
