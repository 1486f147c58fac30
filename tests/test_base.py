"""Which device, which numbers, and every way in which a model can be refused: without a GPU and without a network."""

import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import random_weights
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from minimgrpo import agents, base, settle, tasks, train
from minimgrpo.agents import Limits
from minimgrpo.base import ModelError, devices, number_type
from minimgrpo.learner import Learner, Objective
from minimgrpo.policy import Policy, describe
from minimgrpo.servers import Config, Team
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory

# -------------------------------------------------------------------------------------------------------- which device


@pytest.fixture
def gpus(monkeypatch):
    """``gpus((8, 0), (7, 5))`` pretends that GPUs of these compute capabilities are there."""

    def pretend(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[torch.device(d).index])
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)  # it says so of a T4 too

    return pretend


A100, T4 = (8, 0), (7, 5)


@pytest.mark.parametrize(
    "there, asked, chosen",
    [
        ([], ("auto", "auto"), ("cpu", "cpu")),
        ([T4], ("auto", "auto"), ("cuda:0", "cuda:0")),
        ([T4, T4], ("auto", "auto"), ("cuda:0", "cuda:1")),
        ([T4, T4, T4], ("auto", "auto"), ("cuda:0", "cuda:1")),
        ([T4, T4], ("cuda:1", "auto"), ("cuda:1", "cuda:1")),
        ([T4, T4], ("cuda", "cuda:0"), ("cuda:0", "cuda:0")),
        ([T4], ("cpu", "auto"), ("cpu", "cuda:0")),
        ([T4, T4], ("cpu", "cpu:0"), ("cpu", "cpu")),
    ],
)
def test_two_gpus_serve_a_role_each_and_one_device_serves_both(gpus, there, asked, chosen):
    gpus(*there)
    assert devices(*asked) == chosen


@pytest.mark.parametrize("name", ["cuda:2", "banana", "mps", "meta", "cuda:-1", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(gpus, name):
    gpus(T4, T4)
    with pytest.raises(ModelError, match=r"choose auto or cpu or cuda:0 or cuda:1$"):
        devices("auto", name)


def test_mps_is_taken_when_it_is_asked_for_and_only_without_quantization(monkeypatch, folders):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices("mps", "auto") == ("mps", "cpu")
    assert number_type("auto", "mps", small=False) == torch.float32
    with pytest.raises(ModelError, match=r"nf4 is not to be had on mps: use --quantize none"):
        Policy.load(str(folders["llama"]), "nf4", device="mps")


@pytest.mark.parametrize(
    "there, dtype, device, small, chosen",
    [
        ([], "auto", "cpu", False, torch.float32),
        ([], "bfloat16", "cpu", False, torch.bfloat16),
        ([A100], "auto", "cuda:0", False, torch.bfloat16),
        ([A100], "auto", "cuda:0", True, torch.float32),
        ([A100], "float16", "cuda:0", True, torch.float16),
        ([T4], "auto", "cuda:0", False, torch.float16),
        ([A100, T4], "auto", "cuda:1", False, torch.float16),
        ([A100], "auto", "cpu", False, torch.float32),
    ],
)
def test_the_numbers_are_those_that_the_device_computes_well(gpus, there, dtype, device, small, chosen):
    gpus(*there)
    assert number_type(dtype, device, small) == chosen


def test_bfloat16_is_refused_where_it_would_be_emulated_and_an_unknown_dtype_everywhere(gpus):
    gpus(T4)
    with pytest.raises(ModelError, match=r"cuda:0 has no bfloat16: choose --dtype float16 or float32"):
        number_type("bfloat16", "cuda:0", small=False)
    with pytest.raises(ModelError, match=r"not 'float8'"):
        number_type("float8", "cpu", small=False)
    with pytest.raises(ValueError, match=r"not 'float8'"):
        Config(dtype="float8")


def test_the_team_gets_one_policy_on_one_device_and_two_on_two(gpus, monkeypatch):
    loaded = []

    def load(name, *_args, device, dtype, roles, **_kwargs):
        loaded.append((name, device, dtype, roles))
        return object()

    monkeypatch.setattr(train.Policy, "load", load)
    gpus(T4)
    planner, executor = train.load_policies(Config(model="m", dtype="float16"))
    assert planner is executor and loaded == [("m", "cuda:0", "float16", ("planner", "executor"))]
    loaded.clear()
    gpus(T4, T4)
    planner, executor = train.load_policies(Config(model="m"))
    assert planner is not executor
    assert loaded == [("m", "cuda:0", "auto", ("planner",)), ("m", "cuda:1", "auto", ("executor",))]


def test_two_policies_train_to_the_same_adapters_as_one(folders, tmp_path, monkeypatch):
    """As on two GPUs: text and scalars cross between the roles and nothing else, so it makes no difference."""

    def pay(trajectories, _questions):
        for t in trajectories:
            t.reward, t.reward_parts = sum(t.token_ids) % 7 / 7, {"format": 0.0, "correct": 0.0}

    monkeypatch.setattr(settle, "reward_planner", pay)
    # a random model never delegates by itself
    monkeypatch.setattr(agents.protocol, "parse", lambda role, text: agents.Result("x") if role == "executor" else CALL)
    config, name = Config(questions=2, rollouts=2, threads=1, limits=Limits(turns=2, length=4)), str(folders["llama"])
    tools, questions = Tools(tasks.load_pages()), tasks.load_questions("train")[:4]
    both = Policy.load(name)
    each = [Policy.load(name, roles=(role,)) for role in ("planner", "executor")]
    for policy in (both, *each):
        policy.chat.stop_ids = set(range(600))  # each message is one token, so that all of them end
    one = Team(config, both, tmp_path / "one", questions, tools)
    two = Team(config, each[0], tmp_path / "two", questions, tools, executor_policy=each[1])
    for team in (one, two):
        for step in (1, 2):
            _, executed, measured = team.step(step)
        assert executed and measured["planner"]["trained"]
    for role, policy in zip(("planner", "executor"), each, strict=True):
        fresh = Policy.load(name, roles=(role,)).parameters(role)
        for key, parameter in policy.parameters(role).items():
            assert torch.equal(parameter, both.parameters(role)[key])
        assert role == "executor" or any(not torch.equal(p, fresh[key]) for key, p in policy.parameters(role).items())


CALL = agents.Call("executor", {"task": "Find it"})

# ------------------------------------------------------------------------------------------------------ half precision


IDS = [list(range(5, 45)), list(range(100, 120))]
MASKS = [[0] * 10 + [1] * 30, [0] * 15 + [1] * 5]


def gradient(policy, role="planner"):
    policy.score(role, IDS, MASKS)[0].sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters(role).values()])


