"""AgensFlow: which skill, role and model to call next, or to skip, learned online with a table of upper bounds.

Source: arXiv 2605.27466 (text and code). Their code calls itself "online folded-signature UCB ... closer to a
contextual bandit than POMDP planning", and that is what it is: no model of the world, no bootstrapping.

    signature  s = (regime, mask of what has been handed over, beliefs rounded to 0.1)
    score      mean(s, a) + c(s) sqrt(log(N(s) + 1) / N(s, a)) - 0.5 failures / (visits + failures);  never tried: +inf
               c(s) = max(0.5, 1.4 * 2^(-N(s) / 50))
    override   the rule-based pipeline decides until a signature has 5 visits; then the highest score does
    backup     the reward of the whole episode goes to every (s, a) on its path
    reward     1.0 Q - 0.3 min(tokens / 8000, 1) - 0.15 retries;  Q is a judge's score of the answer

Our choices. The world is a toy: four regimes, five roles, nine solver variants (skill x model), and a Q that is a sum
of known losses plus noise of 0.08, so that the best plan can be found by enumeration. Roles come up in the pipeline's
order: the paper may also reorder them. Its regimes, seven-bit mask and judges are real where ours are given. Beliefs
follow the paper's idea of fixed steps; ours are two, evidence and correctness.

Not verified: the paper's scores (0.749 fixed, 0.817 learned) are on its own corpus and judges. In its main table
learning costs *more* tokens than its fixed pipeline; here, where needless roles are dear, it costs fewer.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import product
from random import Random
from statistics import mean

import numpy as np

from minimgrpo.lessons import Claim, compare, show

REGIMES = ("plain", "ambiguous", "evidence", "contradiction")
ROLES = ("planner", "memory", "web", "solver", "verifier")
SKILLS, MODELS = ("direct", "stepwise", "code"), ("small", "medium", "large")
SOLVERS = tuple(f"solver:{skill}/{model}" for skill, model in product(SKILLS, MODELS))
CELLS = {role: SOLVERS if role == "solver" else (role,) for role in ROLES}
RULE_BASED = {role: "solver:stepwise/medium" if role == "solver" else role for role in ROLES}  # the fixed pipeline
TOKENS = {"planner": 900, "memory": 700, "web": 2400, "verifier": 1500, "small": 800, "medium": 2000, "large": 3200}
MISSED = {  # what an answer loses in each regime without a role; elsewhere the role adds nothing
    "plain": {},
    "ambiguous": {"planner": 0.25},
    "evidence": {"memory": 0.10, "web": 0.25},
    "contradiction": {"memory": 0.08, "verifier": 0.28},
}
NEEDS = {  # the skill a regime needs and the smallest model that is able enough
    "plain": ("direct", "small"),
    "ambiguous": ("stepwise", "medium"),
    "evidence": ("direct", "medium"),
    "contradiction": ("code", "large"),
}
BEST, NO_SOLVER, WRONG_SKILL, WEAK_MODEL, NOISE, WEB_FAILS = 0.87, 0.40, 0.18, 0.15, 0.08, 0.10
BIAS = 0.05  # what a judge with a taste adds to answers of the "large" model


def quality(regime: str, plan: tuple[str, ...]) -> float:
    """The expected quality of an answer made by these cells.

    >>> quality("plain", ("solver:direct/small",)), round(quality("plain", ("web", "solver:code/large")), 2)
    (0.87, 0.69)
    >>> round(quality("evidence", ("web", "solver:direct/small")), 2), round(quality("plain", ()), 2)
    (0.62, 0.47)
    """
    total = BEST - sum(loss for role, loss in MISSED[regime].items() if role not in plan)
    solvers = [cell.removeprefix("solver:").split("/") for cell in plan if cell in SOLVERS]
    if not solvers:
        return total - NO_SOLVER
    [(skill, model)], (right_skill, able) = solvers, NEEDS[regime]
    too_small = max(0, MODELS.index(able) - MODELS.index(model))
    return total - WRONG_SKILL * (skill != right_skill) - WEAK_MODEL * too_small


def cost(plan: tuple[str, ...]) -> int:
    """Tokens of a plan: of its roles, and of its solver's model."""
    return sum(TOKENS[cell.split("/")[-1]] for cell in plan)


def reward(score: float, tokens: float, retries: int) -> float:
    return score - 0.3 * min(tokens / 8000, 1) - 0.15 * retries


