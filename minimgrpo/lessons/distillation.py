"""Lesson 14. MAS-OPD: on-policy distillation for agents. A teacher scores every token that the students write.

Source: arXiv 2609.34234. Student i writes y in its role; a frozen teacher T reads the same tokens. For token k, with
l_i = log pi_T(y_k | u, role i, y_<k), u what the student reads without its role, and j the contrasting role:

    OPD    A = l_i - log pi_i(y_k | x_i, y_<k)    one sample of minus the gradient of KL(student || teacher)
    RAS    A + lambda (l_i - l_j)                 role-advantage specialization; the paper's lambda is 0.1
    PAC    the teacher reads u and c^{<t}         privileged attribution: what a verifier found about *completed* turns

The loss is -A log pi_i, A a constant: the mean over tokens, then turns, then roles. No group, clip, KL term, value or
discount (a token's advantage looks at that token only). All students sample, then all are updated.

Derived by us, and measured below.
* RAS ends at pi* = softmax((1 + lambda) l_i - lambda l_j), in every state: classifier-free guidance on the role. There
  A is not 0 but log Z = lambda D_{1+lambda}(T_i || T_j), a Renyi divergence: a constant, which adds only noise.
* "The shared ability is preserved" half-way. Tokens on which the roles agree (l_i = l_j) keep their proportions, but
  not their mass: at lambda = 0 it falls with slope mass * KL(T_i || T_j), of second order in how the roles differ.
* PAC's student cannot read c. It ends at pi* = softmax(E[l_i | u]), the geometric mean over what c may be: it learns
  what u says about c, at most the Bayes rule. The teacher's own accuracy is not on offer (a privilege illusion).

Our choices. The small model has two roles and exact tables: a role drafts ``LENGTH`` tokens, its own, the other's or
shared ones; a draft is good if it has an own and a shared one. Then the role reads a flaky check of its draft (``CUE``)
and keeps or revises. There are two turns and nothing to agree on (the paper: up to four, until the roles agree).
Log-probs are cut at ``FLOOR``: one forbidden token would outweigh all others.

On language models both roles are students, two fresh LoRA adapters, and roll out as the library's team. The default
teacher is a pair of adapters on the same base that warmed up on correct demonstrations; ``--teacher NAME`` takes a
larger model with the same tokenizer (not the student's base: RAS then reads the other role's prompt only). PAC is left
out there: a two-layer model cannot read a verdict. Not verified: the paper's scores, none of which is repeated here.

    python -m minimgrpo.lessons.distillation [--teacher HUB_OR_FOLDER_OR_GGUF] [--model NAME] [--steps N] [--lam L]
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass

import numpy as np
import torch

from minimgrpo import agents, base, display, grpo, tasks
from minimgrpo.agents import Limits
from minimgrpo.chat import ChatError
from minimgrpo.learner import Learner, Objective
from minimgrpo.lessons import Claim
from minimgrpo.policy import ModelError, Policy, describe
from minimgrpo.protocol import ROLES
from minimgrpo.scorer import gaia_score
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory
from minimgrpo.warmup import warm_up

DEMONSTRATIONS = 96
PROMPTS, TOKENS, LENGTH, CUE, TOLD, FLOOR = 3, 4, 3, 0.8, 0.95, -20.0  # TOKENS of each sort: role 0's, role 1's, shared
KEEP, REVISE = 0, 1
LAMBDAS = (0.0, 0.1, 0.5, 1.0, 2.0)


def opd_advantage(target, own):
    """log pi_T - log pi of sampled tokens (arrays or tensors): its mean is minus KL(student || teacher) a token."""
    return target - own


def ras_advantage(target, own, contrast, lam):
    """OPD plus lam * (the teacher in this role - the teacher in the contrasting role).

    >>> ras_advantage(target=-1.0, own=-3.0, contrast=-2.0, lam=0.5)
    2.5
    """
    return opd_advantage(target, own) + lam * (target - contrast)


def pac_context(verdicts: list, turn: int) -> list:
    """c^{<t}: the verdicts on the turns before ``turn``. One on the turn itself would tell the teacher what it scores.

    >>> pac_context(["draft good", "check wrong"], 0), pac_context(["draft good", "check wrong"], 1)
    ([], ['draft good'])
    """
    return verdicts[:turn]


# ------------------------------------------------------------------------------- the small model (E worlds at once)


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
    def random(cls, seeds: list[int], cue: float = CUE) -> Workflow:
        logits = []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            common = rng.normal(size=(PROMPTS, 3 * TOKENS)) * 0.5 + np.repeat([0, 0, 0.6], TOKENS)
            leaning = 0.8 + 0.2 * rng.normal(size=(PROMPTS, 2 * TOKENS))  # a role prefers its own tokens
            logits.append(np.stack([common, common]))
            logits[-1][0, :, :TOKENS] += leaning[:, :TOKENS]
            logits[-1][1, :, TOKENS : 2 * TOKENS] += leaning[:, TOKENS:]
        odds = np.log(TOLD / (1 - TOLD)) / 2
        told = np.array([[-odds, odds], [odds, -odds]])  # fact 0: the draft is wrong, revise; fact 1: keep
        return cls(Teacher(np.array(logits)), Teacher(np.zeros((len(seeds), 2, 2, 2)), told), cue)

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
    students: dict,
    workflow: Workflow,
    lam: float | np.ndarray = 0.0,
    pac: bool = False,
    steps: int = 400,
    batch: int = 128,
    lr: float = 8.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """The students (logits by turn) after MAS-OPD. lam: one number, or one for each of the E worlds."""
    students, rng = {name: logits.copy() for name, logits in students.items()}, np.random.default_rng(seed)
    for step in range(steps):
        turns = workflow.play(students, batch, rng)
        for t, (name, states, tokens, _) in enumerate(turns):
            facts = pac_context([verdicts for *_, verdicts in turns], t) if pac else []
            for i in range(2):
                at, wrote, priv = states[:, i], tokens[:, i], facts[-1][:, i] if facts else None
                teacher, logps = getattr(workflow, name), log_softmax(students[name][:, i])
                target, contrast = (teacher.logp(wrote, at, role, priv) for role in (i, 1 - i))
                A = ras_advantage(target, take(logps, at, wrote), contrast, np.reshape(lam, (-1, 1, 1)))
                students[name][:, i] += lr * (1 - step / steps) * score_mean(A, logps, at, wrote)
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
    posterior = joint / joint.sum(-1, keepdims=True)
    told = np.log([[1 - TOLD, TOLD], [TOLD, 1 - TOLD]])  # [wrong/good, action]
    geometric = np.exp(log_softmax(posterior @ told))
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


# ---------------------------------------------------------------------------------------------------- language models


def same_tokenizer(student: Policy, teacher: Policy) -> None:
    """Raise ModelError unless every token id means the same text to both."""
    vocabularies = [policy.chat.tokenizer.get_vocab() for policy in (student, teacher)]
    room = teacher.model.get_input_embeddings().num_embeddings
    if vocabularies[0] != vocabularies[1] or room < len(vocabularies[0]):
        raise ModelError(
            f"the teacher {teacher.name!r} has another tokenizer than {student.name!r}, so it cannot score the same "
            "tokens: choose a teacher of the same family"
        )


def demonstrated(name: str = "atlas-lm", count: int = DEMONSTRATIONS, seed: int = 0, device: str = "cpu") -> Policy:
    """The default teacher: the base with adapters fine-tuned on correct demonstrations (about invented facts)."""
    teacher = Policy.load(name, device=device)
    with contextlib.redirect_stdout(io.StringIO()):
        for role in ROLES:
            warm_up(Learner(teacher, role, Objective(tokens=512)), count, seed)  # small batches: more steps
    return teacher


def force_decode(teacher: Policy, trajectories: list[Trajectory], role: str) -> torch.Tensor:
    """The teacher's log-probs, as ``role``, of all sampled tokens in a row: [tokens], no gradient.

    For another role than the trajectories' own, the opening is that role's; everything else stays as it was written.
    """
    ids, masks = [], []
    for t in trajectories:
        start = t.mask.index(1)
        opening = t.token_ids[:start] if role == t.agent else teacher.chat.open(role, t.messages[1]["content"])
        ids.append(opening + t.token_ids[start:])
        masks.append([0] * len(opening) + t.mask[start:])
    with torch.no_grad():
        logprobs, mask = teacher.score(role, ids, masks)
    return logprobs[mask.bool()].clamp(min=FLOOR)


def token_weights(mask: list[int]) -> list[float]:
    """The mean over the tokens of a turn, then over turns, as a weight of each sampled token (they sum to 1).

    >>> token_weights([0, 1, 1, 0, 1])
    [0.25, 0.25, 0.5]
    """
    lengths = [len(turn) for turn in "".join(map(str, mask)).split("0") if turn]
    return [1 / length / len(lengths) for length in lengths for _ in range(length)]


def learn(learner: Learner, teacher: Policy, trajectories: list[Trajectory], lam: float, lr: float) -> float:
    """One optimizer step from the student's own trajectories -> KL(student || teacher) a token before it (k3).

    The learner's own update has one advantage a trajectory; here each sampled token is a row of its own in the core's
    loss, with its own advantage and weight.
    """
    role, other = learner.role, ROLES[1 - ROLES.index(learner.role)]
    trajectories, kl = sorted(trajectories, key=lambda t: len(t.token_ids)), []
    learner.optimizer.param_groups[0]["lr"] = lr
    learner.optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(trajectories), 16):
        some = trajectories[start : start + 16]
        logprobs, mask = learner.policy.score(role, [t.token_ids for t in some], [t.mask for t in some])
        rows = logprobs[mask.bool()][:, None]  # [tokens, 1]
        old = rows.new_tensor([p for t in some for p, sampled in zip(t.logprobs, t.mask, strict=True) if sampled])
        target = force_decode(teacher, some, role).to(rows)
        contrast = force_decode(teacher, some, other).to(rows) if lam else target
        A = ras_advantage(target, old, contrast, lam)
        weights = [w for t in some for w in token_weights(t.mask)]
        no_clip = {"clip_low": 1.0, "clip_high": float("inf")}
        ones = torch.ones_like(rows)
        grpo.policy_loss(rows, old[:, None], A, ones, weights, **no_clip, normalizer=1).backward()
        kl += grpo.kl_k3(old, target).tolist()
    for parameter in learner.parameters:
        parameter.grad /= len(trajectories)  # in float32, after the sum (see learner)
    norm = torch.nn.utils.clip_grad_norm_(learner.parameters, learner.objective.max_grad_norm)
    if not norm.isfinite():
        raise FloatingPointError(f"the {role}'s distillation loss is not finite")
    learner.optimizer.step()
    return float(np.mean(kl))


def roll_out(policy: Policy, teacher: Policy, tools: Tools, questions: list, key: tuple) -> dict[str, list[Trajectory]]:
    """One attempt of the students' team at each question -> the trajectories that the teacher can read, by role."""
    openings = [len(policy.chat.open(role, "")) for role in ROLES]
    limits = Limits(context=min(Limits.context, teacher.max_context - abs(openings[0] - openings[1])))
    rollouts = agents.team_rollouts(policy, tools, questions, limits, 1.0, key)
    return {"planner": [r.planner for r in rollouts], "executor": [call for r in rollouts for call in r.calls]}


