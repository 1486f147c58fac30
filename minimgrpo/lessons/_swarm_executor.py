"""The executor of lesson 16 (MASOIE): swarms that learn at home, then move towards their neighbours.

Source: the public code of arXiv 2605.00691. ``swarm`` gives the steps in words and what is ours in them.

Arrays: B seeds at once, N agents, P particles, D dimensions.
"""

from __future__ import annotations

import numpy as np

LEVELS = np.array([4, 6, 8, 10])  # how many levels an agent may cut its particles into: chosen by what gained of late
PSI = 1.0
FUNCTIONS = {
    "sphere": lambda z: (z**2).sum(-1),
    "rastrigin": lambda z: (z**2 - 10 * np.cos(2 * np.pi * z) + 10).sum(-1),
    "rosenbrock": lambda z: (100 * (z[..., 1:] - z[..., :-1] ** 2) ** 2 + (1 - z[..., :-1]) ** 2).sum(-1),
}


class Swarms:
    """B x N swarms. ``shift`` [B, N, D]: where agent i has moved the function to, so f_i(x) = function(x - shift_i)."""

    def __init__(self, function: str, shift: np.ndarray, particles: int, rng: np.random.Generator):
        runs, agents, dimensions = shift.shape
        self.function, self.shift, self.rng = FUNCTIONS[function], shift, rng
        self.x = rng.uniform(-5, 5, (runs, agents, particles, dimensions))
        self.v, self.u = np.zeros_like(self.x), np.zeros_like(self.x)
        self.gains = np.zeros((runs, agents, len(LEVELS)))  # of late, for each number of levels

    def fitness(self) -> np.ndarray:
        """f_i of agent i's own particles, [B, N, P]."""
        return self.function(self.x - self.shift[:, :, None])

    def centroid(self) -> np.ndarray:
        return self.x.mean(2)

    def divergence(self) -> np.ndarray:
        """D_i, [B, N]."""
        return ((self.x - self.centroid()[:, :, None]) ** 2).sum(-1).mean(-1)

    def disagreement(self) -> np.ndarray:
        """Root mean square distance of the agents' centroids from their mean, [B]."""
        mu = self.centroid()
        return ((mu - mu.mean(1, keepdims=True)) ** 2).sum(-1).mean(-1) ** 0.5

    def quality(self) -> np.ndarray:
        """F at the mean of the centroids, [B]: what the agents would give as their common answer."""
        return self.function(self.centroid().mean(1)[:, None] - self.shift).mean(1)

    def internal(self) -> None:
        """Each agent's own step: v <- r1 v + r2 (x_p1 - x) + 0.4 r3 (x_p2 - x), x <- x + v."""
        fitness, particles = self.fitness(), self.x.shape[2]
        order = fitness.argsort(-1)
        rank = order.argsort(-1)
        choice = (7 * self.gains + self.rng.gumbel(size=self.gains.shape)).argmax(-1)[..., None]  # ~ exp(7 gain)
        levels = LEVELS[choice]
        level = rank * levels // particles
        better = (self.rng.random((2, *rank.shape)) * level).astype(int)  # two draws of a better level
        better.sort(0)
        teachers = ((better + self.rng.random(better.shape)) * particles / levels).astype(int)
        first, second = (
            np.take_along_axis(self.x, np.take_along_axis(order, ranks, -1)[..., None], 2) for ranks in teachers
        )
        r = self.rng.random((3, *self.x.shape))
        pull = r[0] * self.v + r[1] * (first - self.x) + 0.4 * r[2] * (second - self.x)
        self.v = np.where(level[..., None] > 0, pull, self.v)
        self.x = np.where(level[..., None] > 0, self.x + self.v, self.x)  # the best level stays
        before, after = fitness.min(-1), self.fitness().min(-1)
        gain = np.clip((before - after) / (np.abs(before) + 1e-12), 0, 1)[..., None]
        np.put_along_axis(self.gains, choice, gain, -1)

    def external(self, a: np.ndarray, w: np.ndarray | float = 1.0) -> None:
        """Towards the namesakes: u <- w r psi u + sum_k a_ik (x_p^k - x_p^i), x <- x + u, v <- u.
        a: [B, N, N] or [N, N], rows sum to 1. w: [B, N], scales the momentum."""
        w = np.broadcast_to(w, self.x.shape[:2])[..., None, None]
        pull = np.einsum("...ik,...kpd->...ipd", a, self.x) - self.x
        self.u = w * PSI * self.rng.random(self.x.shape) * self.u + pull
        self.x = self.x + self.u
        self.v = self.u
