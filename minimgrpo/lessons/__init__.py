"""The field's other systems, one short module each; every module reads on its own and has a notebook.

A module's ``claims(quick)`` measures what its system is said to do. ``python -m minimgrpo.lessons`` prints them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VERDICTS = ("shown", "not shown", "reversed")


@dataclass(frozen=True)
class Claim:
    """One claim, what was measured (with its spread and seeds), and the verdict that follows from it."""

    claim: str
    measured: str
    verdict: str

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f"a verdict is {', '.join(VERDICTS)}, not {self.verdict!r}")


def verdict(differences: Sequence[float] | np.ndarray, at_least: float = 0.0) -> str:
    """Mean above at_least by two standard errors: shown; below 0 by two: reversed; anything else: not shown."""
    m, error = np.mean(differences), np.std(differences, ddof=1) / len(differences) ** 0.5
    return "shown" if m - 2 * error > at_least else "reversed" if m + 2 * error < 0 else "not shown"


def compare(claim: str, measured: str, differences: Sequence[float] | np.ndarray, at_least: float = 0.0) -> Claim:
    """The claim that these differences, one for each seed, are on average above at_least."""
    return Claim(claim, f"{measured} ({len(differences)} seeds)", verdict(differences, at_least))


def show(values: np.ndarray, form: str = ".3f") -> str:
    """Mean ± standard deviation over the seeds."""
    return f"{values.mean():{form}} ± {values.std(ddof=1):{form}}"