def distil(policy: Policy, teacher: Policy, questions: list, steps=30, batch=24, lam=0.0, lr=2e-3, seed=0) -> dict:
    """Train both adapters of ``policy`` -> {role: KL(student || teacher) a token, at each step it had tokens}."""
    same_tokenizer(policy, teacher)
    tools, learners = Tools(tasks.load_pages()), [Learner(policy, role, Objective()) for role in ROLES]
    rng, kl = np.random.default_rng(seed), {role: [] for role in ROLES}
    for step in range(steps):
        chosen = [questions[i] for i in rng.choice(len(questions), min(batch, len(questions)), replace=False)]
        played = roll_out(policy, teacher, tools, chosen, (seed, "distil", step))
        for learner in learners:
            if written := [t for t in played[learner.role] if t.sampled]:
                kl[learner.role].append(learn(learner, teacher, written, lam, lr * (1 - step / steps)))
    return kl


def examine(policy: Policy, teacher: Policy, questions: list, seed: int = 1) -> dict[str, np.ndarray]:
    """The team at T = 1: each question's "correct" and "format" (0 or 1); each trajectory's mean "kl" a token to the
    teacher: the k3 estimate of the reverse KL that distillation lowers."""
    played = roll_out(policy, teacher, Tools(tasks.load_pages()), questions, (seed, "examine"))
    kl = []
    for role, trajectories in played.items():
        for t in (t for t in trajectories if t.sampled):
            own = torch.tensor([p for p, sampled in zip(t.logprobs, t.mask, strict=True) if sampled])
            kl.append(grpo.kl_k3(own, force_decode(teacher, [t], role).to(own)).mean().item())
    pairs = zip(questions, played["planner"], strict=True)
    return {
        "correct": np.array([float(t.format_ok and gaia_score(t.result, q.answer)) for q, t in pairs]),
        "format": np.array([float(t.format_ok) for t in played["planner"]]),
        "kl": np.array(kl),
    }


