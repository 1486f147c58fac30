"""Rollouts of a scripted team with the real tools: who says what to whom, and how a conversation ends."""

import dataclasses
import json

import pytest
import torch

from minimgrpo import evaluate, protocol, tasks
from minimgrpo.agents import Limits, SubTask, execute, generator, plan, report
from minimgrpo.protocol import call_text
from minimgrpo.tools import ToolResult, Tools
from minimgrpo.trajectory import STOP_REASONS, Trajectory

QUESTIONS = tasks.load_questions("validation")[:8]
BY_TEXT = {q.question: q for q in QUESTIONS}
STEPS = {step.task: step for q in QUESTIONS for step in q.steps}
ROOMY = Limits(length=200, context=2000)


def right(role, user, row, turn):
    """A team that follows each question's own steps."""
    if role == "planner":
        steps = BY_TEXT[user].steps
        if turn < len(steps):
            return call_text("executor", task=steps[turn].task)
        return f"FINAL ANSWER: {BY_TEXT[user].answer}"
    step = STEPS[user]
    if turn == 0:
        return call_text(step.tool, **{{"search": "query", "python": "code"}[step.tool]: step.argument})
    return step.report


@pytest.fixture(scope="module")
def tools():
    return Tools(tasks.load_pages())


def run(policy, tools, questions=QUESTIONS, rollouts=1, limits=ROOMY):
    """-> (planner trajectories, executor trajectories, sub-tasks by turn)"""
    executed, handed = [], []

    def delegate(turn, sub_tasks):
        handed.append((turn, sub_tasks))
        done = execute(policy, tools, sub_tasks, limits, 1.0, torch.Generator())
        executed.extend(done)
        return [report(t) for t in done]

    return plan(policy, questions, rollouts, delegate, limits, 1.0, torch.Generator()), executed, handed


def planner_says(*messages):
    """A planner that says these messages; its executor reports at once."""
    return lambda role, user, row, turn: messages[turn] if role == "planner" else "a report"


# ------------------------------------------------------------------------------------------------------- the whole team


def test_a_team_that_follows_the_steps_answers_every_question(scripted, tools):
    planned, executed, _ = run(scripted(right), tools)
    assert {q.kind for q in QUESTIONS} == {"puzzle", "lookup", "two-hop", "calculation"}
    for question, trajectory in zip(QUESTIONS, planned, strict=True):
        assert (trajectory.question_id, trajectory.agent) == (question.task_id, "planner")
        assert trajectory.format_ok and trajectory.result == question.answer
        assert [c["output"] for c in trajectory.tool_calls] == [s.report for s in question.steps]
    assert len(executed) == sum(len(q.steps) for q in QUESTIONS)
    assert all(t.agent == "executor" and t.format_ok and t.tool_calls[0]["ok"] for t in executed)


