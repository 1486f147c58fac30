"""How teams fail without any learning: cascades, groupthink, and a context that everybody reads again.

Source: a textbook chapter, "20.7 Multi-Agent Collaboration and Agent Swarms". `credit` has its formulas and its code.

    chain     a step is right with p after a right one, with r after a wrong one: success s' = p s + r (1 - s)
    check     a flagged step is done once more; flags find a wrong step with ``detect``, a right one with ``alarm``
    herd      agents speak in turn and hear those before; a lead of two votes outweighs one's own signal (Bayes)
    context   K agents read C tokens each: K C; or one more reads them, and the K a summary of s: C + K s

"Error compounds exponentially" is a success that decays geometrically, p^n where nothing is ever repaired.

Our choices. Chains, votes and token counts are as simple as they can be and still fail; probabilities are given, not
measured on a model. A herd follows its rule even after the advocate has spoken. Two results follow from the rules:
the last of an odd number of voters cannot turn a lead of two, so an advocate there changes nothing; and who restates
private evidence votes as if alone. What an advocate does who votes early has to be measured.

Not shown here: benefits of "context overload", SWE-bench gains. Debate, swarm and advisor with a language model are
`minimgrpo.workflows`.
"""

from __future__ import annotations

import numpy as np

from minimgrpo.lessons import Claim


def chain(n: int, p: float = 0.85, repair: float = 0.1, detect: float = 0.0, alarm: float = 0.0) -> tuple[float, float]:
    """The success of n steps in a row, and their expected cost in calls.

    A step is right with p after a right one, and with ``repair`` after a wrong one. A wrong step is flagged with
    probability ``detect``, a right one with ``alarm``; a flagged step is done once more.

    >>> [round(chain(n)[0], 3) for n in (1, 3, 5)]
    [0.85, 0.653, 0.542]
    """
    success, calls = 1.0, 0.0
    for _ in range(n):
        first = success * p + (1 - success) * repair
        flagged = {q: q * alarm + (1 - q) * detect for q in (p, repair)}
        calls += 1 + success * flagged[p] + (1 - success) * flagged[repair]
        again = success * flagged[p] * p + (1 - success) * flagged[repair] * repair
        success = first * (1 - alarm) + again
    return success, calls


def vote(K: int, how: str, p: float = 0.65, teams: int = 20_000, seed: int = 0) -> tuple[float, float]:
    """Share of teams whose majority is right, and who are unanimously wrong. K is odd; each has a signal right with p.

    independent  everybody votes its own signal.
    herd         one after the other: whoever sees a lead of two votes with it (Bayes does), others their own signal.
    last advocate, third advocate: as herd, but the one in that place votes against the majority so far.
    restate      as herd, then everybody is made to state its private signal, and these are counted.
    """
    signals = np.where(np.random.default_rng(seed).random((teams, K)) < p, 1, -1)
    votes = signals.copy()
    if how not in ("independent", "restate"):
        seat = {"last advocate": K - 1, "third advocate": 2}.get(how)
        lead = np.zeros(teams, dtype=int)
        for k in range(K):
            votes[:, k] = np.where(abs(lead) >= 2, np.sign(lead), signals[:, k])
            if k == seat:
                votes[:, k] = np.where(lead == 0, signals[:, k], -np.sign(lead))
            lead += votes[:, k]
    return float((votes.sum(1) > 0).mean()), float((votes == -1).all(1).mean())


def context_cost(K: int, context: int, summary: int) -> tuple[int, int]:
    """Tokens read by K agents: each the whole context, or one more reads it, and the K a summary.

    >>> context_cost(5, 4000, 300), context_cost(1, 4000, 300)
    ((20000, 5500), (4000, 4300))
    """
    return K * context, context + K * summary


def verdict(differences: np.ndarray, at_least: float = 0.0) -> str:
    """Every seed above at_least: shown; every seed below 0, beyond rounding: reversed; else: not shown."""
    return "shown" if differences.min() > at_least else "reversed" if differences.max() < -1e-9 else "not shown"


def claims(quick: bool = False) -> list[Claim]:
    """Votes: nine agents, 5,000 (quick) or 20,000 teams on each of three seeds, mean ± std. The rest is exact."""
    teams = 5_000 if quick else 20_000
    right, unanimous = {}, {}
    for how in ("independent", "herd", "last advocate", "third advocate", "restate"):
        shares = np.array([vote(9, how, teams=teams, seed=seed) for seed in range(3)])
        right[how], unanimous[how] = shares.T

    def show(how: str) -> str:
        return f"{right[how].mean():.3f} ± {right[how].std(ddof=1):.3f}"

    plain, checked, blind = chain(5), chain(5, detect=0.8, alarm=0.2), chain(5, detect=0.3, alarm=0.3)
    costs = {K: context_cost(K, 4000, 300) for K in (1, 2, 5)}
    return [
        Claim(
            "redoing flagged steps saves a chain of five (by 0.1 or more)",
            f"{plain[0]:.3f} for 5 calls, {checked[0]:.3f} for {checked[1]:.1f} (exact; checks are free, redos count)",
            verdict(np.array([checked[0] - plain[0]]), 0.1),
        ),
        Claim(
            "so does redoing steps at random (flags that know nothing)",
            f"{blind[0]:.3f} for {blind[1]:.1f} calls (exact)",
            verdict(np.array([blind[0] - plain[0]]), 0.1),
        ),
        Claim(
            "agents who hear each other first vote worse (by 0.05 or more)",
            f"independent {show('independent')}, herd {show('herd')}; "
            f"unanimously wrong {unanimous['herd'].mean():.3f} of the herds",
            verdict(right["independent"] - right["herd"], 0.05),
        ),
        Claim(
            "a devil's advocate who votes last against the majority helps the herd",
            f"{show('last advocate')} against {show('herd')}",
            verdict(right["last advocate"] - right["herd"]),
        ),
        Claim(
            "a devil's advocate who votes third against the majority helps the herd",
            f"{show('third advocate')} against {show('herd')}",
            verdict(right["third advocate"] - right["herd"]),
        ),
        Claim(
            "making everybody state its own evidence helps the herd (by 0.05 or more)",
            f"{show('restate')} against {show('herd')}",
            verdict(right["restate"] - right["herd"], 0.05),
        ),
        Claim(
            "one reader and summaries cost fewer tokens than a context for everybody, whatever the number of agents",
            "; ".join(f"{K}: {layered} against {full}" for K, (full, layered) in costs.items()) + " (closed form)",
            verdict(np.array([full - layered for full, layered in costs.values()])),
        ),
    ]
