"""What a step measured: one row for each role and step. And what an evaluation measured about the team.

A row is ``row`` (what both roles have) and ``planner`` or ``executor``. It is made from the role's own trajectories,
its own update, and what the log tells it (the executor: the outcomes): each server writes its own rows and asks nobody.

docs/metrics.md says what every name means, how a healthy run looks, and what is a bad sign. Shares and means are over
trajectories, each counted once, whatever its copies; a mean of nothing is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minimgrpo.trajectory import STOP_REASONS, Trajectory

CUT_OFF = ("turns", "calls", "length", "context")  # the stop reasons that are limits

# what `learner.Learner.update` measures; in a row None where a step had nothing to learn from
LEARNED = (
    *("lr", "trained", "trained_tokens", "loss", "grad_norm", "clip_fraction"),
    *("approx_kl", "approx_kl_k1", "ratio_mean", "ratio_max", "kl", "learn_seconds"),
)


def row(role: str, step: int, trajectories: list[Trajectory], learned: dict, sample_seconds: float | None) -> dict:
    """What both roles have. ``sample_seconds`` is None when the trajectories were not sampled now but read back."""
    sampled = sum(t.sampled for t in trajectories)
    reasons = Counter(t.stop_reason for t in trajectories)
    learned = dict.fromkeys(LEARNED) | learned
    return {
        "step": step,
        "role": role,
        "trajectories": len(trajectories),
        "reward": _mean(t.reward for t in trajectories),
        "format": _mean(t.format_ok for t in trajectories),
        "flat": flat_share(trajectories),
        "entropy": -sum(sum(t.logprobs) for t in trajectories) / sampled if sampled else None,
        "staleness": _mean(step - 1 - t.policy_version for t in trajectories),
        "sampled_length": _mean(t.sampled for t in trajectories),
        "total_length": _mean(len(t.token_ids) for t in trajectories),
        "turns": _mean(sum(m["role"] == "assistant" for m in t.messages) for t in trajectories),
        "truncated": _mean(t.stop_reason in CUT_OFF for t in trajectories),
        "stop_reasons": {reason: reasons[reason] for reason in STOP_REASONS},
        **learned,
        "sample_seconds": sample_seconds,
        "sample_tokens_per_second": sampled / sample_seconds if sample_seconds else None,
        "learn_tokens_per_second": learned["trained_tokens"] / learned["learn_seconds"] if learned["trained"] else None,
    }


def planner(trajectories: list[Trajectory], questions: list) -> dict:
    """What only the planner has. ``questions`` are those that the trajectories name."""
    calls = Counter(len(t.tool_calls) for t in trajectories)
    return {
        "correct": _part(trajectories, "correct"),
        **_delegation(trajectories, questions),
        "calls": [calls[d] for d in range(max(calls, default=0) + 1)],
    }


def executor(trajectories: list[Trajectory], outcomes: list[dict], keys: dict[str, tuple[str, ...]]) -> dict:
    """What only the executor has.

    ``outcomes``: the step's lines, one for each rollout. ``keys``: question id -> what a specific query must name.
    """
    aligned, kept = sum(t.copies for t in trajectories), sum(t.copies > 0 for t in trajectories)
    called = {(t.question_id, t.rollout) for t in trajectories}
    criteria = dict.fromkeys(name for t in trajectories for name in t.reward_parts if name.startswith("expert_"))
    return {
        **{name: _part(trajectories, name) for name in ("planner_correct", "expert", *criteria)},
        "query_specificity": _specificity(trajectories, keys),
        "duplicated": 1 - kept / aligned if aligned else None,
        "dropped": 1 - kept / len(trajectories) if trajectories else None,
        "empty": 1 - len(called) / len(outcomes) if outcomes else None,
    }


def team(questions: list, planned: list[Trajectory], executed: list[Trajectory]) -> dict:
    """What an evaluation says about both. ``questions`` are those that the trajectories name."""
    return {
        "format": _mean(t.format_ok for t in planned),
        "executor_format": _mean(t.format_ok for t in executed),
        "accuracy": _part(planned, "correct"),
        **_delegation(planned, questions),
        "query_specificity": _specificity(executed, keys(questions)),
        "expert": _part(executed, "expert"),
    }


def keys(questions: list) -> dict[str, tuple[str, ...]]:
    """Question id -> what a specific query must name; all that an executor server may know of the questions."""
    return {q.task_id: q.keys for q in questions}


def flat_share(trajectories: list[Trajectory]) -> float | None:
    """The share of groups in which every advantage is 0 (all rewards equal), so that nothing is learned from them.

    A question on which no rollout delegates has no executor group and is not counted there.
    """
    signal: dict[str, bool] = {}
    for t in trajectories:
        signal[t.question_id] = signal.get(t.question_id, False) or (t.copies > 0 and t.advantage != 0)
    return 1 - sum(signal.values()) / len(signal) if signal else None


def _delegation(planned: list[Trajectory], questions: list) -> dict[str, float | None]:
    kinds = {q.task_id: q.kind for q in questions}
    return {
        f"{kind}_delegation": _mean(bool(t.tool_calls) for t in planned if kinds[t.question_id] == kind)
        for kind in ("puzzle", "lookup")
    }


def _specificity(executed: list[Trajectory], keys: dict[str, tuple[str, ...]]) -> float | None:
    return _mean(
        is_specific(str(call["arguments"].get("query", "")), keys[t.question_id])
        for t in executed
        for call in t.tool_calls
        if call["name"] == "search" and keys.get(t.question_id)
    )


def _part(trajectories: list[Trajectory], name: str) -> float | None:
    return _mean(t.reward_parts[name] for t in trajectories if name in t.reward_parts)


def _mean(values: Iterable[float]) -> float | None:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else None


def is_specific(query: str, keys: list[str]) -> bool:
    """Whether a query names one of the ``keys`` (as whole words, whatever the case).

    >>> is_specific("capital Ghana", ["Ghana"]), is_specific("capital", ["Ghana"]), is_specific("area 233", ["2"])
    (True, False, False)
    """
    words = f" {_plain(query)} "
    return any(f" {_plain(key)} " in words for key in keys)


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
