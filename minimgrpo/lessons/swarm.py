"""Lesson 16. Guided black-box consensus: swarms on a graph agree on a minimum, a guide tunes them (LAC-MAS).

Source: arXiv 2605.00691, read in full. N agents on a fixed graph minimise F(x) = mean_i f_i(x). Agent i can only
evaluate its own f_i, with a swarm of P particles. A round of the executor (MASOIE, in ``_swarm_executor``) is

    internal   level-based learning: sort the particles, cut them into levels, and let each learn from two particles
               p1, p2 of better levels:  v <- r1 v + r2 (x_p1 - x) + 0.4 r3 (x_p2 - x),  x <- x + v
    external   particle p of all agents moves towards its namesakes next door:
               u <- w r psi u + sum_k a_ik (x_p^k - x_p^i),  x <- x + u,  v <- u

A guide (in the paper a language model that is given rules in words) refreshes two things on a schedule: the
coefficient w (``act``: d if the swarm's divergence D_i = mean_p |x_ip - mu_i|^2 is high, c if it is low, 1 in
between) and the weights a_ik (``coop``: 0.3 - 0.5 for neighbours of low fitness and divergence, 0.1 - 0.2 for bad
ones; rows sum to 1). Ours is a table of rules; any callable with the same arguments can take its place.

What is loose in the paper
- Eq. 7 read literally, v <- w (r * v), holds nothing of the objective (``literal``): from the executor's start, v = 0,
  nothing ever moves. We read w as scaling the momentum.
- Theorem 4.1 assumes the vanishing perturbation that makes it true (A4, A5).
- Rows of A that sum to 1 while columns do not move the point of consensus: the agents minimise sum_i pi_i f_i, where
  pi A = pi, not the mean. f_k of agents with different objectives are not comparable. ``metropolis`` repairs A.

Not given in the paper, so ours: d1, d2 (0.01 and 0.3 of the first divergence), w = 1 in between, c and d that start in
the middle of their ranges 1 - 1.8 and 0.5 - 1, what "stagnates" and "slowly" mean (set so that the rules fire at all),
the schedule's shares, T, P, psi. Small problems, rules of ours: nothing here is certain about the paper's own results.

Arrays: B seeds at once, N agents, P particles, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

from minimgrpo.lessons import Claim
from minimgrpo.lessons._swarm_executor import FUNCTIONS, Swarms

LOW, HIGH = 0.01, 0.3  # d1, d2: shares of the divergence that an agent's swarm started with
SCHEDULE = {"act": (0.2, 0.5), "coop": (0.3, 0.6, 0.9)}  # when the guide refreshes what, in shares of T
STAGNANT, SLOW = 0.05, 0.2  # what "stagnates" and "slowly" mean, as relative falls in a round
SPREAD = 0.1  # how far apart the agents' functions are; much more, and nothing is left of rastrigin's valleys


def ring(agents: int) -> np.ndarray:
    """Who hears whom, [N, N] bool: oneself and both neighbours."""
    eye = np.eye(agents, dtype=bool)
    return eye | np.roll(eye, 1, 0) | np.roll(eye, -1, 0)


def on_graph(weights: np.ndarray, graph: np.ndarray) -> np.ndarray:
    """Proposed weights [..., N, N] as rows that sum to 1 and are 0 outside the graph; a row of nothing becomes uniform.

    >>> on_graph(np.array([[3.0, 1.0, 9.0], [1.0, 1.0, -5.0], [9.0, 0.0, 0.0]]), np.eye(3) + np.eye(3, k=1) > 0)
    array([[0.75, 0.25, 0.  ],
           [0.  , 1.  , 0.  ],
           [0.  , 0.  , 1.  ]])
    """
    weights = np.where(graph, np.maximum(weights, 0), 0.0)
    weights = np.where(weights.sum(-1, keepdims=True) > 0, weights, graph)
    return weights / weights.sum(-1, keepdims=True)


def metropolis(a: np.ndarray) -> np.ndarray:
    """The weights [..., N, N] with min(a_ik, a_ki) between agents, the rest kept: rows and columns sum to 1."""
    between = np.minimum(a, np.swapaxes(a, -1, -2)) * (1 - np.eye(a.shape[-1]))
    return between + np.eye(a.shape[-1]) * (1 - between.sum(-1, keepdims=True))


def perron(a: np.ndarray) -> np.ndarray:
    """How much each agent's start counts in the consensus: pi [N] with pi A = pi and sum 1."""
    n = len(a)
    return np.linalg.lstsq(np.vstack([a.T - np.eye(n), np.ones(n)]), np.eye(n + 1)[n], rcond=None)[0]


