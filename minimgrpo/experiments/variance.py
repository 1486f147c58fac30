"""What an alignment does to the executor's gradient, on fixed questions and a fixed policy: no training.

The same questions are rolled out again and again. At ratio 1 the executor's gradient is a weighted mean of one
gradient for each trajectory, g = -sum_c w_c A_c s_c / sum_c w_c n_c (s_c: gradient of the log-prob of its n_c tokens).
So the s_c are computed once and every alignment is a product with them. Reported for each alignment:

* noise: trace of the covariance of g over the batches, over the squared length of the mean gradient, which is estimated
  without bias as |mean|^2 - trace / batches; lower is better, and comparable whatever the gradients' length;
* over none: noise over that of no alignment on the same batches, with a 95 % interval (jackknife over batches);
* draws: the share of that trace that comes from the random choice of duplicates and of what is dropped, which is what
  is left when the rollouts are held fixed;
* cosine: the direction of its mean gradient against that of no alignment.

And on one batch: the largest difference between the gradient with weights and that of the batch written out.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minimgrpo import agents, log, tasks
from minimgrpo.alignment import align
from minimgrpo.experiments.setting import Setting
from minimgrpo.experiments.trainer import Run, load_policy
from minimgrpo.experiments.verdicts import t_quantile
from minimgrpo.experiments.weights import ALIGNMENTS
from minimgrpo.grpo import policy_loss
from minimgrpo.settle import grouped, settle_executor, settle_planner
from minimgrpo.trajectory import Trajectory

ARMS = {"D = 1": (align, 1), "D = 2": (align, 2), "D = 4": (align, 4), "D = 8": (align, 8)}
ARMS |= {"none": (ALIGNMENTS["none"], 1), "1/d": (ALIGNMENTS["1/d"], 1)}
BATCHES, DRAWS, STEPS, QUESTIONS = 32, 4, 8, 8
"""Batches, alignments drawn for each, steps of training before (the first gradients are all format), questions."""


def remembered_variance(base: Setting, folder: Path, quick: bool) -> dict:
    """``variance``, read from ``folder`` where it has been measured already."""
    sizes = (3, 2, 1, 3) if quick else (BATCHES, DRAWS, STEPS, QUESTIONS)
    path = folder / f"variance-{base.key}-{'-'.join(map(str, sizes))}.json"
    if not path.exists():
        log.publish_text(path, json.dumps(variance(base, folder, *sizes)) + "\n")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise log.LogError(f"{path} is damaged ({error}): remove it and run again") from None


def variance(base: Setting, folder: Path, batches: int, draws: int, steps: int, count: int) -> dict:
    """Measure it -> {"table": (header, rows), "measured": arm -> its numbers, ...}, all plain values.

    ``count`` questions, rolled out ``batches`` times after ``steps`` steps of training; each alignment is drawn
    ``draws`` times for each.
    """
    torch.set_num_threads(1)
    setting = replace(base, config=replace(base.config, seed=1000))
    pages = tasks.load_pages()
    questions = tasks.load_questions("train")
    run = Run(setting, pages, questions, load_policy(setting, pages, folder))
    for step in range(1, steps + 1):
        run.step(step)
    hard = [q for q in questions if q.level > 1]  # where one rollout calls once, another three times
    asked = random.Random("variance").sample(hard, count)
    sums = {arm: _Moments() for arm in ARMS}
    counts: list[int] = []
    literal = None
    for batch in range(batches):
        executed, correct = roll_out(run, asked, batch)
        gradients = {id(t): one_gradient(run, t) for t in executed}
        calls = grouped(executed)
        counts += [sum(t.rollout == k for t in group) for group in calls.values() for k in range(run.config.rollouts)]
        for arm, (how, d_max) in ARMS.items():
            found = []
            for draw in range(draws if how is align else 1):
                settle_executor(executed, correct, run.expert, d_max, f"variance {batch} {draw}", align=how)
                found.append(combined(executed, gradients))
            sums[arm].add(torch.stack(found))
        if literal is None:
            literal = against_literal(run, executed, correct)
    direction = sums["none"].mean()
    measured = {
        arm: {
            **moments.measured(),
            **dict(zip(("ratio", "low", "high"), ratio(moments, sums["none"]), strict=True)),
            "cosine": float(torch.cosine_similarity(moments.mean(), direction, dim=0)),
        }
        for arm, moments in sums.items()
    }
    measured = {arm: {name: round(value, 6) for name, value in row.items()} for arm, row in measured.items()}
    header = ["gradient's", "noise", "over none [95 %]", "draws' share", "cosine to none"]
    rows = [
        [
            arm,
            f"{m['noise']:.1f}",
            "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**m),
            f"{m['draws']:.3f}",
            f"{m['cosine']:.3f}",
        ]
        for arm, m in measured.items()
    ]
    return {
        "table": (header, rows),
        "measured": measured,
        "batches": batches,
        "draws": draws,
        "steps_before": steps,
        "questions": [q.task_id for q in asked],
        "calls": [counts.count(d) for d in range(max(counts, default=0) + 1)],
        "largest_difference_to_literal_duplicates": literal,
    }


class _Moments:
    """Gradients of many batches, each with several draws of the alignment."""

    def __init__(self):
        self.means: list[torch.Tensor] = []  # of a batch's draws
        self.within: list[float] = []  # trace of the covariance over them

    def add(self, draws: torch.Tensor) -> None:
        """draws: [draws of the alignment, parameters], the gradients of one batch."""
        self.number = len(draws)
        self.means.append(draws.mean(0))
        self.within.append(float(draws.var(0).sum()) if len(draws) > 1 else 0.0)

    def mean(self) -> torch.Tensor:
        return torch.stack(self.means).mean(0)

    def measured(self, without: int | None = None) -> dict[str, float]:
        """Noise and the draws' share (see the module's docstring), perhaps ``without`` one of the batches."""
        kept = [i for i in range(len(self.means)) if i != without]
        draws = sum(self.within[i] for i in kept) / len(kept)
        means = torch.stack([self.means[i] for i in kept])
        between = float(means.var(0).sum())  # in it is also what averaging the draws left of theirs
        trace = between - draws / self.number + draws
        signal = float(means.mean(0).square().sum()) - between / len(kept)
        return {"noise": trace / max(signal, 1e-12), "draws": draws / trace, "trace": trace}


def ratio(a: _Moments, b: _Moments) -> tuple[float, float, float]:
    """How many times as noisy ``a`` is as ``b`` on the same batches; its 95 % interval (jackknife, on a log scale)."""
    batches = len(a.means)
    logs = [math.log(a.measured(i)["noise"] / b.measured(i)["noise"]) for i in (None, *range(batches))]
    whole, left_out = logs[0], torch.tensor(logs[1:], dtype=torch.float64)
    error = math.sqrt((batches - 1) * float(left_out.var(unbiased=False)))
    half = t_quantile(batches - 1) * error
    return math.exp(whole), math.exp(whole - half), math.exp(whole + half)


def roll_out(run: Run, questions: list, batch: int) -> tuple[list[Trajectory], dict[tuple[str, int], float]]:
    """K attempts at each question -> the executor's trajectories (in settlement's order) and every outcome."""
    config, key = run.config, ("variance", batch)
    how = config.limits, config.temperature
    team = agents.team_rollouts(run.agents, run.tools, questions, *how, key, attempts=config.rollouts)
    planned, executed = [r.planner for r in team], [t for r in team for t in r.calls]
    settle_planner(planned, questions)
    executed.sort(key=lambda t: (t.question_id, t.rollout, t.call))
    return executed, {(t.question_id, t.rollout): t.reward_parts["correct"] for t in planned}


def one_gradient(run: Run, trajectory: Trajectory) -> torch.Tensor:
    """The gradient of the summed log-prob of what the trajectory's agent wrote, [parameters]."""
    logprobs, _ = run.policy.score("executor", [trajectory.token_ids], [trajectory.mask], run.config.temperature)
    parameters = run.learners["executor"].parameters
    return torch.cat([g.flatten() for g in torch.autograd.grad(logprobs.sum(), parameters)])