# ------------------------------------------------------------------------------------------------------------- claims


def claims(quick: bool = False) -> list[Claim]:
    """Small model: 2 (quick) or 5 seeds, exact probabilities of trained tables. atlas-lm: one seed, and errors."""
    n, steps = (2, 300) if quick else (5, 600)
    runs, lam = Workflow.random(list(range(n)) * len(LAMBDAS)), np.repeat(LAMBDAS, n)
    students = train(runs.beginners(), runs, lam, steps=steps)
    learned, closed = log_softmax(students["draft"]), guided(runs.draft, lam)
    kl = (np.exp(learned) * (learned - closed)).sum(-1).mean((1, 2)).reshape(-1, n)
    shared, expected = (masses(x)[2].mean((1, 2)).reshape(-1, n) for x in (learned, closed))
    penalty = exchange_penalty(students).reshape(-1, n)
    good = good_drafts(learned).mean(1).reshape(-1, n)
    checks = {}
    for name, pac, cue in (("plain", False, CUE), ("PAC", True, CUE), ("blind", True, 0.5)):
        world = Workflow.random(list(range(n)), cue)
        checks[name] = self_check(train(world.beginners(), world, pac=pac, steps=steps), cue)
    plain, told, blind = (checks[name]["success"] for name in ("plain", "PAC", "blind"))
    off = abs(told - checks["PAC"]["geometric"]).max()

    def show(x, form: str = ".3f") -> str:
        return f"{np.mean(x):{form}} ± {np.std(x, ddof=1):{form}}"

    def row(x, form: str = ".3f") -> str:
        return ", ".join(f"{v:{form}}" for v in x.mean(1))

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
            f"{show(told)} against {show(plain)}, Bayes {show(checks['PAC']['Bayes'])}; over-revises "
            f"{checks['PAC']['over-revise'].mean():.3f}, keeps wrong {checks['PAC']['keep wrong'].mean():.3f}",
            verdict(*((d := told - plain).min() >= 0.1 and (told <= checks["PAC"]["Bayes"]).all(), d.max() < 0)),
        ),
        Claim(
            f"PAC gives the student its teacher's privilege (within 0.05 of the teacher's {TOLD:.2f})",
            f"{show(told)}, its likelier action {show(checks['PAC']['greedy'])}; the geometric mean off by {off:.3f}",
            verdict(told.min() > TOLD - 0.05),
        ),
        Claim(
            "PAC also helps where the student reads nothing about its draft (at least 0.10)",
            f"{show(blind)} with a check that tells nothing, {show(plain)} without PAC",
            verdict(*((d := blind - plain).min() >= 0.1, d.max() < -0.02)),
        ),
        *atlas_claims(quick),
    ]


