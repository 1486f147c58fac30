"""Lesson 09. One policy for all roles, or one for each? Voting, Eval-Opt and Orch-Workers, shared and isolated.

Source: arXiv 2605.24202, of which we could read the abstract and the documentation of its code, not its tables.
(Write-ups exist that put this abstract under the title of 2605.19140, lesson 10: they are different papers.) Derived by
us, for role k with n copies, score functions s_kj and advantages A_kj:

    isolated (IP)  dW_k = lr sum_j A_kj s_kj        copies that agree push n times as far: "amplification"
    shared (SP)    dW = lr sum_k sum_j A_kj s_kj    a role's share of the norms is its "gradient mass"
    broadcast      every copy gets the team's outcome: a wrong vote in a team that was right is reinforced
    per agent      a generator or worker gets its own answer's correctness, an evaluator its verdict's
    KL anchor      dW_k -= lr beta_k grad KL(pi_k || base)
    coherence      g_k *= 1 - lambda clip(cos(g_k, m_k), 0, 1), m_k the running mean of the g_k after that

Our world (``_sharing_workflows``): six answers, and policies softmax(W x) over what a role may say. A shared W knows
its role by these options alone, as a language model does by the prompt. Plain gradient ascent, no clip; SP and IP make
the same number of updates from equally many rollouts (an SP update is longer: it sums over the roles). Adam would hide
part of it: a role's own adapter's gradient, n times as long, is divided by n; in a shared one the roles' ratio stays.

Groups are by question *and* slot, where prompts agree. ``group="role"`` puts a role's copies into one group, as the
public code does with workers although their prompts differ. A peak is a maximum of noisy values, so biased upwards: its
step is chosen on one half of the test prompts, its value is that of the other half.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import torch

from minimgrpo.grpo import group_advantages
from minimgrpo.lessons import Claim
from minimgrpo.lessons._sharing_workflows import (
    COPIES,
    OTHER,
    ROLES,
    SOLVERS,
    RoleStep,
    World,
    diagnostics,
    peak_and_final,
    policy,
    rollout,
)

CLIFF = 0.05  # a fall from the peak to the end by more than five points


def advantages(steps: list[RoleStep], outcome: np.ndarray, reward: str = "broadcast", group: str = "slot") -> list:
    """A [E, P, G] of every step: z-scores of its rewards among the rollouts of its question and slot (or role)."""
    rewards = [step.own if reward == "per agent" else outcome for step in steps]
    groups: dict[tuple, list[int]] = {}
    for i, step in enumerate(steps):
        groups.setdefault((step.role, step.slot if group == "slot" else 0), []).append(i)
    A: list = [None] * len(steps)
    for members in groups.values():
        joined = [np.concatenate([some[i] for i in members], -1) for some in (rewards, [step.live for step in steps])]
        scores = group_advantages(*(torch.from_numpy(part) for part in joined)).double().numpy()
        for i, part in zip(members, np.split(scores, len(members), -1), strict=True):
            A[i] = part
    return A


def gradient(step: RoleStep, A: np.ndarray) -> np.ndarray:
    """The mean over prompts and rollouts of A grad log pi(act), [E, V, F]."""
    score = (np.eye(OTHER + 1)[step.act] - step.probs) * (A * step.live)[..., None]
    return score.sum(2).transpose(0, 2, 1) @ step.x / (step.act.shape[1] * step.act.shape[2])


def kl_gradient(step: RoleStep, base: np.ndarray) -> np.ndarray:
    """The gradient [E, V, F] of the mean KL(pi || base) over the step's prompts and rollouts."""
    q, p = policy(base, step.x, step.options), step.probs
    log = np.where(p > 0, np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300)), 0.0)
    inner = p * (log - (p * log).sum(-1, keepdims=True)) * step.live[..., None]
    return inner.sum(2).transpose(0, 2, 1) @ step.x / (p.shape[1] * p.shape[2])


def norm(g: np.ndarray) -> np.ndarray:
    """[E, V, F] -> [E]."""
    return np.sqrt((g**2).sum((-2, -1)))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum((-2, -1)) / np.maximum(norm(a) * norm(b), 1e-12)


