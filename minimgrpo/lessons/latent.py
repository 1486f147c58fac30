"""Lesson 15. DiffMAS: agents that hand over a KV cache instead of text, trained end to end through it.

Source: arXiv 2604.21794, of which we could read the abstract and summaries by others; the latent step is that of
LatentMAS' public code. Agent A reads its prompt, then takes T *latent steps*: the last hidden state h, mapped back to
where input embeddings live, is its next input; no token is chosen. Agent B reads the keys and values that this left
behind (the *trace*) as its cache, and answers. One frozen base serves all; LoRA (r = 8, alpha 16) is what is trained:

    step    e = |E| h W / |h W|,   W = (W_out' W_out + 1e-5 I)^-1 W_out' W_in     (`realign`; |E|: mean embedding norm)
    trace   T_j = [T_{j-1}; z_{j,1} .. z_{j,T}]                                   nothing is overwritten
    loss    -log p(answer | query, trace)

**Two readings.** Figure 1 is said to show a trace made *without gradient*, and an update of the last agent's LoRA only;
section 3.3 and appendix C are said to let gradients flow through all stages. There is no official code. We train both:
``end_to_end=False`` (the base sends, the reader has the adapter), ``end_to_end=True`` (one adapter sends and reads).

**The task.** A sees four facts (a key and one of 16 values each), B one key. Only the T latent positions are handed
over, not A's prompt: with its "whole cache" the channel is plain context. B's positions continue after the trace. A
sender and a reader that see the same input, as in the paper, would prove nothing.

Our choices: a Llama of 121,152 parameters, pretrained here on associative recall; 22,016 in the adapter; AdamW with lr
3e-3 (the paper: 5e-5, a cosine, 64 batches accumulated). What made training stable: input and output embeddings are
one matrix, as in the small Qwen3. With two, that of the output had a condition number near 50, W inverts it T times,
gradient norms began at 20 to 100, and one seed of two learned. And 128 episodes a step: with 32 (and two matrices) B
learned the four values but hardly whose they are (0.33 after 300 steps, 0.4 to 0.6 after 800). And rotary positions
with theta = 30: with 100, end to end reached anything from 0.63 to 0.80 on three seeds, after 500 steps.

What to know of the source. Its gains for Qwen3-8B (AIME24 26.7, GPQA-Diamond 20.2) are **percentage points over the
single agent** (50.0 to 76.7, 39.9 to 60.1), not accuracies; AIME24 has 30 questions, and no intervals are given. Text
agents with fine-tuning tie on AIME24. That an appended trace escapes the factor rho^(K-j) of an overwritten one is an
upper bound on gradients, no proof that they are alike. Nothing of this was repeated here. Safety: nobody can read
along; a text can be logged and filtered by anyone, a trace only be probed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minimgrpo.lessons import Claim
from minimgrpo.lessons._latent_lm import (
    CHANCE,
    FACTS,
    KEYS,
    PROMPT,
    VALUES,
    Llama,
    episodes,
    fit,
    lora,
    pretrain,
    tiny_lm,
    written,
)
from minimgrpo.sampler import cache_argument

CHANNELS = ("everything", "nothing", "whole cache", "latent", "permuted", "text", "copied text")

KV = list[tuple[Tensor, Tensor]]  # per layer: keys and values [batch, KV heads, positions, head size]


@dataclass(frozen=True)
class Plan:
    """How much to compute: ``pretraining`` and ``steps`` (of LoRA) in steps; T of ``sweep`` on the first seed only."""

    seeds: tuple[int, ...]
    pretraining: int
    steps: int
    sweep: tuple[int, ...]


QUICK = Plan((0,), 250, 60, (1, 4))
FULL = Plan((0, 1, 2), 250, 350, (1, 2, 4, 8))


def forward(lm: Llama, embeds: Tensor, cache: DynamicCache, start: int) -> Tensor:
    """Read ``embeds`` [B, n, d] at positions ``start`` ..., after what is in the cache (it grows) -> hidden [B, n, d].

    transformers would count positions from the cache's length; of ours a part was dropped, so we say them.
    """
    positions = torch.arange(start, start + embeds.shape[1])[None]
    options = {cache_argument(lm): cache, "use_cache": True}
    return lm.model(inputs_embeds=embeds, position_ids=positions, **options).last_hidden_state


def realign(lm: Llama, ridge: float = 1e-5) -> Callable[[Tensor], Tensor]:
    """LatentMAS' map from a hidden state [..., d] to an input embedding [..., d], without training."""
    W_in, W_out = (m.weight.detach().double() for m in (lm.get_input_embeddings(), lm.get_output_embeddings()))
    W = torch.linalg.solve(W_out.T @ W_out + ridge * torch.eye(W_in.shape[1], dtype=torch.float64), W_out.T @ W_in)
    W, norm = W.to(lm.dtype), float(W_in.norm(dim=-1).mean())
    return lambda h: norm * F.normalize(h @ W, dim=-1)