@pytest.mark.parametrize("quantize", ["nf4", "none"])
@pytest.mark.parametrize("dtype, tolerance, alike", [("float16", 0.05, 0.99), ("bfloat16", 0.4, 0.9)])
def test_on_a_half_precision_base_adapters_and_gradients_are_float32(load, converse, quantize, dtype, tolerance, alike):
    """The random models' logits are some tens in size, where bfloat16 steps by an eighth."""
    policy = load(quantize=quantize, dtype=dtype)
    assert policy.model.dtype == getattr(torch, dtype) and f"{dtype} on cpu" in describe(policy)
    found = gradient(policy)
    assert {p.dtype for p in policy.parameters("planner").values()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters("planner").values()} == {torch.float32}
    exact = gradient(load(quantize=quantize, fused=False))
    assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > alike
    for t in converse(policy, rows=4, turns=2):
        with torch.no_grad():
            again = policy.score("planner", [t.token_ids], [t.mask])[0][0].tolist()
        assert t.logprobs == pytest.approx(again, abs=tolerance)


def test_a_half_precision_policy_is_not_fused(load):
    assert not load(dtype="float16")._fused_layers
    with pytest.raises(ModelError, match=r"fused"):
        load(dtype="float16", fused=True)


def test_a_float16_gradient_does_not_underflow_however_many_tokens_share_the_denominator(load):
    """A million tokens without advantage: each token's gradient is below float16's smallest number (6e-8)."""

    def batch():
        for advantage, copies in ((1.0, 1), (0.0, 40_000)):
            trajectory = Trajectory("planner", "q", 0, advantage=advantage, copies=copies)
            trajectory.read("user", "", IDS[0][:10])
            trajectory.wrote("", IDS[0][10:], [-1.0] * 30)
            yield trajectory

    norms = {}
    for dtype in ("float16", "float32"):
        learner = Learner(load(quantize="none", dtype=dtype, fused=False), "planner", Objective(clip_high=1e9))
        norms[dtype] = learner.update(list(batch()))["grad_norm"]
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.02) and norms["float32"] < 1e-2


def test_probabilities_that_are_not_numbers_stop_the_rollout(load):
    policy = load()
    with torch.no_grad():
        next(iter(policy.parameters("planner").values())).fill_(torch.inf)
    with pytest.raises(FloatingPointError, match=r"planner's probabilities are not numbers"):
        policy.conversations("planner", IDS).generate([0, 1], None, 3, 1.0)


# ----------------------------------------------------------------------------------------------------- what is refused


