"""The model of lesson 15 (``latent``): a Llama of 121,152 parameters, facts to recall, and LoRA on all its layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Llama

KEYS, VALUES, FACTS = 16, 16, 4
PROMPT, CHANCE = 2 * FACTS, 1 / VALUES  # tokens that A reads; what a guess gets right


def tiny_lm(seed: int) -> Llama:
    """A Llama with random weights; its vocabulary is the keys, then the values."""
    config = LlamaConfig(
        vocab_size=KEYS + VALUES,
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},  # a context of 24, not of thousands
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.06,  # 0.02 is for models ten times as wide: attention starts flat and stays so for long
        attn_implementation="eager",  # it can return its attention, for `pretrain`
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Llama(config)


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


def pretrain(lm: Llama, steps: int, seed: int, batch: int = 32, repeats: int = 8, lr: float = 3e-3) -> None:
    """Associative recall: four facts, then eight of them again; the loss is on the repeated values, a little on all.

    Without help no circuit formed within 500 steps. Two more losses say where to look with half of the attention: one
    head of the first layer from a value to its key, one of the second from a repeated key to the values behind it.
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
        hints = -(to_key.clamp(1e-6, 0.5).log().mean() + to_value.clamp(1e-6, 0.5).log().mean())
        return losses[:, PROMPT::2].mean() + 0.2 * losses.mean() + hints

    fit(lm.parameters(), loss, steps, lr)
    lm.set_attn_implementation("sdpa")


class LoRA(nn.Module):
    """W + (alpha / r) B A, computed when the weight W [out, in] is used; B starts at 0."""

    def __init__(self, W: Tensor, r: int = 8, alpha: int = 16):
        super().__init__()
        self.lora_A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(r, W.shape[1]), a=math.sqrt(5)))
        self.lora_B = nn.Parameter(torch.zeros(W.shape[0], r))
        self.scale = alpha / r

    def forward(self, W: Tensor) -> Tensor:
        return W + self.scale * self.lora_B @ self.lora_A


def lora(lm: Llama, seed: int) -> Llama:
    """A copy of ``lm`` with LoRA in every linear layer but the output head; nothing else can be trained.

    The same as PEFT's; ours makes a weight once a step (``parametrize.cached``), not once for each of its T + 2 uses.
    """
    lm = copy.deepcopy(lm).requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in list(lm.model.modules()):
            if isinstance(module, nn.Linear):
                parametrize.register_parametrization(module, "weight", LoRA(module.weight))
    return lm
