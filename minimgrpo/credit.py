"""Who gets how much of a team's result: difference rewards and Shapley values from coalition values. Pure arithmetic.

V(S) is what the team reaches when everybody outside S is replaced by a default action. Coalitions are bit masks: agent
i is in S when bit i is set, so n agents have 2^n values, V(nobody) first and V(everybody) last.

    difference   r_i = V(N) - V(N without i)
    Shapley      r_i = sum over S in N without i of |S|! (n - |S| - 1)! / n! (V(S + i) - V(S))
                 sum r_i = V(N) - V(nobody)
"""

from __future__ import annotations

from math import factorial

import numpy as np


def shapley_exact(values: np.ndarray) -> np.ndarray:
    """Shapley values [..., n] from the 2^n coalition values [..., 2^n] (2^n evaluations, no n! of anything).

    >>> shapley_exact(np.array([0.0, 1.0, 2.0, 5.0])).tolist()  # 1 or 5 - 2 for the first, 2 or 5 - 1 for the second
    [2.0, 3.0]
    """
    n = values.shape[-1].bit_length() - 1
    phi = np.zeros((*values.shape[:-1], n))
    for S in range(2**n):
        size = S.bit_count()
        for i in range(n):
            if not S >> i & 1:
                weight = factorial(size) * factorial(n - size - 1) / factorial(n)
                phi[..., i] += weight * (values[..., S | 1 << i] - values[..., S])
    return phi


def shapley_mc(values: np.ndarray, orders: int, rng: np.random.Generator) -> np.ndarray:
    """The same by ``orders`` random orders of arrival: each agent gets what it adds when it arrives. For large n."""
    n = values.shape[-1].bit_length() - 1
    phi = np.zeros((*values.shape[:-1], n))
    for _ in range(orders):
        S = 0
        for i in rng.permutation(n).tolist():
            phi[..., i] += (values[..., S | 1 << i] - values[..., S]) / orders
            S |= 1 << i
    return phi


def difference(values: np.ndarray) -> np.ndarray:
    """V(N) - V(N without i) [..., n]: what is lost without i.

    >>> difference(np.array([0.0, 1.0, 2.0, 5.0])).tolist()
    [3.0, 4.0]
    """
    n = values.shape[-1].bit_length() - 1
    everyone = 2**n - 1
    return np.stack([values[..., everyone] - values[..., everyone ^ 1 << i] for i in range(n)], axis=-1)