def write(config, folder):
    config.save_pretrained(folder)
    return str(folder)


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "config, why",
    [
        (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "a state besides keys and values"),
        (
            Lfm2Config(**SMALL, num_attention_heads=4, layer_types=["conv", "full_attention"]),
            "a state besides keys and values",
        ),
        (T5Config(vocab_size=64, d_model=32, num_layers=2), "more than a language model"),
        (Gemma3Config(), "more than a language model"),
        (LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq", "bits": 4}), "stored quantized"),
    ],
    ids=["mamba", "conv", "t5", "images", "gptq"],
)
def test_a_model_that_nothing_here_could_run_is_refused_before_a_weight_is_read(tmp_path, config, why):
    with pytest.raises(ModelError, match=why):
        Policy.load(write(config, tmp_path))


def test_weights_larger_than_the_free_memory_are_refused_before_they_are_read(folders, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ModelError, match=r"need 0.0 GiB and 0.0 GiB are free on cpu: choose a smaller model$"):
        Policy.load(str(folders["llama"]))
    with pytest.raises(ModelError, match=r"or --quantize nf4$"):
        Policy.load(str(folders["llama"]), "none")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("quantize", ["nf4", "int8", "none"])
def test_the_memory_is_predicted_before_loading_as_it_is_after(load, family, quantize):
    from transformers import AutoConfig

    model = load(family, quantize, fused=False).model.get_base_model()
    skeleton = base._skeleton("", AutoConfig.from_pretrained(model.config.name_or_path))
    frozen = [p for name, p in model.named_parameters() if "lora_" not in name]
    stored = sum(p.numel() * p.element_size() for p in frozen)
    stored += sum(p.quant_state.absmax.numel() * 4 for p in frozen if hasattr(p, "quant_state"))
    assert base.stored_bytes(skeleton, quantize, torch.float32) == pytest.approx(stored, rel=0.05)


@pytest.fixture
def copy(folders, tmp_path):
    shutil.copytree(folders["llama"], tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda _: b"", lambda _: b"[1]", lambda _: b"\xff" * 64]
)
def test_a_damaged_file_of_a_model_is_one_line(copy, name, damage):
    file = copy / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"cannot be loaded: .") as raised:
        Policy.load(str(copy))
    assert "\n" not in str(raised.value)


def test_wrong_numbers_in_a_config_are_one_line_too(copy):
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    for change in ({"hidden_size": "many"}, {"hidden_size": 128}, {"model_type": "no-such-type"}):
        (copy / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        with pytest.raises(ModelError, match=r"cannot be loaded: .") as raised:
            Policy.load(str(copy))
        assert "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------ sliding windows

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2}


