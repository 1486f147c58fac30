"""The field's other systems, one short module each; every module reads on its own and has a notebook.

A module's ``claims(quick)`` measures what its system is said to do. ``python -m minimgrpo.lessons`` prints them all.
"""

from dataclasses import dataclass

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
