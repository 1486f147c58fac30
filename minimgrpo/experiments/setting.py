"""One run, described completely: what is trained, on what, how it is rewarded and aligned, and how it is examined.

Two runs with equal settings are the same run. So a run is remembered under the ``key`` of its setting, and the
experiments share it: the co-trained arm is also the paper's reward mix, D_max = 4, staleness 0, the mixed curriculum.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from minimgrpo.experiments.graders import EXPERTS
from minimgrpo.experiments.weights import ALIGNMENTS
from minimgrpo.learner import Objective
from minimgrpo.servers import Config

TEAMS = {"team": ("planner", "executor"), "shared": ("shared",), "solo": ("solo",)}
"""Who answers -> its adapters: a team of two, a team with one adapter for both roles, one agent with all tools."""

CURRICULA = {"mixed": {}, "hard": {1: (2, 3)}, "easy first": {1: (1,), 1 / 3: (2, 3)}}
"""Curriculum -> which levels are asked from which part of the run on (1: from the first step; {}: all, always)."""

VERSION = 1
"""Part of every key: raised when the same setting would give another result."""


@dataclass(frozen=True)
class Setting:
    """``config`` holds what ``minimgrpo.train`` knows too (its ``threads`` do not matter here: a run uses one)."""

    config: Config = field(
        default_factory=lambda: Config(steps=24, questions=12, rollouts=8, threads=1, objective=Objective(lr=3e-3))
    )
    team: str = "team"
    "who answers: one of TEAMS"
    trains: tuple[str, ...] = ("planner", "executor")
    "which adapters learn; the others stay as they are"
    weights: tuple[float, float, float] = (0.1, 0.4, 0.5)
    "the executor's reward: format, the planner's outcome, the expert"
    expert: str = "rubric"
    "who rates the executor: one of graders.EXPERTS"
    alignment: str = "align"
    "how much each executor trajectory counts: one of weights.ALIGNMENTS"
    curriculum: str = "mixed"
    "which questions come when: one of CURRICULA"
    hits: int = 1
    "context load: the pages that a search shows"
    sentences: int = 1
    "context load: the sentences that it shows of each"
    demonstrations: int = 1500
    "what an adapter is fine-tuned on first that meets what its base never saw (``warmed``)"
    split: str = "test"
    "the questions of the final examination"
    examined: int = 160
    "how many of them, from the first on (the kinds alternate, so they stay balanced)"

    def __post_init__(self):
        for name, value, known in (
            ("team", self.team, TEAMS),
            ("expert", self.expert, EXPERTS),
            ("alignment", self.alignment, ALIGNMENTS),
            ("curriculum", self.curriculum, CURRICULA),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
        if unknown := set(self.trains) - set(TEAMS[self.team]):
            raise ValueError(f"{self.team} has no adapter {', '.join(sorted(unknown))} to train")

    @property
    def warmed(self) -> tuple[str, ...]:
        """Adapters that start from demonstrations: the base saw neither one agent alone nor fuller search results."""
        if self.team == "solo":
            return ("solo",)
        return ("executor",) if self.team == "team" and (self.hits, self.sentences) != (1, 1) else ()

    @property
    def seed(self) -> int:
        return self.config.seed

    def levels(self, step: int) -> tuple[int, ...] | None:
        """The levels that a step (from 1) asks about; None: all."""
        found = None
        for start, levels in CURRICULA[self.curriculum].items():
            if start == 1 or step > start * self.config.steps:
                found = levels
        return found

    def facts(self) -> dict:
        """All of it as plain values, as JSON would give them back."""
        return json.loads(json.dumps(asdict(self) | {"version": VERSION}))

    @property
    def key(self) -> str:
        """Equal for equal settings, different for different ones.

        >>> Setting().key == Setting(hits=1).key, Setting().key == Setting(hits=2).key
        (True, False)
        """
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]
