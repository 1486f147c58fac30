"""Lesson 14, on language models. MAS-OPD: a teacher scores every token that a planner and an executor sample.

Source: arXiv 2609.34234. `distillation` has its maths on a model small enough to be exact: where it ends, and what does
not survive. Here both roles are students, two fresh LoRA adapters that roll out as the library's team, and for a token
y_k that role i wrote

    A = log pi_T(y_k | role i) - log pi_i(y_k) + lambda (log pi_T(y_k | role i) - log pi_T(y_k | role j))

is a constant in the loss -A log pi_i: the mean over tokens, then turns, then the role's trajectories. There is no
reward, group, clip or KL term. Both students sample, then both are updated.

Our choices. The default teacher is a pair of adapters on the same base that warmed up on correct demonstrations;
``--teacher NAME`` takes a larger model with the same tokenizer (not the student's base: role j is then nothing but the
other prompt). PAC, a teacher that is told verdicts, is left out: a two-layer model cannot read one. Log-probs are cut
at ``FLOOR``: one forbidden token would outweigh all others. Not verified: the paper's scores; none is repeated here.

    python -m minimgrpo.lessons.opd [--teacher HUB_OR_FOLDER_OR_GGUF] [--model NAME] [--steps N] [--lam L]
"""

from __future__ import annotations

import contextlib
import io
import sys

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
from minimgrpo.warmup import demonstrations, warm_up

DEMONSTRATIONS, FLOOR = 96, -20.0


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
            learner = Learner(teacher, role, Objective(tokens=512))  # small batches: more steps
            warm_up(learner, demonstrations(role, count, seed))
    return teacher


def force_decode(teacher: Policy, trajectories: list[Trajectory], role: str, chat=None) -> torch.Tensor:
    """The teacher's log-probs, as ``role``, of all sampled tokens in a row: [tokens], no gradient.

    For another role than the trajectories' own, the opening is that role's, as ``chat``, the student's, writes it (the
    teacher may be used to other prompts); everything else stays as it was written.
    """
    ids, masks = [], []
    for t in trajectories:
        start = t.mask.index(1)
        opening = (
            t.token_ids[:start] if role == t.agent else (chat or teacher.chat).open(role, t.messages[1]["content"])
        )
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
        contrast = force_decode(teacher, some, other, learner.policy.chat).to(rows) if lam else target
        A = target - old + lam * (target - contrast)
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


# ---------------------------------------------------------------------------------------------- claims, and the command


def claims(quick: bool = False) -> list[Claim]:
    """Both adapters of atlas-lm, fresh, distilled from warmed-up ones: validation questions before and after.

    Every seed (1 if quick, else 3) has a teacher, a student and samples of its own; the questions are the same.
    """
    seeds, shown, steps, batch, asked = (1, 48, 6, 12, 24) if quick else (3, DEMONSTRATIONS, 15, 16, 60)
    questions = tasks.load_questions("validation")[:asked]
    found = []
    for seed in range(seeds):
        teacher, student = demonstrated(count=shown, seed=seed), Policy.load("atlas-lm", seed=seed + 1)
        before = examine(student, teacher, questions, seed + 1)
        distil(student, teacher, tasks.load_questions("train"), steps, batch, seed=seed)
        found.append((before, *(examine(policy, teacher, questions, seed + 1) for policy in (student, teacher))))
    kl, correct, form = (
        np.array([[m[name].mean() for m in row] for row in found]).T for name in ("kl", "correct", "format")
    )  # [before, after, teacher] x seeds

    def each(x: np.ndarray) -> str:
        return ", ".join(f"{v:.3f}" for v in x)

    def verdict(gain: np.ndarray) -> str:
        return "shown" if gain.min() > 0 else "reversed" if gain.max() < 0 else "not shown"

    of = f"{asked} questions, {seeds} seed" + "s" * (seeds > 1)
    return [
        Claim(
            "atlas-lm: a fresh adapter approaches its teacher from its own samples (reverse KL a token, every seed)",
            f"{each(kl[0])} before, {each(kl[1])} after {steps} steps ({of})",
            verdict(kl[0] - kl[1]),
        ),
        Claim(
            "atlas-lm: and becomes more accurate, without a reward (every seed)",
            f"{each(correct[0])} before, {each(correct[1])} after, teacher {each(correct[2])}; format "
            f"{form[0].mean():.2f}, {form[1].mean():.2f}, {form[2].mean():.2f} ({of}; standard error of a share "
            f"at most {(0.25 / asked) ** 0.5:.2f})",
            verdict(correct[1] - correct[0]),
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(prog="minimgrpo.lessons.opd", description="Distil a teacher into a fresh team.")
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
        return display.complain(f"minimgrpo.lessons.opd: {error}")
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    header = ["", "KL a token to the teacher", "accuracy", "format"]
    rows = [[who, *(f"{m[name].mean():.3f}" for name in ("kl", "correct", "format"))] for who, m in found.items()]
    display.print_table(display.console(), header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
