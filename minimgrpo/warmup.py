"""Stage 1: what a message has to look like, learned from demonstrations before M-GRPO begins (``--warmup N``).

A model that has never met this protocol ends hardly any rollout well, and where all rewards of a group are 0 there is
nothing to learn from. So each role's adapter is first fine-tuned on N conversations, in the model's own chat template
and prompts. They are *correct* (the mistakes of ``demonstrations`` are for the small base, which has to be mediocre)
and about *invented* facts: they show how to ask, to call and to report, and give away no answer.

*Paper*: stage 1 of its curriculum is reinforcement learning on easy questions until the format holds. *Ours*: one pass
of supervised learning, with the mean negative log-likelihood of the tokens that the agent writes, its stop tokens
included, as the loss. The optimizer is of the learner's family but its own: M-GRPO starts with a fresh one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

from minimgrpo.chat import Chat
from minimgrpo.demonstrations import Demonstration, Demonstrator
from minimgrpo.learner import Learner
from minimgrpo.trajectory import Trajectory

BATCH = 2048  # padded tokens in an optimizer step, unless the objective's ``tokens`` are fewer
LR = 1e-3  # at the start; it falls to nothing, linearly
KINDS = {  # in turn; with half of the questions puzzles, SmolLM2 answered all of them at once instead of delegating
    "planner": ("puzzle", "lookup", "two-hop", "calculation"),
    "executor": ("lookup", "identify", "lookup", "compute"),
}
SYLLABLES = (  # what invented names are made of; none that the Atlas knows can come out
    *("bel", "bri", "bor", "cal", "cor", "da", "del", "dor", "dun", "en", "fa", "fen", "fol", "gal", "gor", "gri"),
    *("han", "hel", "il", "kel", "kir", "lam", "lan", "lor", "mel", "mir", "mon", "nar", "nel", "or", "pel", "por"),
    *("rel", "rin", "ro", "sal", "sen", "sil", "tar", "tel", "tor", "ul", "vel", "vir", "wen", "yor", "za"),
)


def demonstrations(role: str, count: int, seed: int) -> list[Demonstration]:
    """``count`` correct conversations of ``role`` ("planner" or "executor"), the same for the same seed."""
    demonstrator = Demonstrator(random.Random(f"{seed} warm-up {role}"), SYLLABLES, mistakes=False)
    return [getattr(demonstrator, role)(KINDS[role][i % 4]) for i in range(count)]


def encode(chat: Chat, demonstration: Demonstration) -> Trajectory:
    """The demonstration as a trajectory: the same ids as if the agent had sampled its messages."""
    first, *others = demonstration.messages
    trajectory = Trajectory(demonstration.agent, "", 0)
    trajectory.read("user", first.content, chat.open(demonstration.agent, first.content))
    for message in others:
        if message.role == "user":
            trajectory.read("user", message.content, chat.respond(message.content, chat.stop_id))
        else:
            ids = [*chat.tokenizer(message.content, add_special_tokens=False)["input_ids"], chat.stop_id]
            trajectory.wrote(message.content, ids, [0.0] * len(ids))
    return trajectory


def batches(trajectories: list[Trajectory], tokens: int) -> list[list[Trajectory]]:
    """All of them once, in order, in batches of at most ``tokens`` padded tokens.

    Not sorted by length, as the learner does: a kind of question has a length, and a step should see every kind.
    """
    cut: list[list[Trajectory]] = [[]]
    for trajectory in trajectories:
        longest = max(len(t.token_ids) for t in [*cut[-1], trajectory])
        if cut[-1] and longest * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(trajectory)
    return cut


def warm_up(learner: Learner, shown_to_it: list[Demonstration], lr: float = LR) -> list[float]:
    """Fine-tune the learner's adapter on demonstrations of its role -> the loss of each step (nats a token).

    ``lr`` is the learning rate at the start. Prints one line, which grows by the mean loss of each tenth of the steps.
    When it is interrupted the adapter is as it was before.
    """
    policy, started = learner.policy, time.perf_counter()
    encoded = [encode(policy.chat, demonstration) for demonstration in shown_to_it]
    fitting = [t for t in encoded if len(t.token_ids) <= policy.max_context]
    steps = batches(fitting, min(BATCH, learner.objective.tokens))
    before = [parameter.detach().clone() for parameter in learner.parameters]
    losses: list[float] = []
    shown = 0
    print(f"warm-up of the {learner.role}, {len(fitting)} demonstrations, loss", end="", flush=True)
    try:
        for loss in _train(learner, steps, lr):
            losses.append(loss)
            if len(losses) * 10 // len(steps) > (len(losses) - 1) * 10 // len(steps):
                print(f" {sum(losses[shown:]) / len(losses[shown:]):.2f}", end="", flush=True)
                shown = len(losses)
    except BaseException:
        print()
        with torch.no_grad():
            for parameter, value in zip(learner.parameters, before, strict=True):
                parameter.copy_(value)
        raise
    print(f" ({time.perf_counter() - started:.0f} s)")
    return losses


def _train(learner: Learner, steps: list[list[Trajectory]], lr: float) -> Iterator[float]:
    """One optimizer step for each batch -> its loss."""
    policy, role = learner.policy, learner.role
    optimizer = torch.optim.Adam(learner.parameters, betas=(0.9, 0.95))
    policy.model.eval()  # as in an update: no dropout
    for number, batch in enumerate(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - number / len(steps))
        logprobs, mask = policy.score(role, [t.token_ids for t in batch], [t.mask for t in batch])
        optimizer.zero_grad(set_to_none=True)
        (-logprobs.sum()).backward()  # the sum: its mean follows in float32 (see learner)
        for parameter in learner.parameters:
            parameter.grad /= mask.sum()
        norm = torch.nn.utils.clip_grad_norm_(learner.parameters, learner.objective.max_grad_norm)
        if not norm.isfinite():
            raise FloatingPointError(f"the {role}'s loss is not finite in step {number + 1} of the warm-up")
        optimizer.step()
        yield (-logprobs.sum() / mask.sum()).item()
    optimizer.zero_grad(set_to_none=True)
