"""Lesson 14. MAS-OPD: on-policy distillation for agents. A teacher scores every token that the students write.

Source: arXiv 2609.34234. Student i writes y in its role; a frozen teacher T reads the same tokens. For token k, with
l_i = log pi_T(y_k | u, role i, y_<k), u what the student reads without its role, and j the contrasting role:

    OPD    A = l_i - log pi_i(y_k | x_i, y_<k)    a sample of -KL(student || teacher); A grad log pi_i, of its ascent
    RAS    A + lambda (l_i - l_j)                 role-advantage specialization; the paper's lambda is 0.1
    PAC    the teacher reads u and c^{<t}         privileged attribution: what a verifier found about *completed* turns

The loss is -A log pi_i, A a constant: the mean over tokens, then turns, then roles. No group, clip, KL term, value or
discount (a token's advantage looks at that token only). All students sample, then all are updated. Here everything is
a table and exact; `opd` does it with language models.

Derived by us, and measured below.
* RAS ends at pi* = softmax((1 + lambda) l_i - lambda l_j), in every state: classifier-free guidance on the role. There
  A is not 0 but log Z = lambda D_{1+lambda}(T_i || T_j), a Renyi divergence: a constant, which adds only noise.
* "The shared ability is preserved" half-way. Tokens on which the roles agree (l_i = l_j) keep their proportions, but
  not their mass: at lambda = 0 it falls with slope mass * KL(T_i || T_j), of second order in how the roles differ.
* PAC's student cannot read c. It ends at pi* = softmax(E[l_i | u]), the geometric mean over what c may be: it learns
  what u says about c, at most the Bayes rule. The teacher's own accuracy is not on offer (a privilege illusion).

Our choices. Two roles draft ``LENGTH`` tokens: own ones, the other's, shared ones; a draft is good if it has an own and
a shared one. Then each reads a flaky check of its draft (``CUE``) and keeps or revises. There are two turns and nothing
to agree on (the paper: up to four, until the roles agree). Log-probs are cut at ``FLOOR``. The teacher that is told
nothing tosses a coin, and so do students of plain OPD: 0.5 by construction. One who ``trust``-s the check as far as it
deserves is a harder baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minimgrpo.lessons import Claim

PROMPTS, TOKENS, LENGTH, CUE, TOLD, FLOOR = 3, 4, 3, 0.8, 0.95, -20.0  # TOKENS of each sort: role 0's, role 1's, shared
KEEP, REVISE = 0, 1
LAMBDAS = (0.0, 0.1, 0.5, 1.0, 2.0)
BATCH, LR = 128, 8.0  # plain gradient steps, whose rate falls to nothing


def ras_advantage(target, own, contrast, lam):
    """The advantage of sampled tokens from their log-probs: numbers, or arrays of one shape.

    With lam = 0 it is OPD's, whose mean is minus KL(student || teacher) a token.

    >>> ras_advantage(target=-1.0, own=-3.0, contrast=-2.0, lam=0.5)
    2.5
    """
    return target - own + lam * (target - contrast)


def pac_context(verdicts: list, turn: int) -> list:
    """c^{<t}: the verdicts on the turns before ``turn``. One on the turn itself would tell the teacher what it scores.

    >>> pac_context(["draft good", "check wrong"], 0), pac_context(["draft good", "check wrong"], 1)
    ([], ['draft good'])
    """
    return verdicts[:turn]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@dataclass(frozen=True)
class Teacher:
    """role_logits: [E, roles, states, V]. priv_logits: [facts, V], added when the teacher is told a fact."""

    role_logits: np.ndarray
    priv_logits: np.ndarray | None = None

    def logp(self, tokens: np.ndarray, state: np.ndarray, role: int, priv: np.ndarray | None = None) -> np.ndarray:
        """Log-probs [E, B, L] of tokens [E, B, L] in states [E, B]; priv: the fact [E, B] it is told, if any."""
        logits = self.role_logits[:, role]
        if priv is not None:  # a state for each pair (state, fact)
            logits = (logits[:, :, None] + self.priv_logits).reshape(len(logits), -1, logits.shape[-1])
            state = state * len(self.priv_logits) + priv
        return take(log_softmax(logits), state, tokens).clip(FLOOR)


def take(table: np.ndarray, state: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """table [E, S, V] at state [E, B] and tokens [E, B, L] -> [E, B, L]."""
    return table[np.arange(len(table))[:, None, None], state[..., None], tokens]


@dataclass(frozen=True)
class Workflow:
    """Two roles side by side: each drafts, reads a check that is right with probability ``cue``, keeps or revises."""

    draft: Teacher
    check: Teacher
    cue: float = CUE

    @classmethod
    def random(cls, seeds: list[int], cue: float = CUE, trust: float = 0.5) -> Workflow:
        """trust: how often a teacher that is told nothing does as the check says."""
        logits = []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            common = rng.normal(size=(PROMPTS, 3 * TOKENS)) * 0.5 + np.repeat([0, 0, 0.6], TOKENS)
            leaning = 0.8 + 0.2 * rng.normal(size=(PROMPTS, 2 * TOKENS))  # a role prefers its own tokens
            logits.append(np.stack([common, common]))
            logits[-1][0, :, :TOKENS] += leaning[:, :TOKENS]
            logits[-1][1, :, TOKENS : 2 * TOKENS] += leaning[:, TOKENS:]
        obey = np.array([[-0.5, 0.5], [0.5, -0.5]])  # 0: the draft is wrong, revise; 1: keep
        told, trusts = (np.log(p / (1 - p)) * obey for p in (TOLD, trust))
        return cls(Teacher(np.array(logits)), Teacher(np.tile(trusts, (len(seeds), 2, 1, 1)), told), cue)

    def beginners(self) -> dict[str, np.ndarray]:
        """Students who know the tokens half-way and their role not at all."""
        mean = self.draft.role_logits.mean(1, keepdims=True) / 2
        return {"draft": mean.repeat(2, 1), "check": self.check.role_logits.copy()}

    def play(self, students: dict, batch: int, rng: np.random.Generator) -> list[tuple]:
        """One joint rollout: for each turn its name, states [E, 2, B], tokens [E, 2, B, L], verdicts [E, 2, B]."""
        E = len(students["draft"])
        x = np.repeat(rng.integers(PROMPTS, size=(E, 1, batch)), 2, 1)
        drafts = sample(students["draft"], x, LENGTH, rng)
        sort = drafts // TOKENS
        good = (sort == np.arange(2)[:, None, None]).any(-1) & (sort == 2).any(-1)
        seen = np.where(rng.random(good.shape) < self.cue, good, ~good).astype(int)
        action = sample(students["check"], seen, 1, rng)
        right = (action[..., 0] == REVISE) != good
        return [("draft", x, drafts, good.astype(int)), ("check", seen, action, right.astype(int))]


def sample(logits: np.ndarray, states: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """``length`` tokens for each state: logits [E, 2, S, V], states [E, 2, B] -> [E, 2, B, length]."""
    cumulative = np.exp(log_softmax(logits)).cumsum(-1)
    rows = np.take_along_axis(cumulative, states[..., None], 2)[:, :, :, None, :-1]
    return (rng.random((*states.shape, length, 1)) > rows).sum(-1)


def train(
    students: dict, workflow: Workflow, lam: float | np.ndarray = 0.0, pac: bool = False, steps: int = 400
) -> dict[str, np.ndarray]:
    """The students (logits by turn) after MAS-OPD. lam: one number, or one for each of the E worlds."""
    students, rng = {name: logits.copy() for name, logits in students.items()}, np.random.default_rng(0)
    for step in range(steps):
        turns = workflow.play(students, BATCH, rng)
        for t, (name, states, tokens, _) in enumerate(turns):
            facts = pac_context([verdicts for *_, verdicts in turns], t) if pac else []
            for i in range(2):
                at, wrote, priv = states[:, i], tokens[:, i], facts[-1][:, i] if facts else None
                teacher, logps = getattr(workflow, name), log_softmax(students[name][:, i])
                target, contrast = (teacher.logp(wrote, at, role, priv) for role in (i, 1 - i))
                A = ras_advantage(target, take(logps, at, wrote), contrast, np.reshape(lam, (-1, 1, 1)))
                students[name][:, i] += LR * (1 - step / steps) * score_mean(A, logps, at, wrote)
    return students


def score_mean(A: np.ndarray, logps: np.ndarray, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mean of A * d log pi / d logits over a batch: [E, S, V] from A, tokens [E, B, L], logps [E, S, V]."""
    E, S, V = logps.shape
    cells = ((np.arange(E)[:, None] * S + states)[..., None] * V + tokens).ravel()
    total = np.bincount(cells, A.ravel(), E * S * V).reshape(E, S, V)
    return (total - np.exp(logps) * total.sum(-1, keepdims=True)) / A[0].size


