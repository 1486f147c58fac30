"""Experts: who rates how well an executor did its sub-task (the third term of its reward, mgrpo eq. 5).

The paper's expert is an LLM whose prompt and scale are not given; the public code has none. Ours is a protocol,
``Expert.rate``, and a transparent rubric that needs no model. A rating is in [0, 1] and comes with its criteria by
name, which the log keeps. An expert sees the trajectory and nothing else: never the gold answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from minimgrpo.trajectory import Trajectory

_NOTHING_FOUND = "No results."  # what the search tool says then

# Words of a sub-task that say nothing about what is sought.
_IDLE = frozenset(
    "a an and are compute find for in is its of on that the this to what which whose with".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Rating:
    """``score`` in [0, 1] and the criteria it was made of, each in [0, 1]."""

    score: float
    criteria: dict[str, float]


class Expert(Protocol):
    """Anything that rates finished executor trajectories."""

    def rate(self, trajectories: list[Trajectory]) -> list[Rating]: ...


class Rubric:
    """Four criteria, each visible, averaged. It can be pleased without being right: it never knows the truth.

    * ``tools``: the share of tool calls that gave something to read (an error or no result gives nothing; no call: 0);
    * ``grounded``: every word of the report stands in what the tools returned;
    * ``answers``: the share of the sub-task's words that stand in what the tools returned, or in the code that ran;
    * ``economy``: 1 for one call and a short report, less for more calls and for more than twelve words.
    """

    def rate(self, trajectories: list[Trajectory]) -> list[Rating]:
        return [self._rate(t) for t in trajectories]

    def _rate(self, trajectory: Trajectory) -> Rating:
        calls = trajectory.tool_calls
        useful = [c for c in calls if c["ok"] and c["output"] != _NOTHING_FOUND]
        shown = _words(" ".join(c["output"] for c in useful))
        ran = _words(" ".join(str(c["arguments"].get("code", "")) for c in useful))
        task = _words(trajectory.messages[1]["content"]) - _IDLE
        report = _words(trajectory.result)
        length = len(trajectory.result.split())
        criteria = {
            "tools": len(useful) / len(calls) if calls else 0.0,
            "grounded": float(bool(report) and report <= shown),
            "answers": len(task & (shown | ran)) / len(task) if task and report else 0.0,
            "economy": min(1.0, 12 / length) / len(calls) if calls and length else 0.0,
        }
        criteria = {name: round(value, 4) for name, value in criteria.items()}
        return Rating(sum(criteria.values()) / len(criteria), criteria)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
