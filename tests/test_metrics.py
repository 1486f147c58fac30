"""What a step and an evaluation measured, computed by hand."""

import pytest

from minimgrpo import metrics
from minimgrpo.tasks import Question
from minimgrpo.trajectory import Trajectory


def call(name, **arguments):
    return {"name": name, "arguments": arguments, "output": "x", "ok": True}


def question(task_id, kind, *keys):
    return Question(task_id, "?", 1, "gold", kind, (), keys, ())


def planner(task_id, calls, correct, stop="result"):
    t = Trajectory("planner", task_id, 0, stop_reason=stop, reward_parts={"correct": correct})
    t.tool_calls = [call("executor", task="y")] * calls
    return t


def executor(task_id, *queries, expert=1.0, stop="result"):
    t = Trajectory("executor", task_id, 0, stop_reason=stop, reward_parts={"expert": expert})
    t.tool_calls = [call("search", query=query) for query in queries]
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


# ----------------------------------------------------------------------------------------------------------- the rows


def spoke(t, reward, read, wrote, logprob, version=2):
    """A trajectory that read and wrote so many tokens."""
    t.read("user", "?", [1] * read)
    t.wrote("!", [2] * wrote, [logprob] * wrote)
    t.reward, t.policy_version = reward, version
    return t


def test_what_both_roles_have_by_hand():
    batch = [
        spoke(planner("p", 0, 1.0), 1.0, 5, 2, -0.5),
        spoke(planner("p", 0, 0.0), 0.1, 5, 4, -1.0),
        spoke(planner("t", 0, 0.0, stop="length"), 0.0, 7, 10, -0.2, version=0),
        spoke(planner("t", 0, 0.0, stop="format"), 0.0, 3, 4, -0.1),
    ]
    batch[2].read("user", "?", [1] * 8)
    batch[2].wrote("!", [2] * 4, [-0.2] * 4)
    batch[0].advantage, batch[1].advantage = 1.0, -1.0  # the other group is flat
    learned = {"lr": 0.1, "trained": 2, "trained_tokens": 16, "loss": 0.5, "learn_seconds": 0.5}
    row = metrics.row("planner", 3, batch, learned, 2.0)
    expected = {
        **{"step": 3, "role": "planner", "trajectories": 4, "reward": 1.1 / 4, "format": 2 / 4, "flat": 1 / 2},
        "entropy": (2 * 0.5 + 4 * 1.0 + 14 * 0.2 + 4 * 0.1) / 24,
        "staleness": (0 + 0 + 2 + 0) / 4,
        **{"sampled_length": 24 / 4, "total_length": (7 + 9 + 29 + 7) / 4, "turns": 5 / 4, "truncated": 1 / 4},
        **learned,
        **{"sample_seconds": 2.0, "sample_tokens_per_second": 12.0, "learn_tokens_per_second": 32.0},
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["stop_reasons"] == {
        "result": 2,
        "format": 1,
        "turns": 0,
        "calls": 0,
        "length": 1,
        "context": 0,
        "timeout": 0,
    }
    assert {row[name] for name in set(row) - set(expected) - {"stop_reasons"}} == {None}  # not measured


def test_a_row_of_nothing_has_the_same_names():
    some = metrics.row("executor", 1, [spoke(executor("p"), 0.5, 1, 1, -1.0)], {}, None)
    nothing = metrics.row("executor", 1, [], {"trained": 0, "learn_seconds": 0.1}, 0.3)
    assert list(nothing) == list(some) and nothing["trajectories"] == 0
    for name in ("reward", "format", "flat", "entropy", "staleness", "turns", "loss", "learn_tokens_per_second"):
        assert nothing[name] is None, name
    assert some["sample_tokens_per_second"] is None


def test_what_only_the_planner_has():
    batch = [planner("p", 0, 1.0), planner("l", 3, 0.0), planner("l", 1, 1.0), planner("t", 1, 1.0)]
    assert metrics.planner(batch, QUESTIONS) == {
        **{"correct": 3 / 4, "puzzle_delegation": 0.0, "lookup_delegation": 1.0, "calls": [1, 2, 0, 1]},
    }
    assert metrics.planner([], [])["calls"] == [0]


def test_what_only_the_executor_has():
    """Of four rollouts one delegated once (four copies), one five times (one dropped), and two never."""
    batch = [executor("l", "capital Ghana", expert=1.0), *(executor("t", "capital", expert=0.0) for _ in range(5))]
    for t, copies, rollout in zip(batch, (4, 1, 1, 0, 1, 1), (0, 1, 1, 1, 1, 1), strict=True):
        t.copies, t.rollout = copies, rollout
        t.reward_parts |= {"planner_correct": float(rollout == 0), "expert_tools": 0.5}
    outcomes = [{"question_id": q, "rollout": k, "correct": 0.0} for q in ("l", "t") for k in (0, 1)]
    found = metrics.executor(batch, outcomes, metrics.keys(QUESTIONS))
    expected = {"planner_correct": 1 / 6, "expert": 1 / 6, "expert_tools": 0.5, "query_specificity": 1 / 6}
    assert found == pytest.approx(expected | {"duplicated": 3 / 8, "dropped": 1 / 6, "empty": 2 / 4})
    assert metrics.executor(batch, outcomes, {})["query_specificity"] is None
    none = metrics.executor([], outcomes, metrics.keys(QUESTIONS))
    assert none["empty"] == 1.0 and none["duplicated"] is none["dropped"] is none["expert"] is None


def test_a_dropped_trajectory_is_no_signal():
    flat, dropped, live = (executor(name) for name in ("a", "b", "c"))
    dropped.advantage, dropped.copies, live.advantage = 1.0, 0, 0.5
    assert metrics.flat_share([flat, dropped, live]) == pytest.approx(2 / 3)
    assert metrics.flat_share([]) is None