def guided(teacher: Teacher, lam) -> np.ndarray:
    """Where RAS should end [E, 2, S, V]: the teacher's roles under classifier-free guidance."""
    logps = log_softmax(teacher.role_logits)
    return log_softmax(logps + np.reshape(lam, (-1, 1, 1, 1)) * (logps - logps[:, ::-1]))


def masses(logps: np.ndarray) -> np.ndarray:
    """Probability [3, E, 2, S] of a role's own tokens, of the other role's, and of shared ones."""
    sums = np.exp(logps).reshape(*logps.shape[:-1], 3, TOKENS).sum(-1)
    own = np.stack([sums[:, 0, :, 0], sums[:, 1, :, 1]], 1)
    return np.stack([own, 1 - own - sums[..., 2], sums[..., 2]])


def good_drafts(logps: np.ndarray) -> np.ndarray:
    """Exact chance [E, 2] of a good draft: neither no own token nor no shared one."""
    own, other, shared = masses(logps)
    return (1 - (1 - own) ** LENGTH - (1 - shared) ** LENGTH + other**LENGTH).mean(-1)


def exchange_penalty(students: dict) -> np.ndarray:
    """What swapping the two students costs [E]: good drafts in their own chairs minus in each other's."""
    logps = log_softmax(students["draft"])
    return (good_drafts(logps) - good_drafts(logps[:, ::-1])).mean(1)


