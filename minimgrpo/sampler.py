"""Sampling: one batched, KV-cached decode loop for many conversations that only ever grow.

``Conversations`` holds the key/value cache of every conversation of one role. ``generate`` appends new tokens (a prompt
or a tool's output) to some of them and samples one message for each. Nothing is ever computed twice: identical first
prompts (a group's K rollouts) are prefilled once, and later turns append to the cache. Rows that have finished their
message leave the batch when they are half of it.

What comes back is exact: the sampled ids, stop token included, and each one's log-prob under exactly the distribution
it was drawn from (temperature divided in, no top-k or top-p). Rows of different lengths stand in one buffer,
left-aligned, each with its own length, position ids and attention mask, so a row's result does not depend on its
neighbours.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin


@dataclass
class Sample:
    """One sampled message: ids and log-probs of equal length; ``stopped_by`` is its stop token, None if cut short."""

    ids: list[int]
    logprobs: list[float]
    stopped_by: int | None


class _Layer(CacheLayerMixin):
    """One layer's keys and values [rows, heads, slots, head_dim], written at each row's own positions."""

    is_sliding = False

    def __init__(self, batch: _Batch):
        super().__init__()
        self.batch = batch

    def lazy_initialization(self, key_states, value_states) -> None:
        rows, heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self.batch.slots, dim)
        self.values = value_states.new_zeros(rows, heads, self.batch.slots, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states, value_states, *_args, **_kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.batch
        if key_states.shape[2] == 1:
            self.keys[batch.row, :, batch.positions[:, 0]] = key_states[:, :, 0]
            self.values[batch.row, :, batch.positions[:, 0]] = value_states[:, :, 0]
        else:
            self.keys[batch.row[:, None], :, batch.positions] = key_states.transpose(1, 2)
            self.values[batch.row[:, None], :, batch.positions] = value_states.transpose(1, 2)
        return self.keys[:, :, : batch.visible], self.values[:, :, : batch.visible]

    def select(self, index) -> None:
        self.keys, self.values = self.keys[index], self.values[index]

    def grow(self, slots: int) -> None:
        extra = slots - self.keys.shape[2]
        if extra > 0:
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def get_mask_sizes(self, query_length):
        return self.batch.visible, 0

    def get_seq_length(self) -> int:
        return self.batch.visible

    def get_max_length(self) -> int:
        return -1


class _Batch:
    """The rows of one forward pass: what a transformers model takes for its cache (``update`` and a few questions).

    ``lengths[r]`` tokens of row r are cached; ``positions`` [rows, new] are where the tokens now coming in are written;
    attention sees the first ``visible`` slots, each row through its own mask.
    """

    is_compileable = False

    def __init__(self, layers: int, rows: int, device):
        self.layers = [_Layer(self) for _ in range(layers)]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.row = torch.arange(rows, device=device)
        self.slots = self.visible = 0
        self.positions = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length, layer_idx: int = 0):
        return self.visible, 0

    def place(self, new: int) -> torch.Tensor:
        """Make room for ``new`` tokens in every row -> their attention mask [rows, 1, new, visible]."""
        self.positions = self.lengths[:, None] + torch.arange(new, device=self.lengths.device)
        self.visible = int(self.positions[:, -1].max()) + 1
        if self.visible > self.slots:
            self.slots = (self.visible + 63) // 64 * 64  # grow in blocks, not at every token
            for layer in self.layers:
                if layer.is_initialized:
                    layer.grow(self.slots)
        slot = torch.arange(self.visible, device=self.lengths.device)
        return (slot <= self.positions[:, :, None])[:, None]

    def select(self, index: torch.Tensor) -> _Batch:
        """A batch of the rows ``index`` (repeats allowed); the keys and values are copied."""
        other = _Batch(len(self.layers), len(index), self.lengths.device)
        other.lengths, other.slots = self.lengths[index], self.slots
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.keys, theirs.values, theirs.is_initialized = mine.keys[index], mine.values[index], True
        return other


class Conversations:
    """The conversations of one role with one policy; make it with ``policy.conversations(role, prompts)``."""

    def __init__(self, policy, role: str, prompts: list[list[int]]):
        self.policy, self.role = policy, role
        self.prompts = prompts
        self.store: _Batch | None = None  # row r: conversation r
        self.pending: list[list[int]] = [[] for _ in prompts]  # sampled, but not yet read into the cache

    @torch.no_grad()
    def generate(
        self,
        rows: list[int],
        new_ids: list[list[int]] | None,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> list[Sample]:
        """Append ``new_ids[i]`` to conversation ``rows[i]`` and sample its next message (one Sample per row, in order).

        ``new_ids=None`` starts all conversations from their prompts (``rows`` must then be all of them).
        ``temperature=0`` takes the most likely token (for evaluation; the log-probs are then those at temperature 1).
        """
        if temperature < 0:
            raise ValueError(f"temperature must be >= 0, not {temperature}")
        self.policy.use(self.role)
        self.policy.model.eval()
        if self.store is None:
            if new_ids is not None or rows != list(range(len(self.prompts))):
                raise ValueError("the first call of generate reads every prompt: rows = all, new_ids = None")
            batch, logits = self._first_prefill()
        else:
            batch = self.store.select(torch.tensor(rows, device=self.policy.device))
            logits = self._read(batch, [self.pending[row] + new for row, new in zip(rows, new_ids, strict=True)])
        # One uniform number per row and step, drawn up front: a row's sample does not depend on who else is in the
        # batch.
        uniform = torch.rand(len(rows), max_new_tokens, generator=generator).to(self.policy.device)
        samples = [Sample([], [], None) for _ in rows]
        inside = list(range(len(rows)))  # inside[j]: which row of this call stands in row j of the batch
        for step in range(max_new_tokens):
            chosen, logprobs = _draw(logits, temperature, uniform[inside, step])
            for i, token, logprob in zip(inside, chosen.tolist(), logprobs.tolist(), strict=True):
                if samples[i].stopped_by is None:
                    samples[i].ids.append(token)
                    samples[i].logprobs.append(logprob)
                    samples[i].stopped_by = token if token in self.policy.chat.stop_ids else None
            writing = [j for j, i in enumerate(inside) if samples[i].stopped_by is None]
            if not writing or step + 1 == max_new_tokens:
                break
            if 2 * len(writing) <= len(inside):
                self._keep(batch, [rows[i] for i in inside])
                index = torch.tensor(writing, device=self.policy.device)
                batch, chosen, inside = batch.select(index), chosen[index], [inside[j] for j in writing]
                writing = list(range(len(inside)))
            logits = self._step(batch, chosen, writing)
        self._keep(batch, [rows[i] for i in inside])
        for row, sample in zip(rows, samples, strict=True):
            self.pending[row] = sample.ids[-1:]  # sampled last, so it was never read back in
        if any(math.isnan(logprob) for sample in samples for logprob in sample.logprobs):
            raise FloatingPointError(f"the {self.role}'s probabilities are not numbers")
        return samples

    def _first_prefill(self) -> tuple[_Batch, torch.Tensor]:
        """Read each distinct prompt once and copy the result to all its rows."""
        distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, self.prompts)))}
        index = torch.tensor([distinct[tuple(p)] for p in self.prompts], device=self.policy.device)
        once = _Batch(self.policy.model.config.num_hidden_layers, len(distinct), self.policy.device)
        logits = self._read(once, [list(p) for p in distinct])
        batch = once.select(index)
        self.store = batch.select(torch.arange(len(index), device=index.device))
        return batch, logits[index]

    def _read(self, batch: _Batch, chunks: list[list[int]]) -> torch.Tensor:
        """Append a chunk of any length (>= 1) to every row -> logits after its last token [rows, V]."""
        sizes = torch.tensor([len(chunk) for chunk in chunks], device=self.policy.device)
        width = int(sizes.max())
        padded = [chunk + [self.policy.pad_id] * (width - len(chunk)) for chunk in chunks]
        logits = self._forward(batch, torch.tensor(padded, device=self.policy.device), sizes - 1)
        batch.lengths = batch.lengths + sizes  # padding was written behind them: hidden now, overwritten later
        return logits

    def _step(self, batch: _Batch, tokens: torch.Tensor, writing: list[int]) -> torch.Tensor:
        """Append one token to the rows still ``writing`` (finished rows ride along unheard) -> logits [rows, V]."""
        logits = self._forward(batch, tokens[:, None], torch.zeros_like(tokens))
        batch.lengths[writing] += 1
        return logits

    def _forward(self, batch: _Batch, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        mask = batch.place(ids.shape[1])
        head = self.policy.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][batch.row, last],))
        try:
            return self.policy.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=batch.positions.clamp(max=self.policy.max_context - 1),
                use_cache=True,
                **{self.policy.cache_argument: batch},
            ).logits.float()
        finally:
            hook.remove()

    def _keep(self, batch: _Batch, rows: list[int]) -> None:
        """Copy the batch's rows back into the store, where later turns find them."""
        index = torch.tensor(rows, device=self.policy.device)
        for mine, theirs in zip(self.store.layers, batch.layers, strict=True):
            mine.grow(batch.slots)
            mine.keys[index, :, : batch.slots] = theirs.keys
            mine.values[index, :, : batch.slots] = theirs.values
        self.store.slots = max(self.store.slots, batch.slots)
        self.store.lengths[index] = batch.lengths


def _draw(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverting the distribution's cumulative sum -> (ids [rows], their log-probs [rows])."""
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    if temperature == 0:
        chosen = logits.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1)
        chosen = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def cache_argument(model) -> str:
    """How this transformers release calls the cache in a model's forward."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
