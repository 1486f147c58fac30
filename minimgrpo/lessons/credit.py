"""Who gets credit for the team's result? MA-GRPO as printed and as it should be, and four credits.

Source: a textbook chapter, "20.7 Multi-Agent Collaboration and Agent Swarms". `patterns` has its failures of teams.

    team        r_i = V / n
    difference  r_i = V(N) - V(N without i)
    Shapley     r_i = sum over S in N without i of |S|! (n - |S| - 1)! / n! (V(S + i) - V(S))
                sum r_i = V(N) - V(nobody)
    weighted    r_i = w_i V, sum w = 1, with weights that the orchestrator writes
    MA-GRPO     A = (R - mean) / std over the rollouts of *one* question, the same for the orchestrator and each worker

What the chapter has wrong. n! in Shapley is a weight; the cost is the 2^n values V(S). A credit averaged over the group
is the same for all its rollouts, so its advantage is 0: Shapley must be per rollout. Constant weights cancel in the
z-score (a private cost aside), and the episode's reward does not depend on them, so the orchestrator gets no gradient
for attributing well.
"Prone to free riding" needs a private cost of effort: without one all agents share the optimum. A joint update does not
avoid non-stationarity, it is what makes it. Normalising a shared advantage cannot rebalance agents.

And its code. ``literal`` keeps two faults of the printed step: the mean and std are over all questions, and worker i is
multiplied by advantage[i], that of rollout i, whatever rollout its tokens come from, summed over all. (The printed one
also subtracts from a list, and has no ratio and no clip: one update per batch needs neither.)

Our choices. V(m) = 1 - 0.5^m for m workers who work: redundant on purpose. Working costs 0.1. Policies are tables of
logits and all seeds train at once: nothing here says that a language model would learn the same.

Not verified: the chapter's account of Kimi K2.5 (readers of that report contradict it: a trained orchestrator with
frozen sub-agents) and its Advisor-mode, 18-32 % and 2.7x numbers, for which no source was found.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minimgrpo.credit import difference, shapley_exact
from minimgrpo.grpo import group_advantages
from minimgrpo.lessons import Claim

N, COST = 4, 0.1
CREDITS = ("team", "undivided", "difference", "Shapley", "group-mean Shapley")


def coalition_values(working: np.ndarray) -> np.ndarray:
    """V(S) for all S as bit masks: [..., n] of 0 and 1 (who works) -> [..., 2^n]; who is not in S does not work.

    >>> coalition_values(np.array([1, 0])).tolist()  # nobody, the first, the second, both
    [0.0, 0.5, 0.0, 0.5]
    """
    n = working.shape[-1]
    members = (np.arange(2**n)[:, None] >> np.arange(n)) & 1  # [2^n, n]
    return 1 - 0.5 ** (working @ members.T)


def credit(kind: str, values: np.ndarray) -> np.ndarray:
    """The credits [..., group, n] of a group of rollouts with coalition values [..., group, 2^n]."""
    n = values.shape[-1].bit_length() - 1
    total = np.repeat(values[..., -1:], n, axis=-1)
    if kind == "difference":
        return difference(values)
    if "Shapley" in kind:
        phi = shapley_exact(values)
        return np.broadcast_to(phi.mean(-2, keepdims=True), phi.shape) if kind == "group-mean Shapley" else phi
    return total / n if kind == "team" else total


def train_effort(kind: str, seeds: int = 5, steps: int = 300, group: int = 16, lr: float = 1.0) -> tuple:
    """GRPO on credit - COST * effort for N workers who choose to work or not.

    Returns, per seed, the expected number who work, and the welfare V - COST * workers (highest: three work, 0.575).
    """
    rng, logits = np.random.default_rng(0), np.zeros((seeds, N))
    for _ in range(steps):
        p = 1 / (1 + np.exp(-logits))
        works = (rng.random((seeds, group, N)) < p[:, None]).astype(int)
        rewards = credit(kind, coalition_values(works)) - COST * works
        A = group_advantages(torch.from_numpy(rewards.transpose(0, 2, 1).copy())).numpy()  # [seeds, N, group]
        logits += lr * (A * (works - p[:, None]).transpose(0, 2, 1)).mean(-1)
    p = 1 / (1 + np.exp(-logits))
    teams = (np.arange(2**N)[:, None] >> np.arange(N)) & 1
    chance = np.where(teams[None] == 1, p[:, None], 1 - p[:, None]).prod(-1)  # [seeds, 2^N]
    return p.sum(-1), (chance * (1 - 0.5 ** teams.sum(-1) - COST * teams.sum(-1))).sum(-1)


def ma_grpo(rewards: Tensor, logprobs: Tensor) -> Tensor:
    """The loss of each seed [S] for rewards [S, questions, group] and log-probs [S, questions, group, agents]."""
    return -(group_advantages(rewards)[..., None] * logprobs).mean((1, 2)).sum(-1)


def ma_grpo_literal(rewards: Tensor, logprobs: Tensor) -> Tensor:
    """The printed step with its two faults (agent 0 is the orchestrator)."""
    A = group_advantages(rewards.flatten(1))  # over all questions
    flat = logprobs.flatten(1, 2)  # [S, rollouts, agents]
    workers = flat.shape[-1] - 1
    orchestrator = -(A * flat[..., 0]).mean(-1)
    return orchestrator - (A[:, None, :workers] * flat[..., 1:]).sum((1, 2))  # zip(advantages, one rollout's workers)


def train_team(loss, seeds: int = 5, steps: int = 200, questions: int = 8, group: int = 8, lr: float = 2.0) -> Tensor:
    """An orchestrator and three workers pick one of three answers to each of four questions -> P(right) [seeds, 4].

    Reward: the share of the agents who are right, plus what the question is worth anyway (some are easier).
    """
    generator = torch.Generator().manual_seed(0)
    right = torch.randint(3, (seeds, 4, 4), generator=generator)  # [S, question, agent]
    logits = torch.zeros(seeds, 4, 4, 3, requires_grad=True)
    each = torch.arange(seeds)[:, None]
    for _ in range(steps):
        asked = torch.randint(4, (seeds, questions), generator=generator)
        dist = torch.distributions.Categorical(logits=logits[each, asked])  # [S, questions, agents]
        noise = torch.rand(group, *dist.logits.shape, generator=generator)
        picks = (dist.logits - (-noise.log()).log()).argmax(-1)  # Gumbel: a sample that obeys the generator
        rewards = (picks == right[each, asked]).float().mean(-1) + asked
        batch = rewards.permute(1, 2, 0), dist.log_prob(picks).permute(1, 2, 0, 3)
        (gradient,) = torch.autograd.grad(loss(*batch).sum(), logits)
        logits = (logits - lr * gradient).detach().requires_grad_()
    return logits.softmax(-1).gather(-1, right[..., None])[..., 0].mean(1).detach()


def attribution_gradient(seeds: int = 20, group: int = 8, batches: int = 200, pays: float = 0.0) -> np.ndarray:
    """The orchestrator's mean gradient towards weighting the one worker who works, under its own GRPO [seeds].

    It writes the weights (four choices) after worker 0 or nobody worked; the reward is V, which they do not change.
    (If they did, by ``pays`` for the right choice, this gradient would see it.)
    """
    rng = np.random.default_rng(0)
    choice = rng.integers(4, size=(seeds, batches, group))
    V = 0.5 * (rng.random(choice.shape) < 0.5) + pays * (choice == 0)
    A = group_advantages(torch.from_numpy(V)).numpy()
    return (A * ((choice == 0) - 0.25)).mean((1, 2))


def claims(quick: bool = False) -> list[Claim]:
    """Learning: 3 (quick) or 5 seeds, mean ± std; the rest is exact or says how many draws."""
    seeds, steps = (3, 200) if quick else (5, 300)

    def show(x) -> str:
        return f"{float(x.mean()):.2f} ± {float(x.std(ddof=1)):.2f}"

    def shown(condition: bool, opposite: bool = False) -> str:
        return "shown" if condition else "reversed" if opposite else "not shown"

    literal, fixed = (train_team(loss, seeds).numpy() for loss in (ma_grpo_literal, ma_grpo))
    workers, right = literal[:, 1:].mean(1), fixed[:, 1:].mean(1)
    effort = {kind: train_effort(kind, seeds, steps) for kind in CREDITS}
    welfare = {kind: result[1] for kind, result in effort.items()}
    efforts = {kind: f"{show(work)} work, welfare {w.mean():.3f}" for kind, (work, w) in effort.items()}

    values = np.random.default_rng(0).normal(size=(100, 2**N))
    phi, gain = shapley_exact(values), values[:, -1] - values[:, 0]
    A = [group_advantages(w * torch.tensor([0.0, 0.5, 0.75, 0.5])) for w in (0.1, 0.7)]
    g = attribution_gradient()
    error = g.std(ddof=1) / len(g) ** 0.5
    return [
        Claim(
            "MA-GRPO as printed trains the workers (a third is chance)",
            f"P(right) of workers {show(workers)}, orchestrator {show(literal[:, 0])} ({seeds} seeds)",
            shown(workers.min() > 0.9),
        ),
        Claim(
            "MA-GRPO with one group per question and the rollout's own advantage trains the workers",
            f"P(right) of workers {show(right)}, orchestrator {show(fixed[:, 0])} ({seeds} seeds)",
            shown(right.min() > 0.9),
        ),
        Claim(
            "Shapley values sum to V(N), as the chapter says",
            f"the sum is off V(N) by up to {abs(phi.sum(1) - values[:, -1]).max():.1f}, "
            f"off V(N) - V(nobody) by {abs(phi.sum(1) - gain).max():.0e} (100 games)",
            shown(abs(phi.sum(1) - values[:, -1]).max() < 1e-9, abs(phi.sum(1) - gain).max() < 1e-9),
        ),
        Claim(
            "a divided team reward makes workers with a cost ride free (fewer than 1.5 of the best 3 work)",
            f"team / n: {efforts['team']}; undivided: {efforts['undivided']} ({seeds} seeds)",
            shown(effort["team"][0].mean() < 1.5, effort["team"][0].mean() > 2.5),
        ),
        Claim(
            "difference credit reaches the best welfare (0.575, within 0.02)",
            f"{efforts['difference']} ({seeds} seeds)",
            shown(welfare["difference"].min() > 0.555),
        ),
        Claim(
            "Shapley, the fairest credit, is also the best incentive (welfare at least that of difference)",
            f"{efforts['Shapley']}; difference {welfare['difference'].mean():.3f} ({seeds} seeds)",
            shown(*((d := welfare["Shapley"] - welfare["difference"]).min() >= 0, d.max() < 0)),
        ),
        Claim(
            "a Shapley value averaged over the group is as good as one per rollout",
            f"{efforts['group-mean Shapley']}; per rollout {welfare['Shapley'].mean():.3f} ({seeds} seeds)",
            shown(*((d := welfare["group-mean Shapley"] - welfare["Shapley"]).min() >= 0, d.max() < 0)),
        ),
        Claim(
            "the orchestrator's constant weights change what GRPO teaches a worker (who has no private cost)",
            f"weights 0.1 and 0.7: advantages differ by {float((A[0] - A[1]).abs().max()):.0e}",
            shown(not torch.allclose(A[0], A[1], atol=1e-5)),
        ),
        Claim(
            "the episode's reward teaches the orchestrator whom to credit",
            f"mean gradient towards the right weights {g.mean():.4f}, standard error {error:.4f} ({len(g)} seeds)",
            shown(g.mean() > 2 * error, g.mean() < -2 * error),
        ),
    ]
