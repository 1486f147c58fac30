"""Three experts for the reward experiment, from one that never knows the truth to one that knows it.

The paper's expert is an LLM. A rubric in its place can be made as blind or as sharp as a question needs: what a
composite reward does depends on what its expert overlooks.
"""

from __future__ import annotations

from collections.abc import Callable

from minimgrpo.experts import Expert, Rating, Rubric
from minimgrpo.scorer import gaia_score
from minimgrpo.trajectory import Trajectory

LONG = 8
"""Words of a report that please the superficial expert fully."""


class Superficial:
    """Rates what can be seen at a glance: a tool was used, the report is grounded in its output, the report is long.

    It never asks whether the query or the report has anything to do with the sub-task.
    """

    def rate(self, trajectories: list[Trajectory]) -> list[Rating]:
        ratings = []
        for t in trajectories:
            shown = _words(" ".join(call["output"] for call in t.tool_calls if call["ok"]))
            report = t.result.split()
            criteria = {
                "tools": float(bool(shown)),
                "grounded": float(bool(report) and _words(t.result) <= shown),
                "length": min(1.0, len(report) / LONG),
            }
            ratings.append(Rating(round(sum(criteria.values()) / 3, 4), criteria))
        return ratings


class Accurate:
    """Compares the report with what the sub-task should have brought, by the scorer that grades answers.

    ``questions`` give the gold steps. A sub-task that is a gold step must bring its report; any other one (a vague one,
    a puzzle) the report of any step, or the answer.
    """

    def __init__(self, questions: list):
        self.steps = {q.task_id: {step.task: step.report for step in q.steps} for q in questions}
        self.answers = {q.task_id: q.answer for q in questions}

    def rate(self, trajectories: list[Trajectory]) -> list[Rating]:
        return [Rating(score, {"true": score}) for score in map(self._true, trajectories)]

    def _true(self, t: Trajectory) -> float:
        steps, task = self.steps[t.question_id], t.messages[1]["content"]
        wanted = [steps[task]] if task in steps else [*steps.values(), self.answers[t.question_id]]
        return float(any(gaia_score(t.result, gold) for gold in wanted))


def _words(text: str) -> set[str]:
    return {"".join(c for c in word if c.isalnum()) for word in text.lower().split()} - {""}


EXPERTS: dict[str, Callable[[list], Expert]] = {
    "rubric": lambda questions: Rubric(),
    "superficial": lambda questions: Superficial(),
    "accurate": Accurate,
}
"""Name -> the expert, made for these questions."""