def atlas_claims(quick: bool = False) -> list[Claim]:
    """Both adapters of atlas-lm, fresh, distilled from warmed-up ones: validation questions before and after."""
    demonstrations, steps, batch, asked = (48, 6, 12, 24) if quick else (DEMONSTRATIONS, 15, 16, 60)
    questions = tasks.load_questions("validation")[:asked]
    teacher, student = demonstrated(count=demonstrations), Policy.load("atlas-lm", seed=1)
    before = examine(student, teacher, questions)
    distil(student, teacher, tasks.load_questions("train"), steps, batch)
    after, best = examine(student, teacher, questions), examine(teacher, teacher, questions)

    def show(x: np.ndarray) -> str:
        return f"{x.mean():.3f} ± {error(x):.3f}"

    def error(x: np.ndarray) -> float:
        return x.std(ddof=1) / len(x) ** 0.5

    closer = before["kl"].mean() - after["kl"].mean()
    closer_error = float(np.hypot(error(before["kl"]), error(after["kl"])))
    better = after["correct"] - before["correct"]
    return [
        Claim(
            "atlas-lm: a fresh adapter approaches its teacher from its own samples (reverse KL a token)",
            f"{show(before['kl'])} before, {show(after['kl'])} after {steps} steps ({asked} questions, 1 seed)",
            "shown" if closer > 2 * closer_error else "reversed" if closer < -2 * closer_error else "not shown",
        ),
        Claim(
            "atlas-lm: and becomes more accurate, without a reward",
            f"{show(before['correct'])} before, {show(after['correct'])} after, teacher {show(best['correct'])}; "
            f"format {before['format'].mean():.2f}, {after['format'].mean():.2f}, {best['format'].mean():.2f}",
            "shown"
            if better.mean() > 2 * error(better)
            else "reversed"
            if better.mean() < -2 * error(better)
            else "not shown",
        ),
    ]


