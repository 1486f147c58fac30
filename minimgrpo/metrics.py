"""What a step or an evaluation measured about the team, from its trajectories alone.

format            share of planner trajectories that ended in a well-formed answer within the limits
executor_format   the same for the executor's reports
accuracy          share of rollouts whose answer passes the GAIA scorer
puzzle_delegation, lookup_delegation   share of rollouts on puzzles / on look-ups that delegate at all
query_specificity share of search queries, on questions that need a search, that name what is asked about
expert            mean expert score of the executor trajectories
calls             histogram: how many rollouts made 0, 1, 2, ... delegations (d_k)
"""

from __future__ import annotations

from collections import Counter

from minimgrpo.trajectory import Trajectory


def team(questions: list, planner: list[Trajectory], executor: list[Trajectory]) -> dict:
    """The metrics above; a share of nothing is None. ``questions`` are those that the trajectories name."""
    by_id = {q.task_id: q for q in questions}

    def share(flags: list) -> float | None:
        return sum(flags) / len(flags) if flags else None

    def delegation(kind: str) -> float | None:
        return share([bool(t.tool_calls) for t in planner if by_id[t.question_id].kind == kind])

    return {
        "format": share([t.format_ok for t in planner]),
        "executor_format": share([t.format_ok for t in executor]),
        "accuracy": share([t.reward_parts.get("correct", 0.0) for t in planner]),
        "puzzle_delegation": delegation("puzzle"),
        "lookup_delegation": delegation("lookup"),
        "query_specificity": share(
            [
                is_specific(str(call["arguments"].get("query", "")), by_id[t.question_id].keys)
                for t in executor
                for call in t.tool_calls
                if call["name"] == "search" and by_id[t.question_id].keys
            ]
        ),
        "expert": share([t.reward_parts["expert"] for t in executor if "expert" in t.reward_parts]),
        "calls": dict(sorted(Counter(len(t.tool_calls) for t in planner).items())),
    }


def is_specific(query: str, keys: list[str]) -> bool:
    """Whether a query names one of the ``keys`` (as whole words, whatever the case).

    >>> is_specific("capital Ghana", ["Ghana"]), is_specific("capital", ["Ghana"]), is_specific("area 233", ["2"])
    (True, False, False)
    """
    words = f" {_plain(query)} "
    return any(f" {_plain(key)} " in words for key in keys)


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