def test_a_conversation_is_stored_as_messages_and_as_the_same_tokens(scripted, tools):
    policy = scripted(right)
    planned, executed, _ = run(policy, tools)
    stop = policy.chat.tokenizer.eos_token_id
    for t in planned + executed:
        assert [m["role"] for m in t.messages] == ["system", *["user", "assistant"] * (len(t.messages) // 2)]
        ids = policy.chat.open(t.agent, t.messages[1]["content"])
        mask = [0] * len(ids)
        outputs = iter([c["output"] for c in t.tool_calls])
        for message in t.messages[2:]:
            if message["role"] == "assistant":
                new = policy.said[message["content"]]
            else:
                output = next(outputs)
                assert message["content"] == protocol.response_text(output)
                new = policy.chat.respond(output, stop)
            ids += new
            mask += [int(message["role"] == "assistant")] * len(new)
        assert (t.token_ids, t.mask) == (ids, mask)
        assert t.logprobs == [-0.5 * m for m in mask]


def test_all_delegations_of_a_turn_are_one_batch_and_so_are_all_their_tool_calls(scripted, tools):
    policy = scripted(right)
    run(policy, tools)
    needing = [sum(len(q.steps) >= n for q in QUESTIONS) for n in (1, 2, 3)]
    assert needing[2] > 0
    expected = [("planner", len(QUESTIONS))]
    for n in needing:  # the executors ask a tool, then report; then their planners go on
        expected += [("executor", n), ("executor", n), ("planner", n)]
    assert policy.batches == expected


def test_sub_tasks_say_where_they_come_from_and_reports_go_back_there(scripted, tools):
    def script(role, user, row, turn):
        if role == "executor":
            return f"done: {user}"
        says = [*(call_text("executor", task=f"{word} of {row}") for word in ("first", "second")), "FINAL ANSWER: 1"]
        return says[turn + (row == 1)]  # rollout 1 delegates once

    planned, executed, handed = run(scripted(script), tools, QUESTIONS[:2], rollouts=2)
    a, b = QUESTIONS[0].task_id, QUESTIONS[1].task_id
    assert [(t.question_id, t.rollout) for t in planned] == [(a, 0), (a, 1), (b, 0), (b, 1)]
    assert handed[0] == (
        0,
        [
            SubTask(a, 0, 0, "first of 0"),
            SubTask(a, 1, 0, "second of 1"),
            SubTask(b, 0, 0, "first of 2"),
            SubTask(b, 1, 0, "first of 3"),
        ],
    )
    second = [SubTask(a, 0, 1, "second of 0"), SubTask(b, 0, 1, "second of 2"), SubTask(b, 1, 1, "second of 3")]
    assert handed[1] == (1, second)
    for t in planned:
        assert all(c["output"] == f"done: {c['arguments']['task']}" and c["ok"] for c in t.tool_calls)
    assert [(t.question_id, t.rollout, t.call) for t in executed[4:]] == [(a, 0, 1), (b, 0, 1), (b, 1, 1)]


def test_no_gold_answer_reaches_an_agent(scripted, tools):
    """Answers that occur nowhere else, in questions that need them: only a leak could bring them into a message."""
    gold = (tasks.Step("GOLD-7F3A", "search", "GOLD-7F3A", "GOLD-7F3A"),)
    questions = [dataclasses.replace(q, answer="GOLD-7F3A", keys=("GOLD-7F3A",), steps=gold) for q in QUESTIONS]

    def script(role, user, row, turn):
        said = right(role, user, row, turn)
        return "FINAL ANSWER: unknown" if said.startswith("FINAL") else said

    policy = scripted(script)
    planned, executed, _ = run(policy, tools, questions)
    assert policy.read and not [text for text in policy.read if "GOLD" in text]
    assert "GOLD" not in json.dumps([t.to_json() for t in planned + executed])


# --------------------------------------------------------------------------------------------------------- stop reasons

DELEGATE = call_text("executor", task="Find it")


@pytest.mark.parametrize(
    "reason, limits, messages",
    [
        ("result", {}, ["FINAL ANSWER: 4"]),
        ("result", {}, [DELEGATE, DELEGATE, "FINAL ANSWER: 4"]),
        ("format", {}, ["It is 4."]),
        ("format", {}, [DELEGATE, DELEGATE + DELEGATE]),
        ("turns", {"turns": 2}, [DELEGATE, DELEGATE]),
        ("calls", {"calls": 1}, [DELEGATE, DELEGATE]),
        ("calls", {"calls": 0}, [DELEGATE]),
        ("length", {}, [DELEGATE, "FINAL ANSWER: 4..."]),
        ("length", {}, [DELEGATE + "..."]),
        ("context", {"length": 50, "context": 150}, [DELEGATE] * 5),
    ],
)
def test_each_stop_reason(scripted, tools, reason, limits, messages):
    limits = Limits(**({"turns": 6, "calls": 5, "length": 200, "context": 2000} | limits))
    policy = scripted(planner_says(*messages))
    [trajectory], executed, _ = run(policy, tools, QUESTIONS[:1], limits=limits)
    assert reason in STOP_REASONS and trajectory.stop_reason == reason
    assert trajectory.format_ok == (reason == "result") == bool(trajectory.result)
    assert bool(trajectory.note) == (reason == "format")
    assert len(executed) == len(trajectory.tool_calls) == sum(b == ("executor", 1) for b in policy.batches)
    assert trajectory.messages[-1]["role"] == "assistant"  # nothing is read that nobody answers
    if reason == "context":
        assert len(trajectory.token_ids) <= limits.context


def test_the_context_limit_counts_the_next_message(scripted, tools):
    """One token less and the last turn has no room for a whole message."""
    policy = scripted(planner_says(DELEGATE, "FINAL ANSWER: 4"))
    [whole], _, _ = run(policy, tools, QUESTIONS[:1])
    before_last = len(whole.token_ids) - len(policy.chat.encode("FINAL ANSWER: 4")) - 1
    for context, reason in ((before_last + 20, "result"), (before_last + 19, "context")):
        [trajectory], _, _ = run(policy, tools, QUESTIONS[:1], limits=Limits(length=20, context=context))
        assert trajectory.stop_reason == reason


def test_the_models_own_context_is_a_limit_too(scripted, tools):
    policy = scripted(planner_says(*[DELEGATE] * 6), max_context=150)
    [trajectory], _, _ = run(policy, tools, QUESTIONS[:1], limits=Limits(length=50, context=2000))
    assert trajectory.stop_reason == "context" and len(trajectory.token_ids) <= 150


def test_a_question_longer_than_the_context_ends_before_a_word_is_written(scripted, tools):
    long = tasks.Question("long", "word " * 300, 1, "4", "lookup", (), (), ())
    BY_TEXT[long.question] = long
    policy = scripted(right)
    planned, _, _ = run(policy, tools, [QUESTIONS[0], long, QUESTIONS[1]], limits=Limits(length=60, context=300))
    assert [t.stop_reason for t in planned] == ["result", "context", "result"]
    assert [t.result for t in planned] == [QUESTIONS[0].answer, "", QUESTIONS[1].answer]
    assert planned[1].sampled == 0
    [alone], _, _ = run(policy, tools, [long], limits=Limits(length=60, context=300))
    assert alone.stop_reason == "context"


# ---------------------------------------------------------------------------------------------------------- tool output


def test_a_failing_tool_is_text_the_executor_reads_and_the_conversation_goes_on(scripted, tools):
    def script(role, user, row, turn):
        if role == "planner":
            return [DELEGATE, "FINAL ANSWER: 4"][turn]
        return [call_text("python", code="1 / 0"), call_text("visit", id="nowhere"), "nothing"][turn]

    _, [trajectory], _ = run(scripted(script), tools, QUESTIONS[:1])
    assert [c["ok"] for c in trajectory.tool_calls] == [False, False]
    assert trajectory.messages[3]["content"] == "<tool_response>\nZeroDivisionError: division by zero\n</tool_response>"
    assert "No page with id 'nowhere'" in trajectory.messages[5]["content"]
    assert trajectory.result == "nothing"


@pytest.mark.parametrize("executor_says", ["", call_text("search", query="x") * 2, "cut..."])
def test_an_executor_without_a_report_is_told_to_the_planner_in_fixed_words(scripted, tools, executor_says):
    def script(role, user, row, turn):
        return [DELEGATE, "FINAL ANSWER: 4"][turn] if role == "planner" else executor_says

    [trajectory], [executor], _ = run(scripted(script), tools, QUESTIONS[:1])
    assert not executor.format_ok
    assert trajectory.tool_calls[0]["output"] == protocol.NO_REPORT and trajectory.tool_calls[0]["ok"] is False
    assert protocol.NO_REPORT in trajectory.messages[3]["content"]
    assert trajectory.format_ok


def test_a_report_with_tags_in_it_is_disarmed_for_the_planner():
    text = report(Trajectory("executor", "q", 0, stop_reason="result", result="4</tool_response>")).text
    assert protocol.response_text(text).count("</tool_response>") == 1


def test_nothing_to_do_is_no_batch_at_all(scripted, tools):
    policy = scripted(right)
    assert execute(policy, tools, [], ROOMY, 1.0, torch.Generator()) == [] and policy.batches == []


def test_a_random_generator_depends_on_its_key_alone():
    def draw(*key):
        return torch.rand(3, generator=generator(*key)).tolist()

    keys = [(0, 7, "planner"), (0, 7, "executor", 0), (0, 8, "planner"), (1, 7, "planner")]
    assert draw(*keys[0]) == draw(*keys[0])
    assert len({tuple(draw(*key)) for key in keys}) == 4


# ----------------------------------------------------------------------------------------------------------- evaluation


def test_an_evaluation_counts_every_question_whatever_became_of_it(scripted, tools):
    """Of eight questions two are answered wrongly and two end without an answer: accuracy 4 / 8, not 4 / 6."""
    ids = [q.task_id for q in QUESTIONS]

    def script(role, user, row, turn):
        said = right(role, user, row, turn)
        place = ids.index(BY_TEXT[user].task_id) if role == "planner" else 0
        if said.startswith("FINAL") and place in (1, 2):
            return "FINAL ANSWER: nonsense"
        return "I give up" if place in (4, 7) else said

    found = evaluate.attempt(scripted(script), tools, QUESTIONS, 1.0, 0, ROOMY, batch=3)
    assert [r.planner.question_id for r in found.rollouts] == ids
    assert found.numbers["accuracy"] == 0.5 and found.numbers["format"] == 0.75
    for question, rollout in zip(QUESTIONS, found.rollouts, strict=True):
        assert [t.question_id for t in rollout.calls] == [question.task_id] * len(rollout.planner.tool_calls)
        assert [t.call for t in rollout.calls] == list(range(len(rollout.calls)))
    groups = evaluate.by_group(QUESTIONS, found, "level")
    assert sum(g["n"] for g in groups.values()) == 8
    assert sum(g["n"] * g["accuracy"] for g in groups.values()) == pytest.approx(4)


def test_the_batch_size_of_an_evaluation_changes_nothing(scripted, tools):
    one, other = (evaluate.attempt(scripted(right), tools, QUESTIONS, 0.0, 0, ROOMY, batch=n) for n in (2, 100))
    assert one.numbers == other.numbers and one.numbers["accuracy"] == 1.0
    assert [r.planner.to_json() for r in one.rollouts] == [r.planner.to_json() for r in other.rollouts]


def test_the_summary_of_an_evaluation_by_hand(scripted, tools):
    found = evaluate.attempt(scripted(right), tools, QUESTIONS, 1.0, 0, ROOMY)
    summary = evaluate.summarise(QUESTIONS, found, found)
    assert (summary["n"], summary["accuracy"], summary["greedy"], summary["format"]) == (8, 1.0, 1.0, 1.0)
    low, high = summary["ci95"]
    assert low == pytest.approx(8 / (8 + 1.959964**2), abs=1e-4) and high == pytest.approx(1.0)  # Wilson at 8 of 8
    assert summary["query_specificity"] == 1.0 and summary["puzzle_delegation"] == 0.0
    assert set(summary["levels"]) == {"1", "2", "3"} and summary["kinds"]["puzzle"]["accuracy"] == 1.0


def test_an_agents_failure_in_the_tools_is_an_error_and_never_a_silent_zero(scripted):
    class Broken:
        def run_many(self, calls):
            raise RuntimeError("the index is gone")

    with pytest.raises(RuntimeError, match="the index is gone"):
        run(scripted(right), Broken())


def test_a_tool_result_is_plain_text_and_a_flag():
    assert report(Trajectory("executor", "q", 0, stop_reason="result", result="4")) == ToolResult("4", True)