def windowed(family, tokenizer, folder, window):
    """A random model of a family with a window of that many tokens (Qwen3 has none)."""
    shared = WIDE | random_weights(tokenizer)
    kinds = ["sliding_attention", "full_attention"]
    config, cls = {
        "mistral": lambda: (MistralConfig(**shared, num_hidden_layers=2, sliding_window=window), MistralForCausalLM),
        "gemma3": lambda: (
            Gemma3TextConfig(**shared, num_hidden_layers=2, sliding_window=window, layer_types=kinds),
            Gemma3ForCausalLM,
        ),
        "qwen3": lambda: (Qwen3Config(**shared, num_hidden_layers=2), Qwen3ForCausalLM),
    }[family]()
    torch.manual_seed(1)
    config.prompt_style = "brief"
    cls(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen3"])
def test_other_families_sample_what_they_score_up_to_the_edge_of_their_window(tokenizer, tmp_path, family):
    policy = Policy.load(windowed(family, tokenizer, tmp_path, 96))
    assert policy.max_context == (512 if family == "qwen3" else 96)
    prompts = [policy.chat.open("planner", text) for text in ("Hi", "a b c " * 12)]
    length = 96 - max(map(len, prompts))
    assert length > 8
    policy.chat.stop_ids = set()
    samples = policy.conversations("planner", prompts).generate([0, 1], None, length, 1.0)
    ids = [p + s.ids for p, s in zip(prompts, samples, strict=True)]
    assert max(map(len, ids)) == 96
    with torch.no_grad():
        logprobs, mask = policy.score("planner", ids, [[0] * len(p) + [1] * length for p in prompts])
    expected = torch.tensor(samples[0].logprobs + samples[1].logprobs)
    assert torch.allclose(logprobs[mask.bool()], expected, atol=1e-3)


def test_a_conversation_ends_where_the_window_does(tokenizer, tmp_path):
    policy = Policy.load(windowed("mistral", tokenizer, tmp_path, 32))
    question = SimpleNamespace(task_id="q", question="a b c " * 20)
    [trajectory] = agents.plan(policy, [question], 1, None, Limits(), 1.0, torch.Generator())
    assert trajectory.stop_reason == "context" and not trajectory.sampled


# -------------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def no_network(monkeypatch):
    """No name can be looked up, and nobody waits to try again."""

    def refuse(*_args, **_kwargs):
        raise OSError("Name or service not known")

    def wait(seconds):
        raise AssertionError(f"waited {seconds} s to try again")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("time.sleep", wait)


def test_a_hub_model_without_a_network_is_one_line_at_once(no_network):
    started = time.perf_counter()
    with pytest.raises(ModelError, match=r"'owner/model' .* cannot be reached \(.+\): check the network") as raised:
        Policy.load("owner/model")
    assert "\n" not in str(raised.value) and time.perf_counter() - started < 20


def test_a_hub_model_that_the_hub_does_not_give_is_one_line(monkeypatch):
    from huggingface_hub.errors import RepositoryNotFoundError

    def answer(*_args, **_kwargs):
        error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        error.response = SimpleNamespace(status_code=401)
        raise error

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", answer)
    with pytest.raises(ModelError, match=r"does not give the model 'owner/model' \(HTTP 401\): check the name"):
        Policy.load("owner/model")


def test_a_hub_model_in_the_cache_is_loaded_without_asking_the_network(folders, tmp_path, monkeypatch, no_network):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--owner--model", "0" * 40
    shutil.copytree(folders["llama"], model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    policy = Policy.load("owner/model")
    assert policy.name == policy.model.peft_config["planner"].base_model_name_or_path == "owner/model"
    (model / "snapshots" / commit / "model.safetensors").unlink()  # a download that was cut short
    with pytest.raises(ModelError, match=r"cannot be reached"):
        Policy.load("owner/model")


# ----------------------------------------------------------------------------------------------------------- GGUF files


@pytest.fixture
def gguf(folders, tmp_path, monkeypatch):
    """A file in a folder of its own, a cache, and a conversion that counts and always gives the same small model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    file, made = tmp_path / "mine" / "small.gguf", []
    file.parent.mkdir()
    file.write_bytes(b"GGUF")

    def convert(source, target):
        made.append(source)
        shutil.copytree(folders["llama"], target)

    monkeypatch.setattr(base, "_convert", convert)
    return SimpleNamespace(file=file, made=made, cache=tmp_path / "cache" / "minimgrpo")


def test_a_gguf_file_is_converted_once_into_the_cache_and_its_own_folder_stays_as_it_is(gguf):
    policy = Policy.load(str(gguf.file))
    assert "nf4" in describe(policy) and policy.name == str(gguf.file)
    [folder] = gguf.cache.iterdir()
    assert folder.name.startswith("small-") and (folder / "config.json").exists()
    Policy.load(str(gguf.file))
    assert len(gguf.made) == 1 and list(gguf.file.parent.iterdir()) == [gguf.file]


def test_another_file_under_the_same_name_is_converted_anew(gguf):
    first = base.folder(str(gguf.file))
    gguf.file.write_bytes(b"GGUF, longer")
    second = base.folder(str(gguf.file))
    os.utime(gguf.file, (1, 1))
    assert len({first, second, base.folder(str(gguf.file))}) == 3


def test_a_conversion_that_fails_leaves_nothing_and_one_that_came_second_is_dropped(gguf, monkeypatch):
    convert = base._convert

    def fail(source, target):
        convert(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        base.folder(str(gguf.file))
    assert list(gguf.cache.iterdir()) == []

    def overtaken(source, target):
        monkeypatch.setattr(base, "_convert", convert)
        base.folder(str(source))  # another process does it all in the meantime
        convert(source, target)

    monkeypatch.setattr(base, "_convert", overtaken)
    folder = base.folder(str(gguf.file))
    assert [str(path) for path in gguf.cache.iterdir()] == [folder]


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_a_file_that_is_no_gguf_is_one_line(tmp_path, monkeypatch, content):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"the GGUF file '.*broken.gguf' cannot be read: .") as raised:
        Policy.load(str(file))
    assert "\n" not in str(raised.value)


def test_any_other_file_and_a_gguf_that_is_not_there_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is a file: give a folder, a .gguf file, or a hub name"):
        Policy.load(str(tmp_path / "model.bin"))
    with pytest.raises(ModelError, match=r"there is no model 'models/small.gguf'"):
        Policy.load("models/small.gguf")


def test_a_context_without_room_for_a_question_is_refused_before_anything_is_written(tmp_path, capsys):
    assert train.main([str(tmp_path / "run"), "--context", "45"]) == 2
    assert "has no room for the shortest question" in capsys.readouterr().err and not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert train.main([str(tmp_path / "file")]) == 2
    assert "exists and is no run" in capsys.readouterr().err