def trace(lm: Llama, prompt: Tensor, T: int, back: Callable, keep: int | None = None) -> KV:
    """A reads ``prompt`` [B, n, d] and takes T latent steps -> the cache's last ``keep`` (T) positions.

    Gradients flow through the cache: ``DynamicCache`` concatenates tensors and detaches none.
    """
    cache, keep = DynamicCache(), keep or T
    h = forward(lm, prompt, cache, 0)[:, -1:]
    for t in range(T):
        h = forward(lm, back(h), cache, prompt.shape[1] + t)
    return [(layer.keys[:, :, -keep:], layer.values[:, :, -keep:]) for layer in cache.layers]


def read(lm: Llama, embeds: Tensor, kv: KV = (), start: int = 0) -> Tensor:
    """B reads ``embeds`` [B, n, d] after the handed-over cache -> logits [B, vocabulary] of what comes next."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys, values, layer)
    return lm.lm_head(forward(lm, embeds, cache, start)[:, -1])


def answer(lm: Llama, asked: Tensor, kv: KV, T: int) -> Tensor:
    """Logits [B FACTS, vocabulary] for the keys ``asked`` [B, FACTS], each alone with its episode's trace."""
    kv = [(k.repeat_interleave(FACTS, 0), v.repeat_interleave(FACTS, 0)) for k, v in kv]
    return read(lm, lm.get_input_embeddings()(asked.reshape(-1, 1)), kv, PROMPT + T)


def write(lm: Llama, prompt: Tensor, T: int) -> Tensor:
    """A goes on for T greedy tokens -> their embeddings [B, T, d]."""
    cache, sent = DynamicCache(), []
    h = forward(lm, prompt, cache, 0)[:, -1:]
    for t in range(T):
        sent.append(lm.get_input_embeddings()(lm.lm_head(h).argmax(-1)))
        h = forward(lm, sent[-1], cache, prompt.shape[1] + t)
    return torch.cat(sent, 1)


def train(lm: Llama, T: int, end_to_end: bool, steps: int, seed: int, batch: int = 128, lr: float = 3e-3) -> Llama:
    """Fine-tune a LoRA copy of ``lm`` to answer from the trace -> the copy. Not end to end: ``lm`` itself sends."""
    student, generator = lora(lm, seed), torch.Generator().manual_seed(1000 + seed)
    sender, back, embed = student if end_to_end else lm, realign(lm), lm.get_input_embeddings()

    def loss() -> Tensor:
        keys, values = episodes(batch, generator)
        with parametrize.cached():
            with torch.set_grad_enabled(end_to_end):  # Figure 1: the trace is data. Section 3.3: part of the graph
                kv = trace(sender, embed(written(keys, values)), T, back)
            return F.cross_entropy(answer(student, keys, kv, T), values.flatten())

    fit((p for p in student.parameters() if p.requires_grad), loss, steps, lr)
    return student


