"""Other ways than the paper's to let executor trajectories count, in the form that ``settle_executor`` takes.

In rollout k the planner calls the executor d_k times. The paper's alignment makes every rollout count as D
trajectories; these are the two obvious things to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from minimgrpo.alignment import align
from minimgrpo.settle import Align


def unaligned(counts: Sequence[int], d_max: int, seed: str) -> list[list[float]]:
    """No alignment: each trajectory counts once, so a rollout counts d_k times. The other arguments are not used.

    >>> unaligned([2, 0, 1], 4, "")
    [[1.0, 1.0], [], [1.0]]
    """
    return [[1.0] * d for d in counts]


def shared_out(counts: Sequence[int], d_max: int, seed: str) -> list[list[float]]:
    """Each rollout counts once, shared out over its d_k trajectories: what alignment is on average while d_k <= D.

    >>> shared_out([2, 0, 1], 4, "")
    [[0.5, 0.5], [], [1.0]]
    """
    return [[1.0 / d for _ in range(d)] for d in counts]


ALIGNMENTS: dict[str, Align] = {"align": align, "none": unaligned, "1/d": shared_out}
