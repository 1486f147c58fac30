"""Lesson 11. One game, different news: what players must see of each other to learn as one.

Source: arXiv 2608.12753 (mQ-learning, mQ-learning-intervals, mEXC, mEXC-Bellman), read in full; of its ancestors for
bandits (mUCB, mDSEE: Chang, Jafarnia-Jahromi and Jain 2021) we read the abstract, and their constants are ours.

M players, H steps, states x, joint action a (one component each), mean reward in [0, 1]. All see the state. What else?

    A  the same reward sample for all; nobody sees the others' actions         -> mQ
    B  the joint action; each player has its own copy of the reward            -> mQ-intervals
    C  neither                                                                 -> mEXC, mEXC-Bellman

What they may agree on before: an order of the joint actions. All players keep a table over *joint* actions:

    Q <- (1 - alpha_t) Q + alpha_t (r + V_{h+1}(x') + b_t),   alpha_t = (H + 1) / (H + t),   b_t = c sqrt(H^3 iota / t),
    V = min(H, max_a Q), and each plays its component of the first joint action with the largest Q       (Alg. 1, mQ)

mQ-intervals keeps an upper (+b_t) and a lower (-b_t) table. All know the same candidate (the least tried joint action
still wanted); a player that holds it for worse than another wanted one deviates, all see it, and the candidate is
struck off. mEXC tries the least tried joint action for K' = (SA)^(1/3) K^(2/3) episodes, then plays the table for
ever; mEXC-Bellman plans on the estimated model instead.

Where we differ, and why
- The theorem for C needs a gap: with two equally good conventions each player's noise picks its own (``coord``).
- Alg. 2 writes one V in both bounds. With the optimistic V the lower table is no lower bound; ``sound``: one V each.
- K' as printed leaves out H (balancing the two terms gives (H^2 SA iota)^(1/3) K^(2/3)); we use it as printed.
- "Every (x, a) is visited K' / (SA) times" holds if every x is reached: true in our games, not in general.
- The constant c of the theory explores for ever at this size: c = 0.03 in A and C, 0.05 in B.
- Derived by us: ``slack``, commit to the first joint action within slack of the best; and "believe": credit what one
  intended, whatever the others did.

Regret is exact: the played policy is evaluated on the true model, averaged over starts. Arrays: B seeds at once, M
players, H steps, S states, A joint actions (= N^M; joint action a has components of base N, player 0 first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minimgrpo.lessons import Claim

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
        joint, means, moves = ACTIONS**PLAYERS, [], []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            mean = rng.random((steps, states, joint))
            move = rng.dirichlet(np.ones(states), (steps, states, joint))
            if kind != "random":
                mean[:] = 0.1
                mean[..., 0] = {"coord": 0.9, "gap": 0.5}[kind]
                mean[..., ACTIONS + 1] = 0.9
                move[:] = move[:, :, :1]
            means.append(mean)
            moves.append(move)
        return cls(np.stack(means), np.stack(moves))

    def scales(self) -> tuple[int, np.ndarray]:
        """Actions per player, and the weight of each player's component in a joint action."""
        each = round(self.mean.shape[-1] ** (1 / self.players))
        return each, each ** np.arange(self.players)[::-1]

    def meet(self, wants: np.ndarray, deviates: np.ndarray | int = 0) -> np.ndarray:
        """The joint action [B, ...] of players who each play their component of wants [B, M, ...], or the next one.

        >>> Game.make("gap", [0]).meet(np.array([[0, 4]]))  # one plays its part of (0, 0), the other of (1, 1): (0, 1)
        array([1])
        """
        each, scale = self.scales()
        scale = scale.reshape(-1, *[1] * (wants.ndim - 2))
        return ((wants // scale + deviates) % each * scale).sum(1)

    def optimal(self) -> np.ndarray:
        """Q* [B, H, S, A]."""
        q, value = np.zeros_like(self.mean), np.zeros(self.mean.shape[::2])
        for h in reversed(range(self.mean.shape[1])):
            q[:, h] = self.mean[:, h] + np.einsum("bsaz,bz->bsa", self.move[:, h], value)
            value = q[:, h].max(-1)
        return q

    def value(self, joint: np.ndarray) -> np.ndarray:
        """Exact value [B] of a policy of joint actions [B, H, S]."""
        (runs, steps, states), value = joint.shape, np.zeros(self.mean.shape[::2])
        b, s = np.arange(runs)[:, None], np.arange(states)
        for h in reversed(range(steps)):
            a = joint[:, h]
            value = self.mean[b, h, s, a] + (self.move[b, h, s, a] * value[:, None]).sum(-1)
        return value.mean(-1)

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


def learn(q, t, reward, after, bonus, steps):
    """The new Q on the t-th visit. steps is H; after is V_{h+1}(x').

    >>> learn(3.0, 1, 1.0, 2.0, 0.5, steps=3), learn(3.0, 5, 1.0, 2.0, 0.5, steps=3)  # alpha is 1, then 1/2
    (3.5, 3.25)
    """
    return q + (steps + 1) / (steps + t) * (reward + after + bonus - q)


def bonus_scale(game: Game, episodes: int, c: float, private: bool) -> float:
    """c sqrt(H^3 iota), with iota = log(S A T / p), p = 0.1, and M inside where rewards are private."""
    _, steps, states, joint = game.mean.shape
    players = game.players if private else 1
    return c * (steps**3 * np.log(players * states * joint * episodes * steps / 0.1)) ** 0.5


def _after(value: np.ndarray, where: tuple, x: np.ndarray) -> np.ndarray:
    """V_{h+1}(x') of each player, [M, H, B]: value is [B, M, H, S]; after the last step it is 0."""
    b, m, h = where[:3]
    padded = np.concatenate([value, np.zeros_like(value[:, :, :1])], axis=2)
    return padded[b, m, h + 1, x[1:]]


def mq(game: Game, episodes: int, c: float = 0.03, common: bool = True, observed: bool = False, seed: int = 0):
    """mQ (Alg. 1), and what becomes of it with other news. Returns regret [B, K] and the tables [B, M, H, S, A].

    common: all see the same reward sample (A), or each draws its own.
    observed: the reward is credited to the joint action that was played (B), or to the one that the player intended.
    """
    rng, (runs, steps, states, joint) = np.random.default_rng(seed), game.mean.shape
    scale, best = bonus_scale(game, episodes, c, not common), game.optimal()[:, 0].max(-1).mean(-1)
    q = np.full((runs, game.players, steps, states, joint), float(steps))
    visits, regret = np.zeros_like(q), np.zeros((runs, episodes))
    b, m, h = np.arange(runs), np.arange(game.players)[:, None, None], np.arange(steps)[:, None]
    played, lost = None, None
    for k in range(episodes):
        wants = q.argmax(-1)  # the first of the largest, the same rule for all
        together = game.meet(wants)
        if played is None or (together != played).any():
            played, lost = together, best - game.value(together)
        regret[:, k] = lost
        x, a = game.walk(together, rng)
        reward = rng.random((1 if common else game.players, steps, runs)) < game.mean[b, h, x[:-1], a]
        here = (b, m, h, x[:-1], a if observed else wants[b, m, h, x[:-1]])
        visits[here] += 1
        after = _after(np.minimum(q.max(-1), steps), here, x)
        q[here] = learn(q[here], visits[here], reward, after, scale / visits[here] ** 0.5, steps)
    return regret, q


def mq_intervals(game: Game, episodes: int, c: float = 0.05, sound: bool = True, seed: int = 0):
    """mQ-intervals (Alg. 2), setting B. Returns regret [B, K], the lower tables [B, M, H, S, A] and the joint actions
    still wanted [B, H, S, A]. sound: the lower table is built on the lower V (printed: on the upper one)."""
    rng, (runs, steps, states, joint) = np.random.default_rng(seed), game.mean.shape
    scale, best = bonus_scale(game, episodes, c, private=True), game.optimal()[:, 0].max(-1).mean(-1)
    up = np.full((runs, game.players, steps, states, joint), float(steps))
    low, regret = np.zeros_like(up), np.zeros((runs, episodes))
    visits, wanted = np.zeros(game.mean.shape), np.ones(game.mean.shape, bool)
    b, m, h = np.arange(runs), np.arange(game.players)[:, None, None], np.arange(steps)[:, None]
    for k in range(episodes):
        candidate = np.where(wanted, visits, np.inf).argmin(-1)
        value_up = np.where(wanted[:, None], up, -np.inf).max(-1)
        value_low = np.where(wanted[:, None], low, -np.inf).max(-1)
        vetoes = np.take_along_axis(up, candidate[:, None, ..., None], -1)[..., 0] < value_low
        together = game.meet(np.repeat(candidate[:, None], game.players, 1), vetoes)
        regret[:, k] = best - game.value(together)
        x, a = game.walk(together, rng)
        struck = vetoes.any(1)[b, h, x[:-1]]
        wanted[b, h, x[:-1], candidate[b, h, x[:-1]]] &= ~struck
        visits[b, h, x[:-1], a] += 1
        t = visits[b, h, x[:-1], a]
        reward = rng.random((game.players, steps, runs)) < game.mean[b, h, x[:-1], a]
        here, bonus = (b, m, h, x[:-1], a), scale / t**0.5
        after_up = _after(np.minimum(value_up, steps), here, x)
        after_low = _after(np.maximum(value_low, 0), here, x) if sound else after_up
        up[here] = learn(up[here], t, reward, after_up, bonus, steps)
        low[here] = learn(low[here], t, reward, after_low, -bonus, steps)
    return regret, low, wanted


def explore_episodes(game: Game, episodes: int) -> int:
    """K' = (SA)^(1/3) K^(2/3) as printed, rounded up.

    >>> explore_episodes(Game.make("gap", [0]), 1000)  # S = 3, A = 9: 27^(1/3) = 3
    300
    """
    return int(np.ceil(round((game.mean[0, 0].size) ** (1 / 3) * episodes ** (2 / 3), 9)))


def mexc(game: Game, horizons: list[int], c: float = 0.03, bellman: bool = False, slack: float = 0.0, seed: int = 0):
    """mEXC and mEXC-Bellman (Alg. 3, 4), setting C. Returns total regret and regret per committed episode, both
    [len(horizons), B], for each K of ``horizons``. slack: commit to the first joint action that close to the best."""
    rng, (runs, steps, states, joint) = np.random.default_rng(seed), game.mean.shape
    scale, best = bonus_scale(game, max(horizons), c, private=True), game.optimal()[:, 0].max(-1).mean(-1)
    q = np.full((runs, game.players, steps, states, joint), float(steps))
    visits, earned, moved = np.zeros(game.mean.shape), np.zeros_like(q), np.zeros(game.move.shape)
    b, m, h = np.arange(runs), np.arange(game.players)[:, None, None], np.arange(steps)[:, None]
    spent, totals, lost = np.zeros(runs), [], []
    ends = {explore_episodes(game, K): K for K in horizons}
    for k in range(1, max(ends) + 1):
        together = visits.argmin(-1)
        spent += best - game.value(together)
        x, a = game.walk(together, rng)
        reward = rng.random((game.players, steps, runs)) < game.mean[b, h, x[:-1], a]
        visits[b, h, x[:-1], a] += 1
        t, here = visits[b, h, x[:-1], a], (b, m, h, x[:-1], a)
        earned[here] += reward
        moved[b, h, x[:-1], a, x[1:]] += 1
        q[here] = learn(q[here], t, reward, _after(np.minimum(q.max(-1), steps), here, x), scale / t**0.5, steps)
        if k in ends:
            table = _plan(earned, moved, visits) if bellman else q
            wants = (table >= table.max(-1, keepdims=True) - slack).argmax(-1)
            lost.append(best - game.value(game.meet(wants)))
            totals.append(spent + (ends[k] - k) * lost[-1])
    return np.stack(totals), np.stack(lost)


def _plan(earned: np.ndarray, moved: np.ndarray, visits: np.ndarray) -> np.ndarray:
    """Q [B, M, H, S, A] = estimated reward + estimated move @ V, backwards (Alg. 4)."""
    n = np.maximum(visits, 1)
    q, value = earned / n[:, None], np.zeros(earned.shape[:2] + earned.shape[3:4])
    for h in reversed(range(q.shape[2])):
        q[:, :, h] += np.einsum("bsaz,bmz->bmsa", moved[:, h] / n[:, h, ..., None], value)
        value = q[:, :, h].max(-1)
    return q


# ----------------------------------------------------------------------------------- the ancestors: one state, one step


def mucb(game: Game, rounds: int, common: bool = True, seed: int = 0) -> np.ndarray:
    """mUCB: every player runs UCB1 on joint actions, ties by the agreed order; actions are seen. Regret [B, K]."""
    rng, mean = np.random.default_rng(seed), game.mean[:, 0, 0]
    runs, joint = mean.shape
    b, m = np.arange(runs), np.arange(game.players)[:, None]
    earned, pulls, regret = np.zeros((runs, game.players, joint)), np.zeros((runs, joint)), np.zeros((runs, rounds))
    for k in range(rounds):
        n = np.maximum(pulls, 1)[:, None]
        index = np.where(pulls[:, None] == 0, np.inf, earned / n + (2 * np.log(k + 1) / n) ** 0.5)
        a = game.meet(index.argmax(-1))
        earned[b, m, a] += rng.random((1 if common else game.players, runs)) < mean[b, a]
        pulls[b, a] += 1
        regret[:, k] = mean.max(-1) - mean[b, a]
    return regret


def mdsee(game: Game, rounds: int, seed: int = 0) -> np.ndarray:
    """mDSEE, setting C: phase l tries every joint action l times, then commits for 2^l rounds. Regret [B, K]."""
    rng, mean = np.random.default_rng(seed), game.mean[:, 0, 0]
    runs, joint = mean.shape
    b, phase, regret = np.arange(runs), 0, []
    earned = np.zeros((runs, game.players, joint))
    while sum(len(part) for part in regret) < rounds:
        phase += 1
        earned += rng.binomial(phase, mean[:, None], earned.shape)
        regret.append(np.tile(mean.max(-1) - mean.T, (phase, 1)))
        a = game.meet(earned.argmax(-1))
        regret.append(np.tile(mean.max(-1) - mean[b, a], (2**phase, 1)))
    return np.concatenate(regret)[:rounds].T


# ------------------------------------------------------------------------------------------------ what is claimed


def slope(horizons: list[int], totals: np.ndarray) -> float:
    """Slope of log mean regret against log K: 1 is linear, 1/2 is sqrt(K), 0 has stopped. totals: [len(horizons), B].

    >>> round(slope([10, 1000], np.array([[3.0], [30.0]])), 6)
    0.5
    """
    return float(np.polyfit(np.log(horizons), np.log(totals.mean(1)), 1)[0])


def _totals(regret: np.ndarray, horizons: list[int]) -> np.ndarray:
    return np.stack([regret[:, :K].sum(1) for K in horizons])


def measure(seeds: Sequence[int], horizons: list[int]) -> dict:
    """Total regret [len(horizons), B] of each arm, "same_tables" (mQ against one table for all) and "broken" (share of
    lower bounds of the first step that lie above Q*, printed and sound; on random games at c = 0.2)."""
    K, coord, wild = max(horizons), Game.make("coord", seeds), Game.make("random", seeds)
    many = range(8 * len(seeds))  # where it is cheap
    bandits = [Game.make(kind, many, 1, 1) for kind in ("coord", "gap")]
    coords, gaps = Game.make("coord", many), Game.make("gap", many)
    regret, tables = mq(coord, K)
    one_regret, one_table = mq(replace(coord, players=1), K)
    arms = {
        "mq": regret,
        "naive": mq(coord, K, common=False, observed=True)[0],
        "intervals": mq_intervals(coord, K)[0],
        "believe": mq(coord, K, common=False)[0],
        "mucb": mucb(bandits[0], K),
        "mucb private": mucb(bandits[0], K, common=False),
        "mdsee gap": mdsee(bandits[1], K),
    }
    totals = {name: _totals(regret, horizons) for name, regret in arms.items()}
    totals["mexc gap"] = mexc(gaps, horizons)[0]
    totals["mexc"] = mexc(coords, horizons)[0]
    totals["bellman"] = mexc(coords, horizons, bellman=True)[0]
    totals["slack"] = mexc(coords, horizons, bellman=True, slack=0.3)[0]
    star = wild.optimal()[:, None, 0]
    broken = [(mq_intervals(wild, K // 2, 0.2, sound)[1][:, :, 0] > star).mean() for sound in (False, True)]
    same = bool((tables == one_table).all() and (regret == one_regret).all())
    return {"totals": totals, "same_tables": same, "broken": broken}


def claims(quick: bool = False) -> list[Claim]:
    seeds = list(range(2 if quick else 4))
    horizons = [250, 1000, 4000] if quick else [500, 2000, 8000]
    m = measure(seeds, horizons)
    slopes = {name: slope(horizons, totals) for name, totals in m["totals"].items()}

    def grows(claim: str, arm: str, low: float, high: float, reversed_at: float | None = None) -> Claim:
        """Shown if the slope lies in [low, high]; reversed if it is at least ``reversed_at`` (1 is linear)."""
        last = m["totals"][arm][-1]
        spread = f"regret {last.mean():.0f} ± {last.std(ddof=1):.0f} (sd, {last.size} seeds) at K = {horizons[-1]:,}"
        verdict = "shown" if low <= slopes[arm] <= high else "not shown"
        if verdict == "not shown" and reversed_at is not None and slopes[arm] >= reversed_at:
            verdict = "reversed"
        return Claim(claim, f"slope {slopes[arm]:.2f}; {spread}", verdict)

    mq_claim = grows("A: mQ is bitwise one central learner, and stops losing", "mq", -0.5, 0.3, 0.9)
    printed, sound = m["broken"]
    return [
        mq_claim if m["same_tables"] else replace(mq_claim, verdict="reversed"),
        grows("B: mQ with private rewards loses for ever, even if all actions are seen", "naive", 0.9, 1.1),
        grows("B: mQ-intervals stops losing", "intervals", -0.5, 0.5, 0.9),
        grows("C: mEXC loses no more than K^(2/3): unique optimum", "mexc gap", -0.5, 0.7, 0.9),
        grows("C: mEXC loses no more than K^(2/3): two equal conventions", "mexc", -0.5, 0.7, 0.9),
        grows("C: mEXC-Bellman loses no more than K^(2/3): two equal conventions", "bellman", -0.5, 0.7, 0.9),
        grows("C (ours): a commit with a slack of 0.3 repairs it (slope below 0.8)", "slack", -0.5, 0.8, 0.9),
        grows("C (ours, no guarantee): crediting what one intended stops losing", "believe", -0.5, 0.3, 0.9),
        Claim(
            "Alg. 2 as printed (one V in both bounds): the lower table is a lower bound",
            f"{printed:.0%} of its first-step entries lie above Q*, {sound:.0%} with a V each",
            "shown" if printed <= 0.01 else "reversed" if printed >= 0.1 and sound <= 0.01 else "not shown",
        ),
        grows("ancestor, A: mUCB loses like log K", "mucb", -0.5, 0.5, 0.9),
        grows("ancestor, B: mUCB with private rewards loses for ever", "mucb private", 0.9, 1.1),
        grows("ancestor, C: mDSEE loses almost like log K: unique optimum", "mdsee gap", -0.5, 0.5, 0.9),
    ]