def best_plan(regime: str) -> tuple[tuple[str, ...], float]:
    """The plan of highest expected reward, by enumeration of all 2^4 * 10, and that reward."""

    def value(plan: tuple[str, ...]) -> float:
        first = reward(quality(regime, plan), cost(plan), 0)
        again = reward(quality(regime, plan), cost(plan) + TOKENS["web"], 1)
        return (1 - WEB_FAILS) * first + WEB_FAILS * again if "web" in plan else first

    plans = [tuple(filter(None, plan)) for plan in product(*[(*CELLS[role], "") for role in ROLES])]
    best = max(plans, key=value)
    return best, value(best)


def signature(regime: str, done: list[str], stage: int) -> str:
    """What the graph sees before the stage's role: the regime, what was handed over, and beliefs in steps of 0.1.

    >>> signature("plain", ["memory"], 2)
    'plain|web|01000|evidence 0.1|correct 0.0'
    """
    roles = [cell.split(":")[0] for cell in done]
    mask = "".join(str(int(role in roles)) for role in ROLES)
    evidence, correct = 0.1 * ("memory" in roles) + 0.3 * ("web" in roles), 0.2 * ("solver" in roles)
    return f"{regime}|{ROLES[stage]}|{mask}|evidence {evidence:.1f}|correct {correct:.1f}"


class PolicyGraph:
    """What is known of each (signature, action): visits, mean and variance of the reward, tokens, failures."""

    threshold = 5  # visits of a signature before the graph may overrule the pipeline

    def __init__(self):
        self.edges = defaultdict(dict)  # signature -> action -> [visits, reward sum, squares, token sum, failures]

    def scores(self, s: str, actions: list[str]) -> dict[str, float]:
        edges, n = self.edges[s], sum(edge[0] for edge in self.edges[s].values())
        c = max(0.5, 1.4 * 2 ** (-n / 50))
        scores = dict.fromkeys(actions, math.inf)  # that of what was never tried
        for action in scores.keys() & edges.keys():
            visits, total, _, _, failures = edges[action]
            bonus = c * math.sqrt(math.log(n + 1) / visits)
            scores[action] = total / visits + bonus - 0.5 * failures / (visits + failures)
        return scores

    def pick(self, s: str, actions: list[str], default: str, rng: Random) -> str:
        """The action of highest score, ties broken at random; the pipeline's while the signature is new."""
        if sum(edge[0] for edge in self.edges[s].values()) < self.threshold:
            return default
        scores = self.scores(s, actions)
        top = max(scores.values())
        return rng.choice([action for action in actions if scores[action] == top])

    def backup(self, path: list[tuple[str, str]], r: float, tokens: float, failures: set[str]) -> None:
        """The same reward to every edge of the path: no edge learns what it added itself."""
        for s, action in path:
            edge, more = self.edges[s].get(action, [0, 0.0, 0.0, 0.0, 0]), (1, r, r * r, tokens, action in failures)
            self.edges[s][action] = [old + new for old, new in zip(edge, more, strict=True)]

    def audit(self) -> list[dict]:
        """One row per edge, the most visited first: a person can read why an action is preferred."""
        rows = []
        for s, edges in self.edges.items():
            for action, (n, total, squares, tokens, failures) in edges.items():
                row = {"signature": s, "action": action, "visits": n, "mean": total / n, "failures": failures}
                rows.append(row | {"variance": max(squares / n - (total / n) ** 2, 0.0), "tokens": tokens / n})
        return sorted(rows, key=lambda row: -row["visits"])

    def dumps(self) -> str:
        return json.dumps(self.edges)

    @classmethod
    def loads(cls, text: str) -> PolicyGraph:
        graph = cls()
        graph.edges.update(json.loads(text))
        return graph


def run_episode(
    graph: PolicyGraph | None, regime: str, rng: Random, skip: bool = True, see_regime: bool = True, bias: float = 0.0
) -> dict:
    """One task through the five stages; with no graph, through the fixed pipeline. The graph learns from it.

    bias: what the judge that the graph learns from adds to answers of the "large" model; the result has it not.
    see_regime: False folds all regimes into one signature.
    """
    plan, path, failed = [], [], set()
    for stage, role in enumerate(ROLES):
        action = RULE_BASED[role]
        if graph is not None:
            s = signature(regime if see_regime else "any", plan, stage)
            action = graph.pick(s, [*CELLS[role], *([f"skip:{role}"] if skip else [])], action, rng)
            path.append((s, action))
        if not action.startswith("skip:"):
            plan.append(action)
            if action == "web" and rng.random() < WEB_FAILS:  # it fails once and is called again
                failed.add(action)
    tokens, retries = cost((*plan, *failed)), len(failed)  # what failed is paid for twice
    q = quality(regime, tuple(plan)) + rng.gauss(0, NOISE)
    large = any(cell.endswith("/large") for cell in plan)
    if graph is not None:
        graph.backup(path, reward(q + bias * large, tokens, retries), tokens, failed)
    return {"reward": reward(q, tokens, retries), "quality": q, "tokens": tokens, "large": float(large)}