def self_check(students: dict, cue: float = CUE) -> dict[str, np.ndarray]:
    """Exact chances [E], means over the roles: "success" (revised iff wrong), "over-revise", "keep wrong"; the "Bayes"
    rule's success; the success at PAC's closed form ("geometric") and of the student's likelier action ("greedy")."""
    g = good_drafts(log_softmax(students["draft"]))
    prior = np.stack([1 - g, g], -1)[:, :, None]  # [E, 2, 1, wrong/good]
    joint = prior * np.array([[cue, 1 - cue], [1 - cue, cue]])  # [E, 2, cue, wrong/good]
    told = np.log([[1 - TOLD, TOLD], [TOLD, 1 - TOLD]])  # [wrong/good, action]
    geometric = np.exp(log_softmax(joint / joint.sum(-1, keepdims=True) @ told))
    policy = np.exp(log_softmax(students["check"]))  # [E, 2, cue, action]

    def success(pi):
        return (joint * pi[..., ::-1]).sum((-1, -2)).mean(1)  # wrong goes with REVISE, good with KEEP

    return {
        "success": success(policy),
        "over-revise": (joint[..., 1] * policy[..., REVISE]).sum(-1).mean(1),
        "keep wrong": (joint[..., 0] * policy[..., KEEP]).sum(-1).mean(1),
        "Bayes": joint.max(-1).sum(-1).mean(1),
        "geometric": success(geometric),
        "greedy": success(np.eye(2)[policy.argmax(-1)]),
    }


