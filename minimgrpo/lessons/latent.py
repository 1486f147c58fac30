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

**The task.** A sees four facts (a key and one of 16 values each), B one key. Chance is 1/16. Only the T latent
positions are handed over, not A's prompt: with the prompt's cache the channel would be plain context ("whole cache"
below). B's positions continue after the trace. A sender and a reader that see the same input, as in the paper, would
prove nothing.

Our choices: a Llama of 2 layers, 123,200 parameters, pretrained here on associative recall; 22,016 in the adapter;
AdamW with lr 3e-3 (the paper: 5e-5, a cosine, 64 batches accumulated). Baselines: T greedy tokens ("text"); T expected
embeddings, sum_v p(v) E[v] ("CIPHER"); the first T tokens of A's prompt, word for word ("copied text").

What to know of the source. Its gains for Qwen3-8B (AIME24 26.7, GPQA-Diamond 20.2) are **percentage points over the
single agent** (50.0 to 76.7, 39.9 to 60.1), not accuracies; AIME24 has 30 questions, and no intervals are given. Text
agents with fine-tuning tie on AIME24. That an appended trace escapes the factor rho^(K-j) of an overwritten one is an
upper bound on gradients, no proof that they are alike. Nothing of this was repeated here.

Safety: nobody can read along. ``monitor`` measures what the output head makes of the latents (a logit lens).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from minimgrpo.base import quiet
from minimgrpo.lessons import Claim
from minimgrpo.sampler import cache_argument

KEYS, VALUES, FACTS = 16, 16, 4
PROMPT, CHANCE = 2 * FACTS, 1 / VALUES  # tokens that A reads; what a guess gets right
CHANNELS = ("everything", "nothing", "whole cache", "latent", "permuted", "text", "CIPHER", "copied text")

KV = list[tuple[Tensor, Tensor]]  # per layer: keys and values [batch, KV heads, positions, head size]


@dataclass(frozen=True)
class Plan:
    """How much to compute: ``pretraining`` and ``steps`` (of LoRA) in steps; T of ``sweep`` on the first seed only."""

    seeds: tuple[int, ...]
    pretraining: int
    steps: int
    sweep: tuple[int, ...]


QUICK = Plan((0,), 250, 150, (1, 4))
FULL = Plan((0, 1), 300, 800, (1, 4))


