"""Trajectory alignment: give every rollout the same number D of executor trajectories (eq. 11).

In rollout k the planner calls the executor d_k times, as often as it likes. M-GRPO wants K * D executor trajectories
per question. So a rollout with fewer than D has some duplicated at random, and one with more has some dropped.
The executor's advantages are then taken over all K * D together (`grpo.group_advantages`).

Choices against the paper (arXiv 2511.13288) and its public code:

    what          paper                                  public code     ours
    d < D         duplicate at random, with replacement  no alignment    the paper's: all d stay, D - d are drawn
    d > D         drop at random                         no alignment    the paper's: a random D of them stay
    d = 0         not covered                            no alignment    no rows: the rollout is left out
    D             covers about 99 % of rollouts          no alignment    the same, computed by `suggest_d_max`
    a duplicate   a second row in the batch              no alignment    a weight: the same gradient, computed once
"""

import math
import operator
import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def align(counts: Sequence[int], d_max: int, seed: int | str) -> list[list[int]]:
    """How often each executor trajectory of a question counts (eq. 11).

    counts: K numbers; counts[k] = d_k >= 0 is how often rollout k called the executor.
    d_max: D >= 1.   seed: the same seed gives the same copies, in every process and on every machine.
    Returns copies, K lists: copies[k] has d_k whole numbers that sum to D, or is empty when d_k is 0.
    Raises ValueError: negative count, d_max < 1, a number that is not whole, a seed that is neither int nor str.

    >>> align([2, 1, 0, 5], d_max=3, seed=0)  # two become three, one becomes three, five become three
    [[1, 2], [3], [], [0, 1, 1, 1, 0]]
    """
    counts = [_whole(count, "a count", at_least=0) for count in counts]
    d_max = _whole(d_max, "d_max", at_least=1)
    if not isinstance(seed, int | str):
        raise ValueError(f"seed must be an int or a str, so that the alignment can be repeated, got {seed!r}")
    rng = random.Random(seed)
    return [_copies_of_rollout(d, d_max, rng) for d in counts]


def _copies_of_rollout(d: int, d_max: int, rng: random.Random) -> list[int]:
    if d == 0:
        return []
    if d > d_max:
        kept = set(rng.sample(range(d), k=d_max))
        return [int(i in kept) for i in range(d)]
    copies = [1] * d
    for i in rng.choices(range(d), k=d_max - d):
        copies[i] += 1
    return copies


def duplicate(items: Sequence[Sequence[Item]], copies: Sequence[Sequence[int]]) -> list[Item]:
    """The aligned batch written out: each item as often as its copies say, in one flat list.

    items: K lists of trajectories (or rewards, or anything), shaped like copies. Training never needs this list, which
    is up to D times longer; it is here to show that weights give the same advantages and gradients.
    Raises ValueError: items not shaped like copies.

    >>> duplicate([["a", "b"], ["c"], []], [[1, 2], [3], []])
    ['a', 'b', 'b', 'c', 'c', 'c']
    """
    if [len(row) for row in items] != [len(row) for row in copies]:
        raise ValueError("items and copies must have the same shape: one number of copies for each item")
    return [
        item
        for row, row_copies in zip(items, copies, strict=True)
        for item, c in zip(row, row_copies, strict=True)
        for _ in range(c)
    ]


def suggest_d_max(counts: Sequence[int], quantile: float = 0.99) -> int:
    """The smallest D >= 1 such that at least this share of rollouts has d <= D, so few trajectories get dropped.

    counts: d_k of many rollouts, as measured before training; those with d = 0 count too.
    Raises ValueError: no counts, a negative or fractional count, quantile not in (0, 1].

    >>> suggest_d_max([1] * 60 + [2] * 39 + [30])  # 99 % of the rollouts make one or two calls
    2
    """
    counts = sorted(_whole(count, "a count", at_least=0) for count in counts)
    if not counts:
        raise ValueError("suggest_d_max needs the call count of at least one rollout")
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile must be in (0, 1], got {quantile}")
    needed = math.ceil(quantile * len(counts) * (1 - 1e-12))  # 0.07 * 100 is 7.000000000000001 and must need 7
    return max(1, counts[needed - 1])


def _whole(value: int, name: str, at_least: int) -> int:
    try:
        number = operator.index(value)  # takes Python, NumPy and PyTorch integers, refuses 3.0 and "3"
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    return number
