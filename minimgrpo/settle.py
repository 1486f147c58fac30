"""From what happened to what is learned from: rewards, alignment and advantages of a step's trajectories.

Each role settles its own. The planner's rewards are normalised over the K rollouts of a question. The executor's wait
for the planner's outcomes, are aligned (a copy is a weight), and are normalised over all aligned trajectories of the
question: its baseline is never the planner's. Everything here is arithmetic on trajectories that are written already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minimgrpo.alignment import align
from minimgrpo.experts import Expert
from minimgrpo.grpo import group_advantages
from minimgrpo.rewards import executor_reward, planner_reward
from minimgrpo.scorer import gaia_score
from minimgrpo.trajectory import Trajectory

Align = Callable[[Sequence[int], int, str], list[list[float]]]
"""``align(counts, d_max, seed)``: the weight of each of the d_k executor trajectories of each rollout k."""


def settle_planner(trajectories: list[Trajectory], questions: list) -> None:
    """Set reward, reward parts and advantage of whole groups: all rollouts of each question (eq. 4, 9-10)."""
    reward_planner(trajectories, questions)
    for group in grouped(trajectories).values():
        for trajectory, advantage in zip(group, group_advantages([t.reward for t in group]).tolist(), strict=True):
            trajectory.advantage = advantage


def settle_executor(
    trajectories: list[Trajectory],
    correct: dict[tuple[str, int], float],
    expert: Expert,
    d_max: int,
    seed: str,
    weights: Sequence[float] = (0.1, 0.4, 0.5),
    align: Align = align,
) -> None:
    """Set reward, reward parts, copies and advantage (eq. 5, 11-13).

    ``correct``: the outcome of every rollout (question id, number), those without executor trajectories included;
    rollouts of a question follow each other in order. ``weights`` are those of ``rewards.executor_reward``.
    A question on which no rollout called the executor has nothing to settle: the executor skips it.
    """
    reward_executor(trajectories, correct, expert, weights)
    asked: dict[str, list[int]] = {}
    for question_id, rollout in correct:
        asked.setdefault(question_id, []).append(rollout)
    for question_id, group in grouped(trajectories).items():
        calls = [[t for t in group if t.rollout == rollout] for rollout in asked[question_id]]
        copies = align([len(c) for c in calls], d_max, f"{seed} {question_id}")
        group, copies = [t for c in calls for t in c], [w for c in copies for w in c]
        advantages = group_advantages([t.reward for t in group], copies).tolist()
        for trajectory, weight, advantage in zip(group, copies, advantages, strict=True):
            trajectory.copies, trajectory.advantage = weight, advantage


def grouped(trajectories: list[Trajectory]) -> dict[str, list[Trajectory]]:
    """The trajectories of each question, in order."""
    groups: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.question_id, []).append(t)
    return groups


def reward_planner(trajectories: list[Trajectory], questions: list) -> None:
    """Set reward and reward parts: format, and right or wrong by the GAIA scorer (eq. 4)."""
    gold = {q.task_id: q.answer for q in questions}
    for t in trajectories:
        correct = float(t.format_ok and gaia_score(t.result, gold[t.question_id]))
        t.reward = planner_reward(t.format_ok, correct)
        t.reward_parts = {"format": float(t.format_ok), "correct": correct}


def reward_executor(
    trajectories: list[Trajectory],
    correct: dict[tuple[str, int], float],
    expert: Expert,
    weights: Sequence[float] = (0.1, 0.4, 0.5),
) -> None:
    """Set reward and reward parts: format, the planner's outcome, the expert's rating and its criteria (eq. 5)."""
    for t, rating in zip(trajectories, expert.rate(trajectories), strict=True):
        outcome = correct[t.question_id, t.rollout]
        t.reward = executor_reward(t.format_ok, outcome, rating.score, weights)
        t.reward_parts = {
            "format": float(t.format_ok),
            "planner_correct": outcome,
            "expert": rating.score,
            **{f"expert_{name}": value for name, value in rating.criteria.items()},
        }
