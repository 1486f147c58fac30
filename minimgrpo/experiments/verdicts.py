"""Whether a claim is shown, by rules that were fixed before the final runs.

A claim "a > b" is about the difference of two numbers of the same seed (base, first adapters, questions, and random
numbers are shared as far as both runs draw the same ones). Over the seeds the differences have a mean and a 95 %
interval (Student's t, paired). The claim is

* **shown** when the whole interval is above 0,
* **reversed** when the whole interval is below 0,
* **not shown** otherwise.

A claim "a = b" is shown when the whole interval lies within +-0.10, reversed when it lies wholly outside, else not
shown. With each goes the exact two-sided p-value of the sign-flip permutation test, which assumes no distribution; with
5 seeds it cannot fall below 1/16 = .0625, so the verdict is the interval's. Nothing is corrected for the number of
claims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MARGIN = 0.10
VERDICTS = ("shown", "not shown", "reversed")


@dataclass(frozen=True)
class Found:
    """What was found about one claim: mean difference, its 95 % interval, p of the permutation test, the verdict."""

    difference: float
    low: float
    high: float
    p: float
    verdict: str
    differences: tuple[float, ...]


def judge(a: Sequence[float], b: Sequence[float], relation: str = ">") -> Found:
    """Judge "a ``relation`` b" (">" or "="), paired; the two have one number for each seed, two seeds at least.

    >>> judge([0.8, 0.7, 0.9], [0.3, 0.2, 0.2]).verdict, judge([0.1, 0.9], [0.2, 0.3]).verdict
    ('shown', 'not shown')
    """
    if len(a) != len(b) or relation not in (">", "="):
        raise ValueError(f"pairs and '>' or '=' are needed, not {len(a)} and {len(b)} numbers and {relation!r}")
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    mean, low, high = t_interval(differences)
    if relation == ">":
        verdict = "shown" if low > 0 else "reversed" if high < 0 else "not shown"
    else:
        inside, outside = low > -MARGIN and high < MARGIN, low > MARGIN or high < -MARGIN
        verdict = "shown" if inside else "reversed" if outside else "not shown"
    return Found(mean, low, high, sign_flip(differences), verdict, tuple(round(float(d), 4) for d in differences))


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and Student's 95 % interval; ValueError with fewer than two values.

    >>> [round(x, 3) for x in t_interval([1, 2, 3, 4, 5])]
    [3.0, 1.037, 4.963]
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        raise ValueError("an interval needs at least two values")
    half = t_quantile(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def t_quantile(df: int) -> float:
    """The .975 quantile of Student's t: with t = sqrt(df) tan(u) its density is cos(u)^(df - 1), summed on a grid.

    >>> [round(t_quantile(df), 3) for df in (1, 4, 30)]
    [12.706, 2.776, 2.042]
    """
    u = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(u) ** (df - 1)
    share = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(math.sqrt(df) * np.tan(np.interp(0.95, share / share[-1], u)))


def sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p-value: the share of all 2^n sign patterns whose sum is at least as far from 0.

    >>> sign_flip([1, 2, 3, 4, 5]), sign_flip([1, -1])
    (0.0625, 1.0)
    """
    differences = np.asarray(differences, dtype=float)
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    sums = np.abs(signs @ differences)
    return float((sums >= abs(differences.sum()) - 1e-9).mean())