@torch.no_grad()
def accuracy(reader: Llama, channel: str, T: int = 4, sender: Llama | None = None, n: int = 1000) -> Tensor:
    """B's accuracy [FACTS], by the fact's place in A's prompt, on ``n`` new episodes; A is ``sender`` or the reader.

    ``channel`` is one of CHANNELS; "permuted" hands B the trace of another episode. Raises ValueError for another one.
    """
    if channel not in CHANNELS:
        raise ValueError(f"a channel is {', '.join(CHANNELS)}, not {channel!r}")
    sender, embed = sender or reader, reader.get_input_embeddings()
    keys, values = episodes(n, torch.Generator().manual_seed(10**6))
    prompt = embed(written(keys, values))
    if channel == "nothing":
        logits = answer(reader, keys, [], T)
    elif channel in ("latent", "permuted", "whole cache"):
        kv = trace(sender, prompt, T, realign(sender), PROMPT + T if channel == "whole cache" else T)
        kv = [(k.roll(1, 0), v.roll(1, 0)) for k, v in kv] if channel == "permuted" else kv
        logits = answer(reader, keys, kv, T)
    else:
        told = write(sender, prompt, T) if channel == "text" else prompt[:, : T if channel == "copied text" else None]
        logits = read(reader, torch.cat([told.repeat_interleave(FACTS, 0), embed(keys.reshape(-1, 1))], 1))
    return (logits.argmax(-1) == values.flatten()).view(n, FACTS).float().mean(0)


def payload(config: LlamaConfig, T: int) -> int:
    """Numbers handed over with T positions: keys and values of every layer, 2 L T d (d: KV heads times head size).

    >>> qwen = LlamaConfig(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    >>> payload(qwen, 8) * 2  # bytes in bf16, at the size of Qwen3-4B; 128 token ids are 512 bytes
    1179648
    """
    return 2 * config.num_hidden_layers * T * config.num_key_value_heads * config.head_dim


def gradient(lm: Llama, T: int, end_to_end: bool, epsilon: float = 1e-6) -> tuple[float, float]:
    """dL/da where A's prompt embeddings are moved by a times a random direction: (autograd, central difference).

    In float64, throughout: Llama's norms and "eager" attention would go through float32, whose rounding asks for a step
    so long that the loss bends within it (a trained model's by more than 10 %).
    """
    lm, generator = copy.deepcopy(lm).double(), torch.Generator().manual_seed(0)
    lm.set_attn_implementation("sdpa")
    for norm in [m for m in lm.modules() if isinstance(m, LlamaRMSNorm)]:
        norm.forward = lambda x, norm=norm: F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    back, (keys, values) = realign(lm), episodes(8, generator)
    prompt = lm.get_input_embeddings()(written(keys, values)).detach()
    direction = torch.randn(prompt.shape, generator=generator, dtype=prompt.dtype)

    def loss(a: Tensor) -> Tensor:
        with torch.set_grad_enabled(end_to_end):
            kv = trace(lm, prompt + a * direction, T, back)
        return F.cross_entropy(answer(lm, keys, kv, T), values.flatten())

    a = torch.zeros((), dtype=prompt.dtype, requires_grad=True)
    (exact,) = torch.autograd.grad(loss(a), a, allow_unused=True)
    with torch.no_grad():
        numeric = (loss(a + epsilon) - loss(a - epsilon)) / (2 * epsilon)
    return 0.0 if exact is None else exact.item(), numeric.item()


def measure(plan: Plan) -> dict[str, np.ndarray]:
    """Accuracies by name: [seeds] each; "free sweep" and "end-to-end sweep" [len(plan.sweep)], on the first seed.

    "facts": end-to-end accuracy by the fact's place in A's prompt [seeds, FACTS].
    "gradient": see there; of the first seed end to end before and after training, then detached [3, 2].
    """
    found: dict[str, list] = {"free sweep": [], "end-to-end sweep": []}
    for seed in plan.seeds:
        lm = tiny_lm(seed)
        pretrain(lm, plan.pretraining, seed)
        reader, team = (train(lm, 4, end_to_end, plan.steps, seed) for end_to_end in (False, True))
        places = {channel: accuracy(lm, channel) for channel in CHANNELS}
        places["detached"] = accuracy(reader, "latent", sender=lm)
        places["end-to-end"] = accuracy(team, "latent")
        places["permuted"] = accuracy(team, "permuted")
        for name, place in places.items():
            found.setdefault(name, []).append(place.mean())
        found.setdefault("facts", []).append(places["end-to-end"])
        if seed == plan.seeds[0]:
            found["gradient"] = [gradient(lm, 4, True), gradient(team, 4, True), gradient(team, 4, False)]
            for T in plan.sweep:
                found["free sweep"].append(accuracy(lm, "latent", T).mean())
                one = team if T == 4 else train(lm, T, True, plan.steps, seed)
                found["end-to-end sweep"].append(accuracy(one, "latent", T).mean())
    return {name: np.array(values) for name, values in found.items()}