def train(
    world: World,
    kind: str,
    mode: str = "IP",
    reward: str = "broadcast",
    reduce: str = "sum",
    kl: dict | None = None,
    coherence: float = 0.0,
    group: str = "slot",
    steps: int = 60,
    G: int = 8,
    lr: float = 0.5,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Train on all worlds at once -> ``diagnostics`` of the trained policies, means over the training steps of what the
    gradients did (all [E]), and "curve" [evaluations, 2 halves of the test prompts, E].

    mode: "IP" or "SP". reduce: "sum" or "mean" over a role's copies. kl: role -> beta.
    """
    rng = np.random.default_rng(seed)
    shared = {"": world.base.copy()}
    own = {role: world.base.copy() for role in ROLES[kind]}
    seen: dict[str, list] = {}
    average: dict[str, np.ndarray] = {}
    curve = []

    def policies() -> dict:
        return {role: shared[""] if mode == "SP" else own[role] for role in ROLES[kind]}

    for number in range(steps + 1):
        if number % 10 == 0:
            right = rollout(kind, policies(), world, "test", 4, np.random.default_rng(number))[1].mean(-1)
            curve.append([half.mean(-1) for half in np.split(right, 2, axis=1)])
        if number == steps:
            break
        done, outcome = rollout(kind, policies(), world, "train", G, rng)
        A = advantages(done, outcome, reward, group)
        total = 0.0
        for role in ROLES[kind]:
            parts = [gradient(step, a) for step, a in zip(done, A, strict=True) if step.role == role]
            g = sum(parts) / (len(parts) if reduce == "mean" else 1)
            if coherence:
                m = average.get(role, np.zeros_like(g))
                g = g * (1 - coherence * cosine(g, m).clip(0, 1))[:, None, None]
                average[role] = m + (g - m) / 32
            note(seen, f"norm {role}", norm(g))
            if len(parts) == COPIES:
                note(seen, "copy cosine", np.mean([cosine(a, b) for a, b in combinations(parts, 2)], 0))
                note(seen, "norm of a copy", np.mean([norm(part) for part in parts], 0))
            if kl and role in kl:
                g = g - kl[role] * sum(kl_gradient(step, world.base) for step in done if step.role == role)
            own[role] = own[role] + lr * g
            total = total + g
        shared[""] = shared[""] + lr * total
        voted = [(s.own == 0, a > 0, s.live > 0) for s, a in zip(done, A, strict=True) if s.role in SOLVERS]
        wrong, reinforced = (
            sum(x.sum((1, 2)) for x in some)
            for some in ([no & live for no, _, live in voted], [no & up for no, up, _ in voted])
        )
        note(seen, "wrong votes reinforced", reinforced / np.maximum(wrong, 1))
    found = {name: np.mean(values, 0) for name, values in seen.items()}
    return found | diagnostics(kind, policies(), world) | {"curve": np.array(curve)}


def note(seen: dict[str, list], name: str, value: np.ndarray) -> None:
    seen.setdefault(name, []).append(value)


@cache
def measure(seeds: tuple[int, ...], steps: int = 60) -> dict[tuple, dict[str, np.ndarray]]:
    """Every run of the lesson: (workflow, "IP" or "SP", reward, what else is changed) -> what ``train`` returns."""
    world = World.random(list(seeds))
    still = {"steps": 20, "lr": 0.0}  # the base's gradients, on batches of their own
    runs = {
        ("voting", "IP", "broadcast", "still"): still,
        ("voting", "IP", "broadcast", "still, mean"): still | {"reduce": "mean", "seed": 1},
        ("voting", "IP", "broadcast", "mean"): {"reduce": "mean"},
        ("voting", "IP", "broadcast", "KL"): {"kl": {"generator": 0.2}},
        ("voting", "IP", "broadcast", "coherence"): {"coherence": 0.3},
        ("voting", "IP", "broadcast", "hard"): {"lr": 4.0, "steps": 2 * steps},
        ("orch-workers", "IP", "broadcast", "hard"): {"lr": 4.0, "steps": 2 * steps},
        ("orch-workers", "IP", "per agent", "slot"): {},
        ("orch-workers", "IP", "per agent", "role"): {"group": "role"},
    }
    runs |= {(kind, mode, "broadcast", ""): {} for kind in ROLES for mode in ("IP", "SP")}
    runs |= {("voting", mode, "per agent", ""): {} for mode in ("IP", "SP")}
    runs |= {(kind, "IP", "broadcast", "twice"): {"steps": 2 * steps} for kind in ROLES}
    return {key: train(world, key[0], key[1], key[2], **{"steps": steps, **options}) for key, options in runs.items()}


def claims(quick: bool = False) -> list[Claim]:
    """6 (quick) or 12 seeds, mean ± std over them. "In most" is 10 of 12 (5 of 6)."""
    seeds = tuple(range(6 if quick else 12))
    runs = measure(seeds)
    n, most = len(seeds), len(seeds) * 5 / 6

    def run(kind, mode, reward="broadcast", changed=""):
        return runs[kind, mode, reward, changed]

    def show(x) -> str:
        return f"{float(x.mean()):.3f} ± {float(x.std(ddof=1)):.3f}"

    def verdict(better: np.ndarray) -> str:
        """For [E] differences: positive in most seeds, negative in most, or neither."""
        return "shown" if (better > 0).sum() >= most else "reversed" if (better < 0).sum() >= most else "not shown"

    def versus(what: str, a: dict, b: dict) -> tuple[str, np.ndarray]:
        d = a[what] - b[what]
        return f"{show(a[what])} against {show(b[what])}, higher in {int((d > 0).sum())} of {n} seeds", d

    ratios = [
        float(
            (
                run("voting", "IP", changed=c)["norm generator"] / run("voting", "IP", changed=c)["norm aggregator"]
            ).mean()
        )
        for c in ("still", "still, mean")
    ]
    still, ip, sp = run("voting", "IP", changed="still"), run("voting", "IP"), run("voting", "SP")
    amplified = still["norm generator"] / still["norm of a copy"]
    own = run("voting", "IP", "per agent")
    reinforced, none = ip["wrong votes reinforced"], own["wrong votes reinforced"]
    per_agent = versus("accuracy generator", own, ip)
    recovery = versus("contested recovery", ip, sp)
    solved = versus("pre-solved", run("orch-workers", "SP"), run("orch-workers", "IP"))
    by_role = versus("accuracy worker", *(run("orch-workers", "IP", "per agent", g) for g in ("slot", "role")))
    refine = versus("team", run("eval-opt", "IP"), run("eval-opt", "SP"))
    loud = run("eval-opt", "IP")["norm evaluator"] / run("eval-opt", "IP")["norm generator"]
    ends = {(kind, mode): peak_and_final(run(kind, mode)["curve"]) for kind in ROLES for mode in ("IP", "SP")}
    hard = [peak_and_final(run(kind, "IP", changed="hard")["curve"]) for kind in ("voting", "orch-workers")]
    falls = np.stack([peak - final for peak, final in [*ends.values(), *hard]])
    cliffs = falls > CLIFF + 1e-9  # accuracies are shares of 400 answers
    longer = np.stack(
        [peak_and_final(run(kind, "IP", changed="twice")["curve"])[0] - ends[kind, "SP"][0] for kind in ROLES]
    )
    higher = np.stack([ends[kind, "IP"][0] - ends[kind, "SP"][0] for kind in ROLES])
    won = (higher > 0).sum(1)
    anchored, coherent = (run("voting", "IP", changed=c) for c in ("KL", "coherence"))
    tamed = [versus("team", some, ip) for some in (anchored, coherent)]
    return [
        Claim(
            "summing over 3 copies instead of averaging makes the generator 3 times as loud",
            f"generator / aggregator norm {ratios[0]:.2f} summed, {ratios[1]:.2f} averaged: "
            f"{ratios[0] / ratios[1]:.2f} times (at the base, batches of their own, {n} seeds)",
            "shown" if abs(ratios[0] / ratios[1] / COPIES - 1) <= 0.05 else "not shown",
        ),
        Claim(
            "copies on the same prompt pile up in one direction: 3 push 3 times as far as one",
            f"{show(amplified)} times as far, cosine between copies {show(still['copy cosine'])} (uncorrelated: 1.73)",
            "shown" if amplified.mean() >= 2.85 else "reversed" if amplified.mean() <= 1 else "not shown",
        ),
        Claim(
            "a broadcast outcome reinforces wrong votes (10 to 35 % of them); a reward per agent none",
            f"{show(reinforced)} of the wrong votes; {none.max():.0%} with a reward per agent ({n} seeds)",
            "shown" if 0.1 <= reinforced.mean() <= 0.35 and none.max() == 0 else "not shown",
        ),
        Claim("per agent, generators become better than under broadcast", per_agent[0], verdict(per_agent[1])),
        Claim(
            "isolated policies have the higher peak (all three workflows, 5 of 6 seeds)",
            "; ".join(
                f"{kind} IP {ends[kind, 'IP'][0].mean():.3f}, SP {ends[kind, 'SP'][0].mean():.3f}, "
                f"higher in {wins} of {n} seeds"
                for kind, wins in zip(ROLES, won, strict=True)
            ),
            "shown" if (won >= most).all() else "reversed" if (won <= n - most).all() else "not shown",
        ),
        Claim(
            "shared policies are only faster: with twice the steps isolated ones peak as high (mean within 0.01)",
            "; ".join(f"{kind} IP - SP {show(d)}" for kind, d in zip(ROLES, longer, strict=True)),
            "shown"
            if (longer.mean(1) >= -0.01).all()
            else "reversed"
            if (longer.mean(1) < -0.01).all()
            else "not shown",
        ),
        Claim(
            f"late in training accuracy falls off a cliff (more than {CLIFF:.0%} below the peak, in some seed)",
            f"largest fall {falls.max():.3f}, mean {falls.mean():.3f}; {int(cliffs.sum())} cliffs in "
            f"{falls.size} runs, {2 * n} of them with 8 times the learning rate and twice the steps",
            "shown" if cliffs.any() else "not shown",
        ),
        Claim("isolated aggregators recover more contested votes than shared ones", recovery[0], verdict(recovery[1])),
        Claim("a shared orchestrator solves more tasks itself (capture)", solved[0], verdict(solved[1])),
        Claim("Eval-Opt gains from isolated policies", refine[0], verdict(refine[1])),
        Claim(
            "an evaluator's gradient is 5 to 8 times as long as a generator's",
            f"{show(loud)} times ({n} seeds)",
            "shown" if 5 <= loud.mean() <= 8 else "reversed" if loud.mean() < 1 else "not shown",
        ),
        Claim(
            "workers whose prompts differ need groups of their own (per agent reward; under broadcast it is the same)",
            by_role[0],
            verdict(by_role[1]),
        ),
        Claim(
            "a KL anchor on the generator (0.2) or the coherence regulariser (0.3) makes the team better",
            f"KL {tamed[0][0]}; coherence {tamed[1][0]}",
            next((v for _, d in tamed if (v := verdict(d)) == "shown"), "not shown"),
        ),
    ]
