"""The games of lesson 11 (``asymmetry``), small and known, so that every regret is exact.

Arrays: B games at once (one per seed), M players, H steps, S states, A joint actions. A is N^M: joint action a has
components of base N, player 0 first, so with N = 3 joint action 5 is (1, 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

STATES, STEPS, ACTIONS, PLAYERS = 3, 3, 3, 2


@dataclass(frozen=True)
class Game:
    """mean: [B, H, S, A] mean rewards (samples are 0 or 1). move: [B, H, S, A, S]. Starts are uniform."""

    mean: np.ndarray
    move: np.ndarray
    players: int = PLAYERS

    @classmethod
    def make(cls, kind: str, seeds: Sequence[int], states: int = STATES, steps: int = STEPS) -> Game:
        """kind: "coord", conventions (0, 0) and (1, 1) pay 0.9, the rest 0.1; "gap", the same but (0, 0) pays 0.5;
        "random", all means and moves random. In the first two, moves do not depend on the actions."""
        shape, rngs = (steps, states, ACTIONS**PLAYERS), [np.random.default_rng(seed) for seed in seeds]
        mean = np.stack([rng.random(shape) for rng in rngs])
        move = np.stack([rng.dirichlet(np.ones(states), shape) for rng in rngs])
        if kind != "random":
            mean[:] = 0.1
            mean[..., 0] = {"coord": 0.9, "gap": 0.5}[kind]
            mean[..., ACTIONS + 1] = 0.9
            move[:] = move[..., :1, :]
        return cls(mean, move)

    def meet(self, wants: np.ndarray, deviates: np.ndarray | int = 0) -> np.ndarray:
        """The joint action [B, ...] of players who each play their component of wants [B, M, ...], or the next one.

        >>> Game.make("gap", [0]).meet(np.array([[0, 4]]))  # one plays its part of (0, 0), the other of (1, 1): (0, 1)
        array([1])
        """
        each = round(self.mean.shape[-1] ** (1 / self.players))  # actions per player
        scale = (each ** np.arange(self.players)[::-1]).reshape(-1, *[1] * (wants.ndim - 2))
        return ((wants // scale + deviates) % each * scale).sum(1)

    def optimal(self) -> np.ndarray:
        """Q* [B, H, S, A]."""
        return plan(self.mean, self.move)

    def value(self, joint: np.ndarray) -> np.ndarray:
        """Exact value [B] of a policy of joint actions [B, H, S]: that of a game without any other action."""
        chosen = (*np.indices(joint.shape, sparse=True), joint)
        return plan(self.mean[chosen][..., None], self.move[chosen][..., None, :])[:, 0].mean((-1, -2))

    @cached_property
    def best(self) -> np.ndarray:
        """The value [B] of the best policy."""
        return self.optimal()[:, 0].max(-1).mean(-1)

    def regret(self, joint: np.ndarray) -> np.ndarray:
        """What the policy [B, H, S] loses against the best one, [B]: exact, for no episode is sampled."""
        return self.best - self.value(joint)

    def walk(self, joint: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One episode: states [H + 1, B] and joint actions [H, B]."""
        runs, steps, states = joint.shape
        b, u = np.arange(runs), rng.random((steps + 1, runs))
        x, a = np.zeros((steps + 1, runs), int), np.zeros((steps, runs), int)
        x[0] = u[-1] * states
        for h in range(steps):
            a[h] = joint[b, h, x[h]]
            x[h + 1] = (self.move[b, h, x[h], a[h]].cumsum(-1)[:, :-1] < u[h, :, None]).sum(-1)
        return x, a

    def play(self, joint: np.ndarray, rng: np.random.Generator, common: bool = False) -> tuple:
        """One episode with rewards: which entries (b, m, h, x, a) of the players' tables it belongs to, the states x'
        [H, B] it went to, and the rewards [M, H, B]; common: one sample for all, [1, H, B]."""
        x, a = self.walk(joint, rng)
        b, m, h = np.arange(len(joint)), np.arange(self.players)[:, None, None], np.arange(len(a))[:, None]
        reward = rng.random((1 if common else self.players, *a.shape)) < self.mean[b, h, x[:-1], a]
        return (b, m, h, x[:-1], a), x[1:], reward

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Two tables for each player, [B, M, H, S, A]: one of H, which no return exceeds, and one of zeros."""
        zeros = np.repeat(np.zeros_like(self.mean)[:, None], self.players, axis=1)
        return zeros + self.mean.shape[1], zeros


def plan(mean: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Q [..., H, S, A] of acting best in a model with these mean rewards and moves [..., H, S, A, S]."""
    q, value = mean.copy(), np.zeros((*mean.shape[:-3], mean.shape[-2]))
    for h in reversed(range(mean.shape[-3])):
        q[..., h, :, :] += np.einsum("...saz,...z->...sa", move[..., h, :, :, :], value)
        value = q[..., h, :, :].max(-1)
    return q