def judge(plan: Plan, m: dict[str, np.ndarray]) -> list[Claim]:
    """The claims, from what ``measure(plan)`` found."""

    def show(name: str) -> str:
        return f"{m[name].mean():.3f}" + (f" ± {m[name].std(ddof=1):.3f}" if len(plan.seeds) > 1 else "")

    def exceeds(more: str, less: str, margin: float = 0.0) -> str:  # on every seed
        gain = m[more] - m[less]
        return "shown" if gain.min() > margin else "reversed" if gain.max() < -margin else "not shown"

    def shown(condition) -> str:
        return "shown" if condition else "not shown"

    gain = m["end-to-end"] - m["detached"]
    guesses, (exact, numeric) = np.concatenate([m["nothing"], m["permuted"]]), m["gradient"].T
    seeds = f"{len(plan.seeds)} seed" + "s" * (len(plan.seeds) > 1)
    free, trained = (", ".join(f"{a:.2f}" for a in m[f"{name} sweep"]) for name in ("free", "end-to-end"))
    return [
        Claim(
            "with all facts in its own prompt B answers (0.95 of the questions)",
            f"{show('everything')} ({seeds}); with A's whole cache {show('whole cache')}",
            shown(m["everything"].min() >= 0.95),
        ),
        Claim(
            f"what B knows came through the trace: without it, or with another's, B guesses ({CHANCE:.4f} ± 0.03)",
            f"nothing {show('nothing')}; trained end to end, but permuted {show('permuted')}",
            shown(abs(guesses - CHANCE).max() <= 0.03),
        ),
        Claim(
            "without training, latents say more than as many greedy tokens (LatentMAS above text)",
            f"training-free {show('latent')}, text {show('text')}",
            exceeds("latent", "text"),
        ),
        Claim(
            "Figure 1's reading: to train the last agent alone, on traces as they are, helps (0.1 above no training)",
            f"detached {show('detached')}, training-free {show('latent')} ({plan.steps} steps)",
            exceeds("detached", "latent", 0.1),
        ),
        Claim(
            "section 3.3's reading: gradients through the trace are what helps (0.3 above detached on average, "
            "and above it on every seed)",
            f"end-to-end {show('end-to-end')}, detached {show('detached')}; the least gain is {gain.min():.3f}",
            exceeds("end-to-end", "detached") if abs(gain.mean()) > 0.3 else "not shown",
        ),
        Claim(
            "autograd through the cache is the true gradient (1e-4 of a central difference)",
            f"{exact[0]:.6f}, the difference {numeric[0]:.6f}; after training {exact[1]:.6f}, {numeric[1]:.6f}; "
            f"detached {exact[2]:.0f}, {numeric[2]:.6f}",
            shown((abs(exact - numeric)[:2] <= 1e-4 * abs(numeric[:2])).all() and exact[2] == 0),
        ),
        Claim(
            "more latent steps say more",
            f"end-to-end {trained}, training-free {free} with T = {', '.join(map(str, plan.sweep))} (1 seed)",
            shown((np.diff(m["end-to-end sweep"]) > 0).all()),
        ),
        Claim(
            "trained latents say more than as many tokens of A's prompt, word for word",
            f"end-to-end {show('end-to-end')} in {payload(tiny_lm(0).config, 4):,} numbers, copied text "
            f"{show('copied text')} in {4 * math.log2(KEYS + VALUES):.0f} bits",
            exceeds("end-to-end", "copied text"),
        ),
    ]


def claims(quick: bool = False) -> list[Claim]:
    plan = QUICK if quick else FULL
    return judge(plan, measure(plan))