def tiny_lm(seed: int) -> LlamaForCausalLM:
    """A Llama with random weights; its vocabulary is the keys, then the values."""
    config = LlamaConfig(
        vocab_size=KEYS + VALUES,
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # a context of 24, not of thousands
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",  # it can return its attention; at this size it is as fast as any
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def episodes(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys [n, FACTS], all different, and their values [n, FACTS], independent: another's facts say nothing of mine."""
    keys = torch.rand(n, KEYS, generator=generator).argsort(-1)[:, :FACTS]
    return keys, KEYS + torch.randint(VALUES, (n, FACTS), generator=generator)


def written(keys: Tensor, values: Tensor) -> Tensor:
    """Facts as tokens, key value key value ...

    >>> written(torch.tensor([[3, 1]]), torch.tensor([[20, 31]])).tolist()
    [[3, 20, 1, 31]]
    """
    return torch.stack([keys, values], -1).flatten(1)


def fit(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, lr: float) -> None:
    """AdamW on a new ``loss()`` each step; the rate rises for a tenth of the steps, then falls to 0."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(steps // 10, 1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / warm, (steps - s) / (steps - warm + 1)))
    for _ in range(steps):
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()


def pretrain(lm: LlamaForCausalLM, steps: int, seed: int, batch: int = 32, repeats: int = 8, lr: float = 5e-3) -> None:
    """Associative recall: four facts, then eight of them again; the loss is on the repeated values, a little on all.

    Without help no circuit formed within 600 steps (with RoPE's base at 10,000). Two more losses say where to look:
    one head of the first layer from a value to its key, one of the second from a repeated key to the values behind it.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        keys, values = episodes(batch, generator)
        again = torch.randint(FACTS, (batch, repeats), generator=generator)
        tokens = torch.cat([written(keys, values), written(keys.gather(1, again), values.gather(1, again))], 1)
        out = lm(input_ids=tokens[:, :-1], use_cache=False, output_attentions=True)
        losses = F.cross_entropy(out.logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        first, second = (attention[:, 0] for attention in out.attentions)  # of one head each: [B, from, to]
        to_key = first.diagonal(-1, 1, 2)[:, ::2]
        behind = tokens[:, PROMPT:-1:2, None] == tokens[:, None, :-2]  # [B, repeated keys, all places but the first]
        to_value = (second[:, PROMPT::2, 1:] * behind).sum(-1)
        hints = -(to_key.clamp_min(1e-6).log().mean() + to_value.clamp_min(1e-6).log().mean())
        return losses[:, PROMPT::2].mean() + 0.2 * losses.mean() + hints

    fit(lm.parameters(), loss, steps, lr)


def forward(lm: LlamaForCausalLM, embeds: Tensor, cache: DynamicCache, start: int) -> Tensor:
    """Read ``embeds`` [B, n, d] at positions ``start`` ..., after what is in the cache (it grows) -> hidden [B, n, d].

    transformers would count positions from the cache's length; of ours a part was dropped, so we say them.
    """
    positions = torch.arange(start, start + embeds.shape[1])[None]
    options = {cache_argument(lm): cache, "use_cache": True}
    return lm.model(inputs_embeds=embeds, position_ids=positions, **options).last_hidden_state


def realign(lm: LlamaForCausalLM, ridge: float | None = 1e-5) -> Callable[[Tensor], Tensor]:
    """LatentMAS' map from a hidden state [..., d] to an input embedding [..., d], no training; None: only the norm."""
    W_in, W_out = (m.weight.detach().double() for m in (lm.get_input_embeddings(), lm.get_output_embeddings()))
    W = eye = torch.eye(W_in.shape[1], dtype=torch.float64)
    if ridge is not None:
        W = torch.linalg.solve(W_out.T @ W_out + ridge * eye, W_out.T @ W_in)
    W, norm = W.to(lm.dtype), float(W_in.norm(dim=-1).mean())
    return lambda h: norm * F.normalize(h @ W, dim=-1)


def trace(lm: LlamaForCausalLM, prompt: Tensor, T: int, back: Callable, keep: int | None = None) -> tuple[KV, Tensor]:
    """A reads ``prompt`` [B, n, d], takes T latent steps -> the cache's last ``keep`` (T) positions, hidden [B, T, d].

    Gradients flow through the cache: ``DynamicCache`` concatenates tensors and detaches none.
    """
    cache, hidden = DynamicCache(), []
    h = forward(lm, prompt, cache, 0)[:, -1:]
    for t in range(T):
        h = forward(lm, back(h), cache, prompt.shape[1] + t)
        hidden.append(h)
    keep = T if keep is None else keep
    return [(layer.keys[:, :, -keep:], layer.values[:, :, -keep:]) for layer in cache.layers], torch.cat(hidden, 1)


def read(lm: LlamaForCausalLM, embeds: Tensor, kv: KV = (), start: int = 0) -> Tensor:
    """B reads ``embeds`` [B, n, d] after the handed-over cache -> logits [B, vocabulary] of what comes next."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys, values, layer)
    return lm.lm_head(forward(lm, embeds, cache, start)[:, -1])


def each(x: Tensor) -> Tensor:
    """Every row once per fact: one trace answers four questions."""
    return x.repeat_interleave(FACTS, 0)


def answer(lm: LlamaForCausalLM, asked: Tensor, kv: KV, T: int) -> Tensor:
    """Logits [B FACTS, vocabulary] for the keys ``asked`` [B, FACTS], each alone with its episode's trace."""
    embeds = lm.get_input_embeddings()(asked.reshape(-1, 1))
    return read(lm, embeds, [(each(k), each(v)) for k, v in kv], PROMPT + T)


def write(lm: LlamaForCausalLM, prompt: Tensor, T: int, expected: bool) -> Tensor:
    """A goes on for T tokens -> [B, T, d], the embedding of the likeliest token or the ``expected`` one (CIPHER)."""
    cache, sent, E = DynamicCache(), [], lm.get_input_embeddings().weight
    h = forward(lm, prompt, cache, 0)[:, -1:]
    for t in range(T):
        logits = lm.lm_head(h)
        sent.append(logits.softmax(-1) @ E if expected else E[logits.argmax(-1)])
        h = forward(lm, sent[-1], cache, prompt.shape[1] + t)
    return torch.cat(sent, 1)


def lora(lm: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """A copy of ``lm`` with PEFT's LoRA in every linear layer but the output head; nothing else can be trained."""
    quiet()
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(copy.deepcopy(lm), config).get_base_model()


def train(
    lm: LlamaForCausalLM, T: int, end_to_end: bool, steps: int, seed: int, batch: int = 32, lr: float = 3e-3
) -> LlamaForCausalLM:
    """Fine-tune a LoRA copy of ``lm`` to answer from the trace -> the copy. Not end to end: ``lm`` itself sends."""
    student, generator = lora(lm, seed), torch.Generator().manual_seed(1000 + seed)
    sender, back, embed = student if end_to_end else lm, realign(lm), lm.get_input_embeddings()

    def loss() -> Tensor:
        keys, values = episodes(batch, generator)
        with torch.set_grad_enabled(end_to_end):  # Figure 1: the trace is data. Section 3.3: part of the graph
            kv, _ = trace(sender, embed(written(keys, values)), T, back)
        return F.cross_entropy(answer(student, keys, kv, T), values.flatten())

    fit((p for p in student.parameters() if p.requires_grad), loss, steps, lr)
    return student


@torch.no_grad()
def accuracy(
    reader: LlamaForCausalLM,
    channel: str,
    T: int = 4,
    sender: LlamaForCausalLM | None = None,
    back: Callable | None = None,
    n: int = 1000,
    seed: int = 10**6,
) -> Tensor:
    """B's accuracy [FACTS], by the fact's place in A's prompt, on ``n`` new episodes; A is ``sender`` or the reader.

    ``channel`` is one of CHANNELS; "permuted" hands B the trace of another episode. Raises ValueError for another one.
    """
    if channel not in CHANNELS:
        raise ValueError(f"a channel is {', '.join(CHANNELS)}, not {channel!r}")
    sender, embed = sender or reader, reader.get_input_embeddings()
    keys, values = episodes(n, torch.Generator().manual_seed(seed))
    prompt = embed(written(keys, values))
    if channel == "nothing":
        logits = answer(reader, keys, [], T)
    elif channel in ("latent", "permuted", "whole cache"):
        kv, _ = trace(sender, prompt, T, back or realign(sender), PROMPT + T if channel == "whole cache" else T)
        kv = [(k.roll(1, 0), v.roll(1, 0)) for k, v in kv] if channel == "permuted" else kv
        logits = answer(reader, keys, kv, T)
    else:
        told = {"everything": prompt, "copied text": prompt[:, :T]}.get(channel)
        told = write(sender, prompt, T, channel == "CIPHER") if told is None else told
        logits = read(reader, torch.cat([each(told), embed(keys.reshape(-1, 1))], 1))
    return (logits.argmax(-1) == values.flatten()).view(n, FACTS).float().mean(0)


@torch.no_grad()
def monitor(sender: LlamaForCausalLM, T: int, back: Callable, n: int = 1000, seed: int = 10**6) -> float:
    """The share of A's values that the output head, put on the T latent states, names at least once (a logit lens)."""
    keys, values = episodes(n, torch.Generator().manual_seed(seed))
    _, hidden = trace(sender, sender.get_input_embeddings()(written(keys, values)), T, back)
    named = sender.lm_head(hidden).argmax(-1)  # [n, T]
    return (values[:, :, None] == named[:, None]).any(-1).float().mean().item()


def payload(config: LlamaConfig, T: int) -> int:
    """Numbers handed over with T positions: keys and values of every layer, 2 L T d (d: KV heads times head size).

    >>> payload(tiny_lm(0).config, 4)  # four tokens of a vocabulary of 32 are 20 bits
    1024
    >>> qwen = LlamaConfig(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    >>> payload(qwen, 8) * 2  # bytes in bf16, at the size of Qwen3-4B; 128 token ids are 512 bytes
    1179648
    """
    return 2 * config.num_hidden_layers * T * config.num_key_value_heads * config.head_dim


def gradient(lm: LlamaForCausalLM, T: int, end_to_end: bool, epsilon: float = 1e-3) -> tuple[float, float]:
    """dL/da where A's prompt embeddings are moved by a times a random direction: (autograd, finite difference)."""
    lm, generator = copy.deepcopy(lm).double(), torch.Generator().manual_seed(0)
    back, (keys, values) = realign(lm), episodes(8, generator)
    prompt = lm.get_input_embeddings()(written(keys, values)).detach()
    direction = torch.randn(prompt.shape, generator=generator, dtype=prompt.dtype)

    def loss(a: Tensor) -> Tensor:
        with torch.set_grad_enabled(end_to_end):
            kv, _ = trace(lm, prompt + a * direction, T, back)
        return F.cross_entropy(answer(lm, keys, kv, T), values.flatten())

    a = torch.zeros((), dtype=prompt.dtype, requires_grad=True)
    (exact,) = torch.autograd.grad(loss(a), a, allow_unused=True)
    with torch.no_grad():
        numeric = (loss(a + epsilon) - loss(a - epsilon)) / (2 * epsilon)
    return 0.0 if exact is None else exact.item(), numeric.item()


def measure(plan: Plan) -> dict[str, np.ndarray]:
    """Accuracies by name: [seeds] each; "free sweep" and "end-to-end sweep" [len(plan.sweep)], on the first seed.

    "facts": training-free, detached and end-to-end accuracy by the fact's place in A's prompt [3, FACTS], over seeds.
    "monitor": what the logit lens finds, before and after training [seeds, 2]. "gradient": see there [2, 2].
    """
    found, facts, sweeps = {}, [], []
    for seed in plan.seeds:
        lm = tiny_lm(seed)
        pretrain(lm, plan.pretraining, seed)
        reader, team = (train(lm, 4, end_to_end, plan.steps, seed) for end_to_end in (False, True))
        back = realign(lm)
        places = {channel: accuracy(lm, channel) for channel in CHANNELS}
        places["norm only"] = accuracy(lm, "latent", back=realign(lm, None))
        places["detached"] = accuracy(reader, "latent", sender=lm)
        places["end-to-end"] = accuracy(team, "latent")
        places["permuted"] = accuracy(team, "permuted")
        for name, place in places.items():
            found.setdefault(name, []).append(place.mean())
        facts.append(torch.stack([places[name] for name in ("latent", "detached", "end-to-end")]))
        found.setdefault("monitor", []).append([monitor(model, 4, back) for model in (lm, team)])
        if seed == plan.seeds[0]:
            found["gradient"] = [gradient(lm, 4, end_to_end) for end_to_end in (True, False)]
            found["free sweep"] = [accuracy(lm, "latent", T).mean() for T in plan.sweep]
            for T in plan.sweep:
                one = team if T == 4 else train(lm, T, True, plan.steps, seed)
                sweeps.append(accuracy(one, "latent", T).mean())
    found["facts"], found["end-to-end sweep"] = torch.stack(facts).mean(0), sweeps
    return {name: np.array(values) for name, values in found.items()}


def judge(plan: Plan, m: dict[str, np.ndarray]) -> list[Claim]:
    """The claims, from what ``measure(plan)`` found."""

    def show(name: str) -> str:
        return f"{m[name].mean():.3f}" + (f" ± {m[name].std(ddof=1):.3f}" if len(plan.seeds) > 1 else "")

    def shown(condition, opposite=False) -> str:
        return "shown" if condition else "reversed" if opposite else "not shown"

    guesses = np.concatenate([m["nothing"], m["permuted"]])
    gain, reader_gain = m["end-to-end"] - m["detached"], m["detached"] - m["latent"]
    free_gain, text_gain = m["latent"] - m["text"], m["end-to-end"] - m["copied text"]
    hidden = m["end-to-end"] - m["monitor"][:, 1]
    (exact, numeric), (dropped, there) = m["gradient"]
    numbers, bits, rises = payload(tiny_lm(0).config, 4), 4 * math.log2(KEYS + VALUES), np.diff(m["end-to-end sweep"])
    over = f"{len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "1 seed"
    sweep = ", ".join(map(str, plan.sweep))
    return [
        Claim(
            "with all facts in its own prompt B answers (0.95 of the questions)",
            f"{show('everything')} ({over}; chance {CHANCE:.4f}, T = 4 from here on)",
            shown(m["everything"].min() >= 0.95),
        ),
        Claim(
            "what B knows came through the trace: without it, or with another episode's, B guesses (chance ± 0.03)",
            f"nothing {show('nothing')}, trained end to end and permuted {show('permuted')}",
            shown(abs(guesses - CHANCE).max() <= 0.03),
        ),
        Claim(
            "latents need no training to say more than as many greedy tokens (LatentMAS above text)",
            f"latent {show('latent')} (norm only {show('norm only')}), text {show('text')}, CIPHER {show('CIPHER')}",
            shown(free_gain.min() > 0, free_gain.max() < 0),
        ),
        Claim(
            "Figure 1's reading: to train the last agent alone, on traces as they are, helps (0.1 above no training)",
            f"detached {show('detached')}, training-free {show('latent')} ({plan.steps} steps)",
            shown(reader_gain.min() > 0.1, reader_gain.max() < -0.1),
        ),
        Claim(
            "section 3.3's reading: gradients through the trace are what helps (0.3 above detached)",
            f"end-to-end {show('end-to-end')}, detached {show('detached')} ({plan.steps} steps)",
            shown(gain.min() >= 0.3, gain.max() < 0),
        ),
        Claim(
            "autograd through the cache is the true gradient (1 % of a finite difference)",
            f"{exact:.5f}, finite difference {numeric:.5f}; detached {dropped:.0f} where the difference is {there:.5f}",
            shown(abs(exact - numeric) <= 0.01 * abs(numeric) and dropped == 0),
        ),
        Claim(
            "more latent steps say more",
            f"end-to-end {', '.join(f'{a:.2f}' for a in m['end-to-end sweep'])}; training-free "
            f"{', '.join(f'{a:.2f}' for a in m['free sweep'])} with T = {sweep} (1 seed)",
            shown((rises > 0).all(), (rises < 0).all()),
        ),
        Claim(
            "trained latents say more than as many tokens of A's prompt, word for word",
            f"end-to-end {show('end-to-end')}, copied text {show('copied text')}",
            shown(text_gain.min() > 0, text_gain.max() < 0),
        ),
        Claim(
            "latents are the shorter message",
            f"{numbers:,} numbers (float32: {4 * numbers:,} bytes) for T = 4; four tokens are {bits:.0f} bits",
            shown(32 * numbers < bits, 32 * numbers > bits),
        ),
        Claim(
            "one can read along: a logit lens names the values that B can get at (no 0.1 fewer)",
            f"the lens {m['monitor'][:, 1].mean():.3f} of them, before training {m['monitor'][:, 0].mean():.3f}; "
            f"B {show('end-to-end')}",
            shown(hidden.max() <= 0.1, hidden.min() > 0.1),
        ),
    ]


def claims(quick: bool = False) -> list[Claim]:
    plan = QUICK if quick else FULL
    return judge(plan, measure(plan))