def combined(executed: list[Trajectory], gradients: dict[int, torch.Tensor]) -> torch.Tensor:
    """The loss's gradient at ratio 1, from those of its trajectories, advantages and copies."""
    tokens = sum(t.copies * t.sampled for t in executed)
    return sum(-t.copies * t.advantage * gradients[id(t)] for t in executed if t.copies and t.advantage) / tokens


def against_literal(run: Run, executed: list[Trajectory], correct: dict) -> float:
    """The largest difference of any parameter's gradient, weights against a batch written out, over their largest."""
    settle_executor(executed, correct, run.expert, 4, "variance literal")
    literal = [replace(t, copies=1) for t in executed for _ in range(t.copies)]
    both = [loss_gradient(run, batch) for batch in (executed, literal)]
    return float((both[0] - both[1]).abs().max() / both[0].abs().max())


def loss_gradient(run: Run, trajectories: list[Trajectory]) -> torch.Tensor:
    """What ``grpo.policy_loss`` gives for the batch at ratio 1, [parameters]."""
    kept = [t for t in trajectories if t.copies and t.sampled]
    columns = [t.token_ids for t in kept], [t.mask for t in kept]
    logprobs, mask = run.policy.score("executor", *columns, run.config.temperature)
    advantages, copies = torch.tensor([t.advantage for t in kept]), torch.tensor([float(t.copies) for t in kept])
    loss = policy_loss(logprobs, logprobs.detach(), advantages, mask, copies)
    parameters = run.learners["executor"].parameters
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def draw_variance(found: dict) -> Callable:
    """A panel for the study's figure."""

    def panel(axis) -> None:
        arms = list(found["measured"])
        noise = [found["measured"][arm]["noise"] for arm in arms]
        drawn = [found["measured"][arm]["noise"] * found["measured"][arm]["draws"] for arm in arms]
        axis.barh(arms, noise, color="C0", label="rollouts")
        axis.barh(arms, drawn, color="C1", label="draws of the alignment")
        axis.invert_yaxis()
        axis.set_xlabel("gradient noise: trace of covariance / |mean|^2")
        axis.legend(fontsize="x-small", loc="lower left")

    return panel
