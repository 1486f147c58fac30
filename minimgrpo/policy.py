"""A quantized base model with one named LoRA adapter per role: load, sample, score, save.

The base stands in memory once, in NF4 (bitsandbytes), frozen; ``planner`` and ``executor`` are two LoRA adapters on it
(peft), switched by name. Both roles sample through ``conversations`` (see ``sampler``) and are scored by ``score``.

Choices and traps (each is a test):

* **One path.** bitsandbytes multiplies through another kernel under ``no_grad`` than with gradients, and on some CPUs
  repacks the weights after the first no-grad pass so that later gradients are wrong, silently. Small models therefore
  run *fused*, in float32: the NF4 weights are dequantised once and a linear layer computes ``x (W + s B A)^T`` as one
  product, the same numbers for sampling and training. It is also the fastest path at this size. Large models keep 4-bit
  weights and PEFT's own path, with the CPU repacking switched off; in half precision (see ``base``) a sampled log-prob
  and the same one scored then differ by what that rounds.
* **Adapters.** An optimizer must be built from ``parameters(role)``: what happens to be trainable when it is built
  belongs to the adapter active at that moment.
* **Names.** An adapter called like a module of the model would be saved empty by PEFT; loading counts tensors.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save

from minimgrpo.base import ModelError, context_length, is_linear, load_base, quiet
from minimgrpo.chat import Chat
from minimgrpo.protocol import ROLES
from minimgrpo.sampler import Conversations, cache_argument


class Policy:
    """The base, its tokenizer and the adapters of ``roles``. Build one with ``Policy.load``."""

    def __init__(self, model, tokenizer, name: str, style: str):
        self.model, self.name = model, name
        self.chat = Chat(tokenizer, style)
        self.device = next(model.parameters()).device
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.max_context = context_length(model.config)
        self.cache_argument = cache_argument(model.get_base_model())
        self._fused_layers = [module for module in model.modules() if hasattr(module, "merged_cache")]

    @classmethod
    def load(
        cls,
        name: str = "atlas-lm",
        quantize: str = "nf4",
        rank: int = 16,
        alpha: int = 32,
        dropout: float = 0.0,
        seed: int = 0,
        device: str = "cpu",
        dtype: str = "auto",
        roles=ROLES,
        fused: bool | None = None,
    ) -> Policy:
        """Load ``name`` ("atlas-lm", a folder, a GGUF file or a hub name) with fresh adapters for ``roles``.

        ``quantize`` is "nf4", "int8" or "none", ``dtype`` one of ``base.DTYPES``. The adapters start as zero changes to
        the base (``B = 0``); ``seed`` and its role draw an adapter's ``A``. ``fused=None`` decides by size. Raises
        ModelError when the model cannot be had or used.
        """
        quiet()
        from peft import LoraConfig, get_peft_model

        model, tokenizer, small = load_base(name, quantize, device, dtype)
        fusible = dropout == 0 and model.dtype == torch.float32
        if fused and not fusible:
            raise ModelError("a fused policy is float32 and without LoRA dropout: leave those, or use fused=False")
        taken = {part for path, _ in model.named_modules() for part in path.split(".")}
        if clash := sorted(taken & set(roles)):
            raise ModelError(f"an adapter cannot be called {clash[0]!r}, like a module: PEFT would save nothing of it")
        targets = sorted(
            {
                path.rpartition(".")[2]
                for path, module in model.named_modules()
                if is_linear(module) and module is not model.get_output_embeddings()
            }
        )
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=targets,
            fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, roles[0]))
            wrapped = get_peft_model(model, config, adapter_name=roles[0])
            for role in roles[1:]:
                torch.manual_seed(_seed(seed, role))
                wrapped.add_adapter(role, config)
        wrapped.set_adapter(roles[0])
        if fused or (fused is None and fusible and small):
            _fuse(wrapped)
        wrapped.eval()
        return cls(wrapped, tokenizer, name, getattr(model.config, "prompt_style", "full"))

    # ------------------------------------------------------------------------------------------------- adapters

    def use(self, role: str) -> None:
        """Make the adapter of ``role`` the active one."""
        if self.model.active_adapter != role:
            self.model.set_adapter(role)
        for layer in self._fused_layers:
            layer.merged_cache = (None, None)  # some changes leave a tensor's version as it is (fused Adam, ``.data``)

    def parameters(self, role: str) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name. Raises ModelError when there are none."""
        found = {name: p for name, p in self.model.named_parameters() if f".{role}." in name and "lora_" in name}
        if not found:
            raise ModelError(f"the model has no adapter called {role!r}")
        return found

    def save_adapter(self, role: str, folder: Path) -> None:
        """Write the adapter in PEFT's own format (``PeftModel.from_pretrained(base, folder)`` reads it)."""
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        # save_embedding_layers=False: LoRA has none to save, and "auto" may ask the network for the base's config
        tensors = get_peft_model_state_dict(self.model, adapter_name=role, save_embedding_layers=False)
        if len(tensors) != len(self.parameters(role)):
            raise ModelError(f"PEFT would save {len(tensors)} tensors of the {len(self.parameters(role))} of {role!r}")
        # as bytes: a full disk is then an OSError like any other, where save_file raises a type of its own
        content = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
        (folder / "adapter_model.safetensors").write_bytes(content)
        config = copy.copy(self.model.peft_config[role])
        config.target_modules = sorted(config.target_modules)  # a set, whose order changes from process to process
        config.save_pretrained(str(folder))

    def load_adapter(self, role: str, folder: Path) -> None:
        """Read back what ``save_adapter`` wrote. Raises ModelError when it is missing, damaged or of another shape."""
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        path = Path(folder) / "adapter_model.safetensors"
        try:
            tensors = load_file(path)
        except Exception as error:  # safetensors raises its own type for a damaged header
            raise ModelError(f"cannot read the adapter {path}: {error}") from None
        expected = get_peft_model_state_dict(self.model, adapter_name=role, save_embedding_layers=False)
        here = {k: v.shape for k, v in expected.items()}
        if {k: v.shape for k, v in tensors.items()} != here:
            raise ModelError(f"the adapter {path} was made for another model or another rank")
        set_peft_model_state_dict(self.model, tensors, adapter_name=role)

    # ------------------------------------------------------------------------------------------------- using it

    def conversations(self, role: str, prompts: list[list[int]]) -> Conversations:
        """Start one conversation per prompt (token ids from ``chat.open``) with the role's adapter."""
        self.use(role)
        return Conversations(self, role, prompts)

    def score(self, role: str | None, token_ids: list[list[int]], masks: list[list[int]], temperature: float = 1.0):
        """Log-probs of the sampled tokens under the role's adapter, with gradients (``role=None``: the bare base).

        token_ids, masks: B lists of equal lengths each -> (logprobs [B,T], mask [B,T]); 0 where the mask is 0. Logits
        are computed for the sampled positions only. Rows are padded on the right, which causal attention cannot see.
        """
        width = max(len(ids) for ids in token_ids)
        ids = torch.tensor([row + [self.pad_id] * (width - len(row)) for row in token_ids], device=self.device)
        mask = torch.tensor([row + [0] * (width - len(row)) for row in masks], device=self.device)
        target = mask[:, 1:].bool()  # position t predicts token t + 1
        head = self.model.get_output_embeddings()

        def sampled_positions_only(_module, inputs):
            return (inputs[0][target],)

        scope = self.model.disable_adapter() if role is None else contextlib.nullcontext()
        if role is not None:
            self.use(role)
        hook = head.register_forward_pre_hook(sampled_positions_only)
        try:
            with scope:
                logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits  # [sampled, V]
        finally:
            hook.remove()
        chosen = torch.log_softmax(logits.float() / temperature, -1).gather(-1, ids[:, 1:][target][:, None])[:, 0]
        logprobs = torch.zeros(mask.shape, dtype=chosen.dtype, device=self.device)
        logprobs[:, 1:] = logprobs[:, 1:].masked_scatter(target, chosen)
        return logprobs, mask


