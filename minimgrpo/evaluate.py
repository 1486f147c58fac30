"""Evaluate a team on questions, GAIA-style: one attempt each at T=1 with a 95 % interval, and greedy.

The number is the GAIA scorer's on the planner's final answer. An attempt that ran into a limit or broke the format is
wrong and stays in the denominator. Agents see the question and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimgrpo import agents, metrics
from minimgrpo.agents import Limits, SubTask, generator
from minimgrpo.experts import Rubric
from minimgrpo.policy import Policy
from minimgrpo.scorer import wilson
from minimgrpo.servers import reward_executor, reward_planner
from minimgrpo.tools import ToolResult, Tools
from minimgrpo.trajectory import Rollout, rollouts


@dataclass
class Evaluation:
    """One attempt at each question: ``rollouts`` in the questions' order, and the numbers."""

    rollouts: list[Rollout]
    numbers: dict


def attempt(
    policy: Policy,
    tools: Tools,
    questions: list,
    temperature: float,
    seed: int,
    limits: Limits,
    batch: int = 160,
    executor_policy: Policy | None = None,
) -> Evaluation:
    """Let the team answer each question once; ``batch`` questions at a time (it bounds the memory).

    ``executor_policy`` is given where the executor stands on a device of its own.
    """
    planned, executed, expert = [], [], Rubric()
    for start in range(0, len(questions), batch):
        some = questions[start : start + batch]

        def delegate(turn: int, sub_tasks: list[SubTask], start=start) -> list[ToolResult]:
            draws = generator(seed, "evaluate", start, "executor", turn)
            done = agents.execute(executor_policy or policy, tools, sub_tasks, limits, temperature, draws)
            executed.extend(done)
            return [agents.report(t) for t in done]

        draws = generator(seed, "evaluate", start, "planner")
        planned += agents.plan(policy, some, 1, delegate, limits, temperature, draws)
    reward_planner(planned, questions)
    reward_executor(executed, {(t.question_id, 0): t.reward_parts["correct"] for t in planned}, expert)
    return Evaluation(rollouts(planned, executed), metrics.team(questions, planned, executed))


def by_group(questions: list, evaluation: Evaluation, name: str) -> dict[str, dict]:
    """{"n", "accuracy"} for each value of the questions' attribute ``name`` ("level", "kind")."""
    groups: dict[str, list[float]] = {}
    for question, rollout in zip(questions, evaluation.rollouts, strict=True):
        groups.setdefault(str(getattr(question, name)), []).append(rollout.planner.reward_parts["correct"])
    return {key: {"n": len(flags), "accuracy": sum(flags) / len(flags)} for key, flags in sorted(groups.items())}


def summarise(questions: list, sampled: Evaluation, greedy: Evaluation) -> dict:
    """The S of ``summary.json``: numbers of the sampled attempts, and the greedy accuracy."""
    n, numbers = len(questions), sampled.numbers
    return {
        "n": n,
        "accuracy": numbers["accuracy"],
        "ci95": list(wilson(round(numbers["accuracy"] * n), n)),
        "greedy": greedy.numbers["accuracy"],
        "format": numbers["format"],
        "levels": by_group(questions, sampled, "level"),
        "kinds": by_group(questions, sampled, "kind"),
        "greedy_levels": by_group(questions, greedy, "level"),
        "puzzle_delegation": numbers["puzzle_delegation"],
        "query_specificity": numbers["query_specificity"],
    }