def claims(quick: bool = False) -> list[Claim]:
    """2 (quick) or 5 seeds, exact probabilities of trained tables. After ±: the standard deviation over the seeds."""
    n, steps = (2, 300) if quick else (5, 600)
    runs, lam = Workflow.random(list(range(n)) * len(LAMBDAS)), np.repeat(LAMBDAS, n)
    students = train(runs.beginners(), runs, lam, steps=steps)
    learned, closed = log_softmax(students["draft"]), guided(runs.draft, lam)
    kl = (np.exp(learned) * (learned - closed)).sum(-1).mean((1, 2)).reshape(-1, n)
    shared, expected = (masses(x)[2].mean((1, 2)).reshape(-1, n) for x in (learned, closed))
    penalty, good = (x.reshape(-1, n) for x in (exchange_penalty(students), good_drafts(learned).mean(1)))
    checks, coin = {}, 0.5
    cases = [("plain", 0, CUE, coin), ("PAC", 1, CUE, coin), ("blind", 1, 0.5, coin)]
    for name, told, cue, trust in [*cases, ("fair", 0, CUE, CUE), ("both", 1, CUE, CUE)]:
        world = Workflow.random(list(range(n)), cue, trust)
        checks[name] = self_check(train(world.beginners(), world, pac=told, steps=steps), cue)
    plain, told, blind, fair, both = (found["success"] for found in checks.values())
    pac, off = checks["PAC"], abs(told - checks["PAC"]["geometric"]).max()

    def show(x: np.ndarray) -> str:
        return f"{x.mean():.3f} ± {x.std(ddof=1):.3f}"

    def row(x: np.ndarray) -> str:
        return ", ".join(f"{v:.3f}" for v in x.mean(1))

    def verdict(shown: bool, opposite: bool = False) -> str:
        return "shown" if shown else "reversed" if opposite else "not shown"

    grid = f"lambda {', '.join(f'{x:g}' for x in LAMBDAS)}"
    return [
        Claim(
            "RAS ends at classifier-free guidance on the role (KL below 5e-3 at lambda 0 to 1, every seed)",
            f"largest KL {', '.join(f'{v:.0e}' for v in kl.max(1))} at {grid} ({n} seeds)",
            verdict(kl[:4].max() < 5e-3),
        ),
        Claim(
            "RAS leaves the shared ability alone (its mass falls by less than 1 % even at lambda 1)",
            f"mass {row(shared)}, closed form {row(expected)} at {grid} ({n} seeds)",
            verdict(*((f := shared[3] / shared[0]).min() > 0.99, f.max() < 0.99)),
        ),
        Claim(
            "the larger lambda (up to 1), the more an exchange of the students costs (every seed and step of lambda)",
            f"penalty {row(penalty)} at {grid} ({n} seeds)",
            verdict(*((d := np.diff(penalty[:4], axis=0)).min() > 0, d.max() < 0)),
        ),
        Claim(
            "the larger lambda, the better the work (good drafts, which need own and shared tokens; every step)",
            f"good drafts {row(good)} at {grid} ({n} seeds)",
            verdict(*((d := np.diff(good, axis=0)).min() > 0, d.max() < 0)),
        ),
        Claim(
            "PAC teaches self-checking: at least 0.10 above plain OPD, and not above the Bayes rule",
            f"{show(told)} against {show(plain)}, Bayes {show(pac['Bayes'])}; over-revises "
            f"{pac['over-revise'].mean():.3f}, keeps wrong {pac['keep wrong'].mean():.3f}",
            verdict(*((d := told - plain).min() >= 0.1 and (told <= pac["Bayes"]).all(), d.max() < 0)),
        ),
        Claim(
            f"PAC still adds 0.05 where the teacher that is told nothing trusts the check, which is right in {CUE:.0%}",
            f"{show(both)} against {show(fair)} (the bound was set after a first look)",
            verdict(*((d := both - fair).min() >= 0.05, d.max() < 0)),
        ),
        Claim(
            f"PAC gives the student its teacher's privilege (within 0.05 of the teacher's {TOLD:.2f})",
            f"{show(told)}, its likelier action {show(pac['greedy'])}; the geometric mean off by {off:.3f}",
            verdict(told.min() > TOLD - 0.05),
        ),
        Claim(
            "PAC also helps where the student reads nothing about its draft (at least 0.10)",
            f"{show(blind)} with a check that tells nothing, {show(plain)} without PAC",
            verdict(*((d := blind - plain).min() >= 0.1, d.max() < -0.02)),
        ),
    ]
