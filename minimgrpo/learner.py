"""One role's update: a batch of trajectories -> loss -> optimizer -> checkpoint.

Each trajectory is computed once and weighted by its copies (a duplicate is a loss weight). Trajectories without
advantage are left out before any forward pass: they add nothing to the gradient, but stay in the denominator. The rest
is sorted by length into micro-batches of about equal cost, which share one denominator, so splitting does not change
the gradient. The old log-probs are the sampled ones; with one epoch the first pass has ratio 1. Dropout, the base's
and LoRA's, stays off in an update too: else the ratio of the very same weights would not be 1.

On a float16 base the LoRA weights, their gradients and Adam are float32 all the same, but the gradients of the
activations in between are float16, and a mean over thousands of tokens would push them below its smallest number. So
the backward pass runs on about the sum over the tokens and the division follows in float32, by a power of two: it is
exact, and on a float32 base the result is the same to the bit. What overflows in spite of that is not finite, and stops
the run before the optimizer moves.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from minimgrpo import grpo
from minimgrpo.policy import ModelError, Policy
from minimgrpo.trajectory import Trajectory

SAVED = ("adapter_model.safetensors", "optimizer.pt")


@dataclass(frozen=True)
class Objective:
    """The loss and its optimizer."""

    lr: float = 2e-3
    "Adam's learning rate"
    clip_low: float = 0.2
    "how far a ratio may fall below 1"
    clip_high: float = 0.28
    "how far a ratio may rise above 1"
    ratio: str = "token"
    "importance ratio: token, sequence (the paper's product) or sequence_mean"
    average: str = "token"
    "loss average: token, sequence or constant"
    kl: float = 0.0
    "weight of the KL to the base (0: off, and no extra pass)"
    epochs: int = 1
    "passes over each batch; one optimizer step a pass"
    max_grad_norm: float = 1.0
    "gradients longer than this are shortened to it"
    tokens: int = 2048
    "padded tokens in a micro-batch: few stay in a CPU's cache (1.4 times faster than 12,288) and bound the memory"


class Damaged(ModelError):
    """A checkpoint is not what was saved."""


class Learner:
    """Trains the adapter of ``role``; ``version`` counts its updates."""

    def __init__(self, policy: Policy, role: str, objective: Objective, temperature: float = 1.0):
        if temperature <= 0:
            raise ValueError(f"training needs a temperature above 0, not {temperature}")
        self.policy, self.role, self.objective, self.temperature = policy, role, objective, temperature
        self.parameters = list(policy.parameters(role).values())
        self.optimizer = torch.optim.Adam(self.parameters, lr=objective.lr, betas=(0.9, 0.95))
        self.version = 0

    def update(self, trajectories: list[Trajectory], lr: float | None = None) -> dict[str, float]:
        """One step on a batch whose ``advantage`` and ``copies`` are set -> what it measured (``metrics.LEARNED``).

        ``trained`` trajectories of ``trained_tokens`` tokens took part; ``loss``, ``grad_norm`` (before shortening) and
        ``grpo.policy_stats`` describe the last epoch, before its optimizer step, and are absent if nothing took part.
        Where several agents share the adapter, ``grad_norms`` has the length of each one's part of the gradient.
        """
        objective, started = self.objective, time.perf_counter()
        kept = [t for t in trajectories if t.copies > 0 and t.sampled]
        used = kept if objective.kl else [t for t in kept if t.advantage != 0]
        used = sorted(used, key=lambda t: (t.agent, len(t.token_ids)))
        lr = objective.lr if lr is None else lr
        metrics = {"lr": lr, "trained": len(used), "trained_tokens": sum(len(t.token_ids) for t in used)}
        self.policy.use(self.role)
        self.policy.model.eval()  # no dropout: the network that is trained is the one that sampled
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for _ in range(objective.epochs if used else 0):
            self.optimizer.zero_grad(set_to_none=True)
            scale = 2.0 ** math.ceil(math.log2(self._tokens(kept)))
            metrics |= self._accumulate(used, self._normalizer(kept), self._tokens(kept), scale)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad /= scale
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, objective.max_grad_norm).item()
            if not math.isfinite(norm + metrics["loss"]):  # a NaN loss can come with a gradient of 0
                raise FloatingPointError(f"the {self.role}'s loss is not finite in update {self.version + 1}")
            self.optimizer.step()
            metrics["grad_norm"] = norm
        self.version += 1
        return metrics | {"learn_seconds": time.perf_counter() - started}

    def _accumulate(
        self, used: list[Trajectory], normalizer: float, tokens: float, scale: float = 1.0
    ) -> dict[str, float]:
        """Add ``scale`` times the whole batch's gradient to the parameters, micro-batch by micro-batch."""
        objective, total, weighted = self.objective, {"loss": 0.0, "ratio_max": 0.0}, 0.0
        several, parts = len({t.agent for t in used}) > 1, {}
        for batch in self._micro_batches(used):
            ids, masks = [t.token_ids for t in batch], [t.mask for t in batch]
            logprobs, mask = self.policy.score(self.role, ids, masks, self.temperature)
            width = mask.shape[1]
            device = logprobs.device
            old = torch.tensor([t.logprobs + [0.0] * (width - len(t.logprobs)) for t in batch], device=device)
            advantages = torch.tensor([t.advantage for t in batch], device=device)
            copies = torch.tensor([float(t.copies) for t in batch], device=device)
            clip = (objective.clip_low, objective.clip_high, objective.ratio)
            loss = grpo.policy_loss(
                logprobs, old, advantages, mask, copies, *clip, average=objective.average, normalizer=normalizer
            )
            if objective.kl:
                with torch.no_grad():
                    reference, _ = self.policy.score(None, ids, masks, self.temperature)
                self.policy.use(self.role)
                divergence = (grpo.kl_k3(logprobs, reference) * mask * copies[:, None]).sum() / tokens
                loss = loss + objective.kl * divergence
                total["kl"] = total.get("kl", 0.0) + divergence.item()
            before = self._gradient() if several else None
            (loss * scale).backward()
            if several:
                parts[batch[0].agent] = parts.get(batch[0].agent, 0.0) + self._gradient() - before
            stats = grpo.policy_stats(logprobs.detach(), old, advantages, mask, copies, *clip)
            total["loss"] += loss.item()
            total["ratio_max"] = max(total["ratio_max"], stats.pop("ratio_max"))
            for name, value in stats.items():
                total[name] = total.get(name, 0.0) + value * self._tokens(batch)
            weighted += self._tokens(batch)
        means = {n: v if n in ("loss", "ratio_max", "kl") else v / weighted for n, v in total.items()}
        norms = {agent: part.norm().item() / scale for agent, part in parts.items()}
        return means | ({"grad_norms": norms} if several else {})

    def _gradient(self) -> torch.Tensor:
        """The accumulated gradient as one vector."""
        return torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        )

    def _micro_batches(self, used: list[Trajectory]) -> list[list[Trajectory]]:
        """Cut a list sorted by agent and length into pieces of one agent, at most ``objective.tokens`` padded tokens.

        (There are several agents only where they share the adapter.)
        """
        batches: list[list[Trajectory]] = []
        for trajectory in used:
            same = batches and batches[-1][0].agent == trajectory.agent
            if not same or len(trajectory.token_ids) * (len(batches[-1]) + 1) > self.objective.tokens:
                batches.append([])
            batches[-1].append(trajectory)
        return batches

    def _tokens(self, trajectories: list[Trajectory]) -> float:
        return float(sum(t.copies * t.sampled for t in trajectories))

    def _normalizer(self, kept: list[Trajectory]) -> float:
        width = max(len(t.mask) for t in kept)
        mask = torch.tensor([t.mask + [0] * (width - len(t.mask)) for t in kept])
        return grpo.loss_normalizer(mask, [t.copies for t in kept], self.objective.average)

    # ---------------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer, version and checksums into ``folder``."""
        self.policy.save_adapter(self.role, folder)
        content = io.BytesIO()  # torch.save to a file would turn a full disk into a RuntimeError
        torch.save(self.optimizer.state_dict(), content)
        (folder / "optimizer.pt").write_bytes(content.getvalue())
        facts = {"role": self.role, "version": self.version, "sha256": {name: _sha256(folder / name) for name in SAVED}}
        (folder / "learner.json").write_text(json.dumps(facts), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from what ``save`` wrote. Raises Damaged when it is not that any more; nothing is changed then."""
        try:
            facts = json.loads((folder / "learner.json").read_text(encoding="utf-8"))
            for name in SAVED:  # neither safetensors nor torch.load would notice a wrong byte among the numbers
                if _sha256(folder / name) != facts["sha256"][name]:
                    raise ValueError(f"{name} is not what was saved")
            version, optimizer = facts["version"], torch.load(folder / "optimizer.pt", "cpu", weights_only=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise Damaged(f"the checkpoint {folder} is damaged ({error})") from None
        self.policy.load_adapter(self.role, folder)
        self.optimizer.load_state_dict(optimizer)
        self.version = version


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
