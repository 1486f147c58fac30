"""Lesson 10. Learning to hand off: agents that share an artifact, and one number at every handoff (IC-SMDP, IC-Q).

Source: "Learning to Hand Off" (arXiv 2605.19140). We could read its abstract only. From the abstract: agents pass a
shared artifact on; each sees a *local function* of the artifact and a private state; decisions are made at handoffs,
between which time passes (a semi-Markov process); what crosses a handoff is exactly one scalar. Its bound has three
terms: function approximation, the interface's representation gap, a mixing residual. Its experiments with language
models are not repeated here. Do not confuse it with arXiv 2605.24202 (shared and isolated policies): write-ups exist
that put the title of the one above the abstract of the other.

Derived by us. Agent i sees o = (phi(artifact), private state) and takes an action a = (operation, recipient j). It
works for tau steps, earns R = sum_{s < tau} gamma^s r_s, and hands the artifact to j. Agent j answers with one
scalar, m = max_a' Q_j(o', a'). Then (``update``)

    Q_i(o, a) <- (1 - alpha) Q_i(o, a) + alpha (R + gamma^tau m),        alpha = 1 / visits^0.7.

No agent sees another's table, observation or private state. The interface phi cuts the 12 states of the artifact into
``cells`` equal pieces. Its gap is e = max |Q*(x, a) - Q*(x', a)| over x, x' in one cell. Since the learned value of a
cell averages targets over the cell, its error is at most e + gamma * (its error), so at most e / (1 - gamma); acting
greedily on it loses at most 2 e / (1 - gamma)^2.

Our choices: random teams of 3 agents (3 operations each, private state a fair coin thrown at each handoff), epsilon
0.3 and 60,000 handoffs. Values are exact (the policy is evaluated on the true model), not sampled. The oracle is
centralized: it knows the model, the whole artifact and, like the agent that holds it, the private state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minimgrpo.lessons import Claim

AGENTS, STATES, PRIVATE, OPERATIONS = 3, 12, 2, 3
GAMMA = 0.9
CELLS = (1, 2, 4, 6, 12)


@dataclass(frozen=True)
class Teams:
    """E random teams. The holder n of artifact x, in private state y, chooses operation o.

    pay: [E, N, X, Y, O], reward per time step, in [0, 1].
    longest: [E, N, X, O], the duration tau is uniform on 1 .. longest.
    move: [E, N, X, O, X], probabilities of the artifact's next state.
    """

    pay: np.ndarray
    longest: np.ndarray
    move: np.ndarray

    @classmethod
    def random(cls, seeds: list[int]) -> Teams:
        shape = (AGENTS, STATES, OPERATIONS)
        pay, longest, move = [], [], []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            pay.append(rng.random((AGENTS, STATES, PRIVATE, OPERATIONS)) ** 2)  # few operations pay well
            longest.append(rng.integers(1, 5, shape))
            move.append(rng.dirichlet(np.full(STATES, 0.2), shape))  # an operation leads to one or two states
        return cls(np.stack(pay), np.stack(longest), np.stack(move))

    def __getitem__(self, which) -> Teams:
        return Teams(self.pay[which], self.longest[which], self.move[which])


def update(q, reward, discount, message, alpha):
    """The new Q_i(o, a): reward is R, discount gamma^tau, message the recipient's scalar. Numbers or arrays.

    >>> update(1.0, reward=2.0, discount=0.5, message=4.0, alpha=0.25)  # a quarter of the way from 1 to 2 + 0.5 * 4
    1.75
    """
    return q + alpha * (reward + discount * message - q)


def backup(teams: Teams, value: np.ndarray) -> np.ndarray:
    """Q [E, N, X, Y, A] on the true model, if the recipient is worth ``value`` [E, N, X]; a = operation * N + to."""
    taus = np.arange(1, teams.longest.max() + 1)
    chance = (taus <= teams.longest[..., None]) / teams.longest[..., None]
    discount = (chance * GAMMA**taus).sum(-1)  # E gamma^tau, [E, N, X, O]
    earned = teams.pay * ((1 - discount) / (1 - GAMMA))[:, :, :, None]
    after = np.einsum("enxoz,erz->enxor", teams.move, value) * discount[..., None]
    q = earned[..., None] + after[:, :, :, None]
    return q.reshape(*q.shape[:4], OPERATIONS * AGENTS)


def oracle(teams: Teams) -> np.ndarray:
    """Q* [E, N, X, Y, A] by value iteration: what one who knows everything would do."""
    value = np.zeros(teams.move.shape[:3])
    for _ in range(300):
        q = backup(teams, value)
        value = q.max(-1).mean(-1)  # the recipient's coin has not been thrown yet
    return q


def worth(teams: Teams, policy: np.ndarray) -> np.ndarray:
    """Exact value [E] of ``policy`` (actions, [E, N, X, Y]), the mean over all starts."""
    value = np.zeros(teams.move.shape[:3])
    for _ in range(300):
        q = backup(teams, value)
        value = np.take_along_axis(q, policy[..., None], -1)[..., 0].mean(-1)
    return value.mean((1, 2))


def see(x, cells):
    """The interface: artifact 0 .. 11 as one of ``cells`` pieces.

    >>> [see(x, 4) for x in (0, 2, 3, 11)]
    [0, 0, 1, 3]
    """
    return x * cells // STATES


def greedy(q: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """The policy [R, N, X, Y] of learned tables q [R, N, X, Y, A] whose interfaces have ``cells`` [R] pieces."""
    seen = see(np.arange(STATES), cells[:, None])
    return q.argmax(-1)[np.arange(len(q))[:, None], :, seen].transpose(0, 2, 1, 3)


def ic_q(
    teams: Teams, cells: np.ndarray, talk: np.ndarray, marks: tuple[int, ...], seed: int = 0, epsilon: float = 0.3
) -> dict[int, np.ndarray]:
    """IC-Q for R runs at once; run r lives in team r. Returns the tables [R, N, X, Y, A] at each of ``marks``.

    cells: [R] pieces of the interface (rows of the table beyond them stay 0).
    talk: [R] 1 if the recipient answers with its scalar, 0 if the holder looks into its own table instead.
    """
    rng, runs, tables = np.random.default_rng(seed), len(cells), {}
    rows, actions = np.arange(runs), OPERATIONS * AGENTS
    q = np.zeros((runs, AGENTS, STATES, PRIVATE, actions))
    visits = np.zeros_like(q)
    cumulative = teams.move.cumsum(-1)
    who, x, y = np.zeros(runs, int), rng.integers(STATES, size=runs), rng.integers(PRIVATE, size=runs)
    for step in range(1, max(marks) + 1):
        u = rng.random((5, runs))
        o = see(x, cells)
        a = np.where(u[0] < epsilon, (u[1] * actions).astype(int), q[rows, who, o, y].argmax(-1))
        operation, to = a // AGENTS, a % AGENTS
        tau = 1 + (u[2] * teams.longest[rows, who, x, operation]).astype(int)
        discount = GAMMA**tau
        reward = teams.pay[rows, who, x, y, operation] * (1 - discount) / (1 - GAMMA)
        x_next = np.minimum((cumulative[rows, who, x, operation] < u[3, :, None]).sum(-1), STATES - 1)
        y_next = (u[4] * PRIVATE).astype(int)
        message = q[rows, np.where(talk == 1, to, who), see(x_next, cells), y_next].max(-1)
        here = (rows, who, o, y, a)
        visits[here] += 1
        q[here] = update(q[here], reward, discount, message, visits[here] ** -0.7)
        who, x, y = to, x_next, y_next
        if step in marks:
            tables[step] = q.copy()
    return tables


def gap(q_star: np.ndarray, cells: int) -> np.ndarray:
    """The interface gap [E] of ``cells`` pieces: how far Q* [E, N, X, Y, A] differs inside one piece, at most."""
    size = STATES // cells
    pieces = q_star.reshape(*q_star.shape[:2], cells, size, *q_star.shape[3:])
    return (pieces.max(3) - pieces.min(3)).max((1, 2, 3, 4))


def measure(seeds: list[int], marks: tuple[int, ...]) -> dict:
    """Value / oracle's value. "cells": [len(CELLS), E]; "steps": [len(marks), E] at the full interface; "silent": [E],
    the full interface without the scalar (the holder asks itself); "random": [E], a random policy; "best": [E], the
    oracle's value; "loss" and "gap": [len(CELLS), E]."""
    teams, last = Teams.random(seeds), max(marks)
    which = np.tile(np.arange(len(seeds)), len(CELLS) + 1)
    cells = np.repeat([*CELLS, STATES], len(seeds))
    talk = np.repeat([1] * len(CELLS) + [0], len(seeds))
    tables = ic_q(teams[which], cells, talk, marks)
    q_star = oracle(teams)
    best = worth(teams, q_star.argmax(-1))
    value = {mark: worth(teams[which], greedy(q, cells)).reshape(-1, len(seeds)) for mark, q in tables.items()}
    rng = np.random.default_rng(0)
    random = [worth(teams, rng.integers(OPERATIONS * AGENTS, size=q_star.shape[:4])) for _ in range(20)]
    return {
        "cells": value[last][:-1] / best,
        "steps": np.stack([value[mark][-2] for mark in marks]) / best,
        "silent": value[last][-1] / best,
        "random": np.mean(random, 0) / best,
        "loss": best - value[last][:-1],
        "best": best,
        "gap": np.stack([gap(q_star, c) for c in CELLS]),
    }