def literal(x: np.ndarray, v: np.ndarray, w: float, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 7 as printed: the velocity is scaled, and that is all."""
    v = w * r * v
    return x + v, v


# ---------------------------------------------------------------------------------------------------------- the guide


def coefficient(share: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """w for each agent; share is its divergence over its first.

    >>> coefficient(np.array([0.001, 0.1, 0.9]), c=1.5, d=0.6)
    array([1.5, 1. , 0.6])
    """
    return np.where(share > HIGH, d, np.where(share < LOW, c, 1.0))


def act_rule(c, d, share, progress):
    """New (c, d), all [B, N]. progress: relative fall of the mean fitness in the last round. Two rules:
    stagnation at low divergence raises c (up to 1.8), slow progress at high divergence raises d (up to 1)."""
    c = np.where((progress < STAGNANT) & (share < LOW), np.minimum(c + 0.2, 1.8), c)
    d = np.where((progress < SLOW) & (share > HIGH), np.minimum(d + 0.1, 1.0), d)
    return c, d


def coop_rule(fitness, divergence, graph):
    """Proposed weights [B, N, N] from each agent's mean fitness and divergence [B, N]: 0.4 for a neighbour (or oneself)
    that is no worse than the neighbourhood's mean in both, 0.15 if worse in both, else 0.25."""
    near = graph / graph.sum(-1, keepdims=True)
    good = sum((value[:, None] <= (value @ near.T)[..., None]).astype(int) for value in (fitness, divergence))
    return np.array([0.15, 0.25, 0.4])[good]


def pcg(t: int, T: int) -> set[str]:
    """What the guide refreshes in round t.

    >>> {t: sorted(pcg(t, 10)) for t in range(12) if pcg(t, 10)}
    {2: ['act'], 3: ['coop'], 5: ['act'], 6: ['coop'], 9: ['coop']}
    """
    return {kind for kind, shares in SCHEDULE.items() if t in [ceil(round(share * T, 9)) for share in shares]}


def run(
    function: str,
    seeds: int,
    act: Callable | None = None,
    coop: Callable | None = None,
    rounds: int = 150,
    T: int = 40,
    agents: int = 8,
    particles: int = 20,
    dimensions: int = 10,
) -> dict:
    """B = ``seeds`` runs, the same problems and starts for every guide. After round T, and without a guide, w = 1 and A
    is uniform. Returns "quality" and "disagreement" [rounds, B], "calls" [(round, kind)], "weights" (last guided A)."""
    rng, graph = np.random.default_rng(0), ring(agents)
    shift = rng.uniform(-2, 2, (seeds, 1, dimensions)) + rng.normal(0, SPREAD, (seeds, agents, dimensions))
    swarms = Swarms(function, shift, particles, rng)
    plain = guided = np.broadcast_to(on_graph(graph, graph), (seeds, agents, agents))
    c, d, first = np.full((seeds, agents), 1.4), np.full((seeds, agents), 0.75), swarms.divergence()
    mean, acting, calls, quality, disagreement = swarms.fitness().mean(-1), False, [], [], []
    for t in range(1, rounds + 1):
        swarms.internal()
        due, fitness = pcg(t, T), swarms.fitness().mean(-1)
        if act and "act" in due:
            progress = (mean - fitness) / (np.abs(mean) + 1e-12)
            c, d = act(c, d, swarms.divergence() / first, progress)
            acting = True
            calls.append((t, "act"))
        if coop and "coop" in due:
            guided = on_graph(coop(fitness, swarms.divergence(), graph), graph)
            calls.append((t, "coop"))
        mean = fitness
        w = coefficient(swarms.divergence() / first, c, d) if acting and t <= T else 1.0
        swarms.external(guided if t <= T else plain, w)
        quality.append(swarms.quality())
        disagreement.append(swarms.disagreement())
    return {"quality": np.stack(quality), "disagreement": np.stack(disagreement), "calls": calls, "weights": guided}


# -------------------------------------------------------------------------------- where the weights move the consensus


def quadratics(agents: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f_i(x) = q_i (x - m_i)^2 / 2 for numbers x, and weights that favour neighbours of low f at the true optimum."""
    rng = np.random.default_rng(seed)
    q, m = rng.uniform(0.5, 1.5, agents), rng.normal(0, 1, agents)
    f = q * (optimum(np.ones(agents), q, m) - m) ** 2 / 2
    return q, m, on_graph(coop_rule(f[None], np.zeros((1, agents)), ring(agents))[0], ring(agents))


def optimum(pi: np.ndarray, q: np.ndarray, m: np.ndarray) -> float:
    """Closed form of the minimum of sum_i pi_i q_i (x - m_i)^2 / 2."""
    return float((pi * q * m).sum() / (pi * q).sum())


def agreed(a: np.ndarray, q: np.ndarray, m: np.ndarray, eta: float = 1e-8) -> np.ndarray:
    """Where x <- A x - eta q (x - m) comes to rest, [N]: consensus and gradient steps, for small steps."""
    return np.linalg.solve(np.eye(len(a)) - a + eta * np.diag(q), eta * q * m)


def reliability(draws: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors [draws] of the consensus on a number that agents measure with different noise: equal weights, and
    weights that favour reliable neighbours (1 / variance)."""
    rng, graph = np.random.default_rng(seed), ring(8)
    noise = np.array([0.2, 0.2, 2.0, 0.2, 2.0, 0.2, 0.2, 2.0])
    measured = noise * rng.normal(size=(draws, 8))  # the number is 0
    plain, guided = (perron(on_graph(weights, graph)) for weights in (np.ones((8, 8)), np.tile(noise**-2.0, (8, 1))))
    return (measured @ plain) ** 2, (measured @ guided) ** 2


# ----------------------------------------------------------------------------------------------------- what is claimed


ARMS = {
    "base": {},
    "act": {"act": act_rule},
    "leave": {"act": lambda c, d, share, progress: (c, d)},  # the control: c and d stay as they start
    "coop": {"coop": coop_rule},
    "full": {"act": act_rule, "coop": coop_rule},
}


def rounds_to(disagreement: np.ndarray, tolerance: float = 1e-6) -> np.ndarray:
    """Rounds [B] until the agents agree for good; all where they never do. Communication is in proportion to it."""
    last = len(disagreement) - (disagreement[::-1] >= tolerance).argmax(0)  # the last round above
    return np.where((disagreement < tolerance).all(0), 0, last)


def fall(change: np.ndarray) -> tuple[str, str]:
    """(measured, verdict) of paired relative changes: shown if their mean is below -1 % and below -2 standard errors,
    reversed if it is as far above 0. Smaller changes are of no use, however sure."""
    mean, error = change.mean(), change.std(ddof=1) / change.size**0.5
    least = max(0.01, 2 * error)
    verdict = "shown" if mean < -least else "reversed" if mean > least else "not shown"
    return f"{mean:+.1%} ± {error:.1%} (standard error, {change.size} paired runs)", verdict


def by_function(changes: np.ndarray) -> str:
    """[functions, seeds] -> the mean change and its standard error for each function."""
    means, errors = changes.mean(1), changes.std(1, ddof=1) / changes.shape[1] ** 0.5
    rows = zip(FUNCTIONS, means, errors, strict=True)
    return ", ".join(f"{name} {mean:+.1%} ± {error:.1%}" for name, mean, error in rows)


def claims(quick: bool = False) -> list[Claim]:
    seeds = 4 if quick else 16
    runs = {arm: [run(function, seeds, **guide) for function in FUNCTIONS] for arm, guide in ARMS.items()}
    F = {arm: np.stack([r["quality"][-1] for r in results]) for arm, results in runs.items()}
    rounds = {arm: np.stack([rounds_to(r["disagreement"]) for r in results]) for arm, results in runs.items()}
    share = F["act"] / F["leave"] - 1
    pooled, share_verdict = fall(share)
    apart = max(r["disagreement"][-1].max() for r in runs["base"])
    q, m, a = quadratics()
    true, moved = optimum(np.ones(8), q, m), optimum(perron(a), q, m)
    error = np.abs(agreed(a, q, m) - moved).max()
    repaired = np.abs(agreed(metropolis(a), q, m) - true).max()
    plain, guided = reliability()
    rng = np.random.default_rng(0)
    x, v = rng.uniform(-5, 5, (8, 20, 10)), np.zeros((8, 20, 10))  # at rest, as the executor starts
    start = FUNCTIONS["sphere"](x).mean(1)
    for _ in range(150):
        x, v = literal(x, v, 1.0, rng.random(v.shape))
    printed = FUNCTIONS["sphere"](x).mean(1) / start - 1
    return [
        Claim(
            "without a guide the agents agree (disagreement below 1e-6 in every run)",
            f"at most {apart:.0e} after 150 rounds ({seeds} seeds, {len(FUNCTIONS)} functions)",
            "shown" if apart < 1e-6 else "not shown",
        ),
        Claim("guided action (act) lowers F", *fall(F["act"] / F["base"] - 1)),
        Claim(
            "it is the guide: act lowers F against c and d that nobody touches",
            f"{pooled}: {by_function(share)}",
            share_verdict,
        ),
        Claim("guided action (act) needs fewer rounds to agree", *fall(rounds["act"] / rounds["base"] - 1)),
        Claim("guided cooperation (coop) lowers F", *fall(F["coop"] / F["base"] - 1)),
        Claim("guided cooperation (coop) needs fewer rounds to agree", *fall(rounds["coop"] / rounds["base"] - 1)),
        Claim("both together lower F", *fall(F["full"] / F["base"] - 1)),
        Claim("Eq. 7 read literally lowers f (sphere, one swarm)", *fall(printed)),
        Claim(
            "row-stochastic guidance leaves the optimum where it is (8 quadratics, seed 0)",
            f"moved from {true:.3f} to {moved:.3f}; the iteration agrees with the closed form to {error:.0e}",
            "reversed" if abs(moved - true) > 1e-3 and error < 1e-6 else "shown" if error < 1e-6 else "not shown",
        ),
        Claim(
            "weights repaired to have columns that sum to 1 (metropolis) leave it there",
            f"off by {repaired:.0e}",
            "shown" if repaired < 1e-6 else "not shown",
        ),
        Claim(
            "favouring reliable neighbours helps when they differ in noise (squared error of the consensus)",
            *fall((guided - plain) / plain.mean()),
        ),
    ]