def run(graph: PolicyGraph | None, seed: int, epochs: int = 40, tasks: int = 40, **options) -> list[dict]:
    """Epochs of tasks from the four regimes in turn -> each epoch's means of what ``run_episode`` returns."""
    rng, history = Random(seed), []
    for _ in range(epochs):
        episodes = [run_episode(graph, REGIMES[i % 4], rng, **options) for i in range(tasks)]
        history.append({name: mean(e[name] for e in episodes) for name in episodes[0]})
    return history


def arms(seed: int, epochs: int = 40) -> dict[str, list[dict]]:
    """The histories of one seed, by arm. A warm arm starts from the saved graph of an earlier run."""
    earlier, misled = PolicyGraph(), PolicyGraph()
    run(earlier, 1000 + seed, epochs)
    run(misled, 1000 + seed, epochs, bias=BIAS)
    return {
        "fixed": run(None, seed, epochs),
        "no-skip": run(PolicyGraph(), seed, epochs, skip=False),
        "cold": run(PolicyGraph(), seed, epochs),
        "warm": run(PolicyGraph.loads(earlier.dumps()), seed, epochs),
        "folded": run(PolicyGraph(), seed, epochs, see_regime=False),
        "biased": run(PolicyGraph.loads(misled.dumps()), seed, epochs, bias=BIAS),  # as warm, with the partial judge
    }


def claims(quick: bool = False) -> list[Claim]:
    """Each over 3 seeds of 20 epochs (quick) or 5 of 40; "first" and "last" are means over five epochs."""
    results = [arms(seed, 20) for seed in range(3)] if quick else [arms(seed, 40) for seed in range(5)]
    oracle = mean(best_plan(regime)[1] for regime in REGIMES)

    def means(name: str, part: slice) -> dict[str, np.ndarray]:
        """By arm, one number for each seed."""
        return {arm: np.array([mean(epoch[name] for epoch in r[arm][part]) for r in results]) for arm in results[0]}

    first = means("reward", slice(5))
    last, tokens, q, large = (means(name, slice(-5, None)) for name in ("reward", "tokens", "quality", "large"))
    lift = q["biased"] - q["fixed"]  # the audit: quality as it is
    one = lift + BIAS * large["biased"]
    three = (one + 2 * lift) / 3  # two of the three judges are impartial
    return [
        compare(
            "learned routing earns at least 0.2 more than the fixed pipeline",
            f"last: {show(last['cold'])} against {show(last['fixed'])}; the best plans earn {oracle:.3f}",
            last["cold"] - last["fixed"],
            0.2,
        ),
        compare(
            "being allowed to skip saves at least 30 % of the tokens",
            f"last: {show(tokens['cold'], '.0f')} tokens, {show(tokens['no-skip'], '.0f')} without skip",
            1 - tokens["cold"] / tokens["no-skip"],
            0.3,
        ),
        compare(
            "skipping costs no quality (allowed: 0.01)",
            f"last: {show(q['cold'])}, {show(q['no-skip'])} without skip",
            q["cold"] - q["no-skip"] + 0.01,
        ),
        compare(
            "a warm start earns at least 0.15 more in the first five epochs",
            f"first: {show(first['warm'])} against {show(first['cold'])} cold",
            first["warm"] - first["cold"],
            0.15,
        ),
        compare(
            "a warm start, which has seen twice the tasks, ends higher by 0.03 or more",
            f"last: {show(last['warm'])} against {show(last['cold'])} cold",
            last["warm"] - last["cold"],
            0.03,
        ),
        compare(
            "folding the regimes into one signature loses nothing (allowed: 0.01)",
            f"last: {show(last['folded'])} against {show(last['cold'])} with the regime",
            last["folded"] - last["cold"] + 0.01,
        ),
        compare(
            f"one judge with a taste (+{BIAS} for one model) reports more gain than three (by construction: how much?)",
            f"one judge {show(one)}, three {show(three)}, none partial {show(lift)}",
            one - three,
        ),
        compare(
            "learning from that judge moves the routing to its model",
            f"share of that model {show(large['biased'])} against {show(large['warm'])} warm",
            large["biased"] - large["warm"],
        ),
    ]