def claims(quick: bool = False) -> list[Claim]:
    seeds = list(range(3 if quick else 5))
    marks = (1_000, 3_000, 10_000, 20_000) if quick else (3_000, 10_000, 30_000, 60_000)
    m = measure(seeds, marks)
    full, means = m["cells"][-1], m["cells"].mean(1)
    rises, kept = np.diff(means), full - m["silent"]
    bound = 2 * m["gap"] / (1 - GAMMA) ** 2
    said = bound[1:-1].min()  # of the interfaces that hide something yet not everything
    over = f"{len(seeds)} teams"
    return [
        Claim(
            "IC-Q with an interface that hides nothing matches the centralized oracle (0.98 of it, mean over teams)",
            f"{full.mean():.3f} of its value, lowest {full.min():.3f} ({over}, {max(marks):,} handoffs); "
            f"a random policy {m['random'].mean():.2f}",
            "shown" if full.mean() >= 0.98 else "reversed" if full.mean() <= m["random"].mean() else "not shown",
        ),
        Claim(
            "the more cells the interface has, the better (means over teams rise from each to the next)",
            f"{', '.join(f'{v:.2f}' for v in means)} with {', '.join(map(str, CELLS))} cells "
            f"(sd up to {m['cells'].std(1, ddof=1).max():.2f}, {over})",
            "shown" if (rises > 0).all() else "reversed" if (rises < 0).all() else "not shown",
        ),
        Claim(
            "the one scalar is what coordinates: who asks its own table instead does worse in every team",
            f"{m['silent'].mean():.3f} without, {full.mean():.3f} with; gain {kept.min():.3f} to {kept.max():.3f}",
            "shown" if (kept > 0).all() else "reversed" if (kept < 0).all() else "not shown",
        ),
        Claim(
            "the interface-gap bound 2e/(1-gamma)^2 says something: it is below the largest value, 1/(1-gamma)",
            f"smallest bound {said:.0f} against {1 / (1 - GAMMA):.0f}; largest loss measured {m['loss'].max():.2f}",
            "shown" if said < 1 / (1 - GAMMA) else "not shown",
        ),
    ]
