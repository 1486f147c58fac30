"""The rules of lesson "routing" on hand-computed cases, and its measurements at the bounds that they should reach."""

import math
import random
from statistics import mean

import pytest

from minimgrpo.lessons import routing, verdict
from minimgrpo.lessons.routing import PolicyGraph


def last(history, name="reward"):
    return mean(epoch[name] for epoch in history[-5:])


def test_score_by_hand():
    graph = PolicyGraph()
    for r in (0.5, 0.7):
        graph.backup([("s", "a")], r, 100, set())
    graph.backup([("s", "b")], 0.9, 100, {"b"})
    scores = graph.scores("s", ["a", "b", "new"])
    c = 1.4 * 2 ** (-3 / 50)  # three visits
    assert scores["a"] == pytest.approx(0.6 + c * math.sqrt(math.log(4) / 2))
    assert scores["b"] == pytest.approx(0.9 + c * math.sqrt(math.log(4)) - 0.5 * 1 / 2)  # one failure, one visit
    assert scores["new"] == math.inf


def test_the_bonus_has_a_floor():
    graph = PolicyGraph()
    for _ in range(200):
        graph.backup([("s", "a")], 0.0, 0, set())
    assert graph.scores("s", ["a"])["a"] == pytest.approx(0.5 * math.sqrt(math.log(201) / 200))


def test_the_pipeline_decides_until_the_fifth_visit_then_what_was_never_tried_goes_first():
    graph, rng = PolicyGraph(), random.Random(0)
    for _ in range(5):
        assert graph.pick("s", ["default", "other"], "default", rng) == "default"
        graph.backup([("s", "default")], 1.0, 0, set())
    assert graph.pick("s", ["default", "other"], "default", rng) == "other"


def test_backup_gives_every_edge_the_same_reward_and_the_audit_shows_it():
    graph = PolicyGraph()
    graph.backup([("s", "a"), ("t", "b")], 0.2, 10, {"b"})
    graph.backup([("s", "a"), ("t", "c")], 0.6, 30, set())
    first, *others = graph.audit()
    assert (first["signature"], first["action"], first["visits"]) == ("s", "a", 2)
    assert first["mean"] == pytest.approx(0.4) and first["variance"] == pytest.approx(0.04) and first["tokens"] == 20
    assert [(row["action"], row["mean"], row["failures"]) for row in others] == [("b", 0.2, 1), ("c", 0.6, 0)]


def test_a_saved_graph_continues_exactly():
    graph = PolicyGraph()
    routing.run(graph, 0, epochs=4)
    again = PolicyGraph.loads(graph.dumps())
    assert again.audit() == graph.audit()
    assert routing.run(again, 7, epochs=2) == routing.run(graph, 7, epochs=2)


def test_best_plans_by_hand():
    plan, value = routing.best_plan("plain")
    assert plan == ("solver:direct/small",) and value == pytest.approx(0.87 - 0.3 * 800 / 8000)
    plan, value = routing.best_plan("ambiguous")
    assert plan == ("planner", "solver:stepwise/medium") and value == pytest.approx(0.87 - 0.3 * 2900 / 8000)
    plan, value = routing.best_plan("evidence")  # web: 10 % of the calls cost a retry and the tokens of a second one
    assert plan == ("memory", "web", "solver:direct/medium")
    assert value == pytest.approx(0.87 - 0.3 * (5100 + 240) / 8000 - 0.015)


def test_the_fixed_pipeline_earns_what_its_parts_say():
    plan = tuple(routing.RULE_BASED.values())
    q = mean(routing.quality(regime, plan) for regime in routing.REGIMES)
    measured = last(routing.run(None, 0, epochs=40), "quality")
    assert abs(measured - q) < 4 * routing.NOISE / 200**0.5


def test_a_failed_call_costs_its_tokens_again_a_retry_and_a_mark(monkeypatch):
    monkeypatch.setattr(routing, "WEB_FAILS", 1.0)
    monkeypatch.setattr(routing, "NOISE", 0.0)
    plan = tuple(routing.RULE_BASED.values())
    assert "web" in plan
    tokens = routing.cost(plan) + routing.cost(("web",))
    expected = routing.quality("plain", plan) - 0.3 * min(tokens / 8000, 1) - 0.15
    graph = PolicyGraph()
    for teacher in (None, graph):  # on its first visits the graph follows the pipeline
        episode = routing.run_episode(teacher, "plain", random.Random(0))
        assert episode["tokens"] == tokens and episode["reward"] == pytest.approx(expected)
    assert all(row["mean"] == pytest.approx(expected) and row["tokens"] == tokens for row in graph.audit())
    failures = {row["action"]: (row["visits"], row["failures"]) for row in graph.audit()}
    assert failures["web"] == (1, 1) and sum(f for _, f in failures.values()) == 1


def test_a_planner_is_never_skipped_where_skipping_is_off():
    graph = PolicyGraph()
    routing.run(graph, 0, epochs=3, skip=False)
    assert not any(row["action"].startswith("skip:") for row in graph.audit())


def test_verdict_can_come_out_each_way():
    assert verdict([0.3, 0.31, 0.29], 0.2) == "shown"
    assert verdict([0.1, 0.11, 0.09], 0.2) == "not shown"
    assert verdict([-0.1, -0.11, -0.09]) == "reversed"
    assert verdict([0.5, -0.5, 0.1]) == "not shown"


def test_learning_reaches_the_bounds():
    oracle = mean(routing.best_plan(regime)[1] for regime in routing.REGIMES)
    arms = routing.arms(0)
    cold = last(arms["cold"])
    assert cold >= 0.9 * oracle and cold >= last(arms["fixed"]) + 0.2
    assert last(arms["fixed"]) < last(arms["no-skip"]) < cold <= oracle + 0.02
    assert last(arms["cold"], "tokens") <= 0.7 * last(arms["no-skip"], "tokens")
    assert abs(last(arms["warm"]) - cold) <= 0.05  # one seed; the mean of five is within 0.03
    assert mean(e["reward"] for e in arms["warm"][:5]) >= mean(e["reward"] for e in arms["cold"][:5]) + 0.15
    assert last(arms["folded"]) < cold - 0.1


@pytest.mark.lesson
def test_the_bounds_on_five_seeds():
    oracle = mean(routing.best_plan(regime)[1] for regime in routing.REGIMES)
    arms = [routing.arms(seed) for seed in range(5)]
    end = {name: mean(last(some[name]) for some in arms) for name in arms[0]}
    assert end["cold"] >= 0.9 * oracle and end["fixed"] < end["no-skip"] < end["cold"]
    assert abs(end["warm"] - end["cold"]) <= 0.03


@pytest.mark.lesson
def test_claims():
    found = [claim.verdict for claim in routing.claims()]
    assert found == ["shown", "shown", "not shown", "shown", "not shown", "reversed", "shown", "shown"]