# ------------------------------------------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(prog="minimgrpo.lessons.distillation", description="Distil a teacher into a fresh team.")
    add = parser.add_argument
    add("--teacher", help="a larger model with the student's tokenizer: a folder, a .gguf file, or a hub name")
    add("--model", default="atlas-lm", help="the student: atlas-lm, a folder, a .gguf file, or a hub name (atlas-lm)")
    add("--steps", type=int, default=30, help="updates of each student (30)")
    add("--batch", type=int, default=24, help="questions in a step (24)")
    add("--lam", type=float, default=0.0, help="lambda, the weight of the role advantage (0; the paper's is 0.1)")
    add("--asked", type=int, default=100, help="validation questions before and after (100)")
    add("--demonstrations", type=int, default=DEMONSTRATIONS, help=f"what the default teacher saw ({DEMONSTRATIONS})")
    add("--device", default="auto", help="cpu, cuda:0, mps (auto)")
    add("--seed", type=int, default=0, help="draws the adapters, the questions and the samples (0)")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.asked - 1, args.demonstrations) < 1 or not 0 <= args.lam < float("inf"):
        parser.error("steps, batch and demonstrations start at 1, asked at 2, lam at 0")
    try:
        device, _ = base.devices(args.device)
        student = Policy.load(args.model, seed=args.seed + 1, device=device)
        print(f"student: {describe(student)}", flush=True)
        if args.teacher:  # its adapters are fresh and change nothing
            teacher = Policy.load(args.teacher, device=device)
            same_tokenizer(student, teacher)
        else:
            teacher = demonstrated(args.model, args.demonstrations, args.seed, device)
        print(f"teacher: {describe(teacher)}{'' if args.teacher else ', warmed up'}", flush=True)
        questions = tasks.load_questions("validation")[: args.asked]
        found = {"student, before": examine(student, teacher, questions)}
        options = {"steps": args.steps, "batch": args.batch, "lam": args.lam, "seed": args.seed}
        distil(student, teacher, tasks.load_questions("train"), **options)
        found |= {
            "student, after": examine(student, teacher, questions),
            "teacher": examine(teacher, teacher, questions),
        }
    except (ModelError, ChatError, tasks.DataError, OSError) as error:
        return display.complain(f"minimgrpo.lessons.distillation: {error}")
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    header = ["", "KL a token to the teacher", "accuracy", "format"]
    rows = [[who, *(f"{m[name].mean():.3f}" for name in ("kl", "correct", "format"))] for who, m in found.items()]
    display.print_table(display.console(), header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