def _seed(seed: int, role: str) -> int:
    """Each role's own, so that its fresh adapter is the same whatever other role stands on the same base."""
    return int.from_bytes(hashlib.sha256(f"{seed} {role}".encode()).digest()[:7], "big")


# ------------------------------------------------------------------------------------------------------ the fused path


def _fuse(model) -> None:
    """Give every LoRA layer the one-product forward (see the module's docstring)."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            base = module.get_base_layer()
            module.frozen = _dequantised(base)
            module.merged_cache = (None, None)
            module.forward = MethodType(_fused_forward, module)


def _dequantised(base) -> torch.Tensor:
    """The layer's weight [out, in] in float32."""
    state = getattr(base.weight, "quant_state", None)
    if state is not None:
        import bitsandbytes.functional as B

        return B.dequantize_4bit(base.weight.data, state).to(torch.float32)
    if hasattr(base, "state") and getattr(base.weight, "SCB", None) is not None:
        return base.weight.data.float() * base.weight.SCB[:, None] / 127
    weight = base.weight.data.float()
    return weight.T.contiguous() if type(base).__name__ == "Conv1D" else weight


def _fused_forward(self, x, *_args, **_kwargs):
    return F.linear(x, _effective_weight(self), self.get_base_layer().bias)


def _effective_weight(layer) -> torch.Tensor:
    """``W + s B A`` of the active adapter, remembered between no-grad calls until the adapter changes."""
    if layer.disable_adapters:
        return layer.frozen
    role = layer.active_adapters[0]
    a, b = layer.lora_A[role].weight, layer.lora_B[role].weight
    if torch.is_grad_enabled():
        return torch.addmm(layer.frozen, b, a, alpha=layer.scaling[role])
    key = (role, a._version, b._version)  # a tensor's version counts its in-place changes
    if layer.merged_cache[0] != key:
        layer.merged_cache = (key, torch.addmm(layer.frozen, b, a, alpha=layer.scaling[role]))
    return layer.merged_cache[1]


def describe(policy: Policy) -> str:
    """One line for a person: the model, its size, its quantization, and where it computes in which numbers."""
    model = policy.model.get_base_model()
    base = [p for name, p in model.named_parameters() if "lora_" not in name]
    states = [(p, getattr(p, "quant_state", None)) for p in base]
    total = sum(state.shape.numel() if state else p.numel() for p, state in states)  # two NF4 numbers are one byte
    config = json.loads(model.config.to_json_string()).get("quantization_config") or {}
    kind = "int8" if config.get("load_in_8bit") else config.get("bnb_4bit_quant_type", "not quantized")
    numbers = str(model.dtype).removeprefix("torch.")
    return f"{policy.name} ({total / 1e6:.1f} M parameters, {kind}; {numbers} on {policy.device})"
