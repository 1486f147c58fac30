"""The quantized base with its adapters: exact gradients after sampling, adapters that stay apart, silent loading."""

import json
import os
import subprocess
import sys
import time

import bitsandbytes
import pytest
import torch
from conftest import FAMILIES
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minimgrpo.chat import ChatError
from minimgrpo.policy import ModelError, Policy, describe

IDS = [list(range(5, 45)), list(range(100, 120))]
MASKS = [[0] * 10 + [1] * 30, [0] * 15 + [1] * 5]


def logits(policy, role):
    policy.use(role)
    with torch.no_grad():
        return policy.model(torch.tensor(IDS[:1])).logits


def gradients(policy, role="planner"):
    policy.model.zero_grad()
    policy.score(role, IDS, MASKS)[0].sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.parameters(role).items()}


def train(policy, role, lr=1e-2):
    """One optimizer step that raises the log-probs of IDS."""
    optimizer = torch.optim.Adam(policy.parameters(role).values(), lr=lr)
    (-policy.score(role, IDS, MASKS)[0].sum()).backward()
    optimizer.step()


def snapshot(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def sample(policy, role="planner"):
    return policy.conversations(role, IDS).generate([0, 1], None, 8, 1.0, torch.Generator().manual_seed(0))


# ----------------------------------------------------------------------------------------------- the quantization traps


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_gradients_after_sampling_are_those_of_a_model_that_never_sampled(load, quantize, fused):
    """bitsandbytes may repack 4-bit weights in a no-grad pass, after which gradients are wrong without an error."""
    fresh, used = load(quantize=quantize, fused=fused), load(quantize=quantize, fused=fused)
    sample(used)
    expected, found = gradients(fresh), gradients(used)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(g.abs().max() > 0 for g in expected.values())


def test_no_4_bit_layer_may_repack_its_weights(load):
    for family in FAMILIES:
        layers = [m for m in load(family, fused=False).model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
        assert layers and all(layer.support_avx512bf16_for_cpu is False for layer in layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_the_fused_path_computes_what_peft_computes(load, family, quantize):
    fused, peft = load(family, quantize, fused=True), load(family, quantize, fused=False)
    for role in ("planner", "executor"):
        assert torch.allclose(logits(fused, role), logits(peft, role), atol=1e-3)
        for one, other in zip(gradients(fused, role).values(), gradients(peft, role).values(), strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def test_a_width_that_is_no_multiple_of_the_nf4_block_samples_what_it_scores(tokenizer, tmp_path):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), fused=False)
    found = sample(policy)
    ids = [row + s.ids for row, s in zip(IDS, found, strict=True)]
    masks = [[0] * len(row) + [1] * len(s.ids) for row, s in zip(IDS, found, strict=True)]
    logprobs, mask = policy.score("planner", ids, masks)
    expected = torch.tensor(found[0].logprobs + found[1].logprobs)
    assert torch.allclose(logprobs[mask.bool()], expected, atol=1e-4)


def test_a_fused_policy_sees_every_change_of_an_adapter(load, tmp_path):
    """What it remembers between no-grad passes is forgotten after an optimizer step, a load, and any other change."""
    policy = load()
    policy.save_adapter("planner", tmp_path)
    first = logits(policy, "planner")
    assert torch.equal(logits(policy, "planner"), first)
    train(policy, "planner")
    stepped = logits(policy, "planner")
    assert not torch.equal(stepped, first)
    policy.load_adapter("planner", tmp_path)
    assert torch.equal(logits(policy, "planner"), first)
    assert not torch.equal(logits(policy, "executor"), first)
    for change in (
        lambda p: p.add_(0.01),
        lambda p: p.data.add_(0.01),  # does not count as a change of the tensor
        lambda p: setattr(p, "data", p.data + 0.01),
    ):
        before = logits(policy, "planner")
        with torch.no_grad():
            for parameter in policy.parameters("planner").values():
                change(parameter)
        assert not torch.equal(logits(policy, "planner"), before)


def test_a_fused_optimizer_is_noticed_too(load):
    policy = load()
    before = sample(policy)
    optimizer = torch.optim.Adam(policy.parameters("planner").values(), lr=0.1, fused=True)
    policy.score("planner", IDS, MASKS)[0].sum().backward()
    optimizer.step()
    assert sample(policy) != before


# --------------------------------------------------------------------------------------------------------- two adapters


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("role, other", [("planner", "executor"), ("executor", "planner")])
def test_an_optimizer_moves_its_own_adapter_and_not_one_bit_of_anything_else(load, role, other, fused):
    policy = load(fused=fused)
    policy.use(other)  # the optimizer is built while the other adapter is active
    before = snapshot(policy)
    train(policy, role)
    mine = set(policy.parameters(role))
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in mine), name


def test_fresh_adapters_change_nothing_and_the_seed_draws_them(folders):
    a, b, c = (Policy.load(str(folders["llama"]), seed=seed) for seed in (0, 0, 1))
    with torch.no_grad():
        assert torch.equal(a.score("planner", IDS, MASKS)[0], a.score(None, IDS, MASKS)[0])
    first, same, other = (next(iter(p.parameters("planner").values())) for p in (a, b, c))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert not torch.equal(first, next(iter(a.parameters("executor").values())))


def test_loading_a_policy_leaves_the_global_random_state_alone(folders):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Policy.load(str(folders["llama"]))
    assert torch.equal(torch.rand(3), expected)


def test_an_adapter_that_is_not_there_is_an_error_and_no_empty_optimizer(load):
    with pytest.raises(ModelError, match="no adapter called 'critic'"):
        load().parameters("critic")
    with pytest.raises(ModelError, match="no adapter"):
        load(roles=("planner",)).parameters("executor")


def test_an_adapter_may_not_be_called_like_a_module(folders):
    for name in ("layers", "self_attn", "lm_head"):
        with pytest.raises(ModelError, match=name):
            Policy.load(str(folders["llama"]), roles=("planner", name))


@pytest.mark.parametrize("fused", [True, False])
def test_scoring_without_adapters_leaves_everything_as_it_was(load, fused):
    policy = load(fused=fused)
    policy.use("executor")
    before = logits(policy, "executor")
    required = {name: p.requires_grad for name, p in policy.model.named_parameters()}
    bare = policy.score(None, IDS, MASKS)[0]
    assert not torch.allclose(bare, policy.score("executor", IDS, MASKS)[0], atol=1e-2)
    assert policy.model.active_adapter == "executor"
    assert {name: p.requires_grad for name, p in policy.model.named_parameters()} == required
    assert torch.equal(logits(policy, "executor"), before)


@pytest.mark.parametrize("fused", [True, False])
def test_scoring_without_adapters_restores_them_after_an_exception(load, fused):
    policy = load(fused=fused)
    policy.use("executor")
    before = logits(policy, "executor")
    required = {name: p.requires_grad for name, p in policy.model.named_parameters()}
    with pytest.raises(IndexError):
        policy.score(None, [[10**6, 1]], [[0, 1]])  # no such token
    assert policy.model.active_adapter == "executor"
    assert {name: p.requires_grad for name, p in policy.model.named_parameters()} == required
    assert torch.equal(logits(policy, "executor"), before)
    policy.score("executor", IDS, MASKS)[0].sum().backward()  # no hook was left behind either
    assert all(p.grad is not None for p in policy.parameters("executor").values())


# -------------------------------------------------------------------------------------------------------- save and load


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_give_the_same_logits_for_both_adapters(load, folders, family, tmp_path):
    policy = load(family)
    fresh = Policy.load(str(folders[family]), seed=9)
    for role in ("planner", "executor"):
        policy.save_adapter(role, tmp_path / role)
        assert not torch.allclose(logits(fresh, role), logits(policy, role), atol=1e-2)
        fresh.load_adapter(role, tmp_path / role)
    for role in ("planner", "executor"):
        assert torch.equal(logits(fresh, role), logits(policy, role))


def test_saving_and_loading_never_ask_the_network_for_the_base_of_a_hub_model(load, tmp_path, monkeypatch):
    policy = load()
    policy.model.peft_config["planner"].base_model_name_or_path = "owner/model"
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_args, **_kwargs: 1 / 0)
    policy.save_adapter("planner", tmp_path)
    policy.load_adapter("planner", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_reads_a_saved_adapter(load, folders, family, tmp_path):
    from peft import PeftModel

    policy = load(family, quantize="none")
    for role in ("planner", "executor"):
        policy.save_adapter(role, tmp_path / role)
        base = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
        plain = PeftModel.from_pretrained(base, tmp_path / role).eval()
        with torch.no_grad():
            assert torch.allclose(plain(torch.tensor(IDS[:1])).logits, logits(policy, role), atol=1e-4)


def test_a_damaged_adapter_is_refused_with_a_sentence_and_nothing_is_loaded(load, tmp_path):
    policy = load()
    before = snapshot(policy)
    policy.save_adapter("planner", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * 100, whole + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match="cannot read the adapter"):
            policy.load_adapter("planner", tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match="cannot read the adapter"):
        policy.load_adapter("planner", tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())


def test_an_adapter_of_another_rank_or_with_tensors_missing_is_refused(load, tmp_path):
    from safetensors.torch import load_file, save_file

    policy = load()
    load(rank=4).save_adapter("planner", tmp_path / "rank")
    policy.save_adapter("planner", tmp_path / "some")
    tensors = load_file(tmp_path / "some" / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "some" / "adapter_model.safetensors")
    for folder in (tmp_path / "rank", tmp_path / "some"):
        with pytest.raises(ModelError, match="another model or another rank"):
            policy.load_adapter("planner", folder)


# -------------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own_log_softmax_at_the_temperature(load, family):
    policy = load(family)
    policy.use("planner")
    found, mask = policy.score("planner", IDS, MASKS, temperature=0.7)
    assert found.shape == mask.shape == (2, 40)
    for row, ids in enumerate(IDS):  # each row alone: the padding of the batch changes nothing
        with torch.no_grad():
            exact = torch.log_softmax(policy.model(torch.tensor([ids])).logits[0] / 0.7, -1)
        for t in range(40):
            expected = exact[t - 1, ids[t]].item() if t < len(ids) and MASKS[row][t] else 0.0
            assert found[row, t].item() == pytest.approx(expected, abs=1e-4)


def test_logits_are_computed_for_the_sampled_positions_only(load):
    policy, rows = load(), []
    head = policy.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _module, _inputs, output: rows.append(tuple(output.shape)))
    policy.score("planner", IDS, MASKS)
    hook.remove()
    assert rows == [(35, head.weight.shape[0])]


def test_a_batch_without_a_sampled_token_scores_to_zeros_with_zero_gradients(load):
    policy = load()
    logprobs, _ = policy.score("planner", IDS, [[0] * 40, [0] * 20])
    logprobs.sum().backward()
    assert logprobs.abs().sum() == 0
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in policy.parameters("planner").values())


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "/no/such/folder", "~/models/none", "gpt3"])
def test_an_unknown_model_is_an_error_at_once_without_the_network(name, monkeypatch):
    def no_network(*_args, **_kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    with pytest.raises(ModelError, match="there is no model"):
        Policy.load(name)


def test_a_folder_that_holds_no_model_is_an_error(tmp_path, tokenizer):
    with pytest.raises(ModelError, match="cannot be loaded"):
        Policy.load(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        Policy.load(str(tmp_path))


def test_a_model_without_chat_template_is_an_error(folders, tokenizer, tmp_path):
    AutoModelForCausalLM.from_pretrained(folders["gpt2"]).save_pretrained(tmp_path)
    bare = AutoTokenizer.from_pretrained(folders["gpt2"])
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(ChatError, match="no chat template"):
        Policy.load(str(tmp_path))


def test_an_unknown_quantization_is_an_error(folders):
    with pytest.raises(ModelError, match="'nf4', 'int8' or 'none', not 'int4'"):
        Policy.load(str(folders["llama"]), quantize="int4")


def test_a_fused_policy_refuses_dropout_and_dropout_is_not_fused_by_itself(folders):
    with pytest.raises(ModelError, match="dropout"):
        Policy.load(str(folders["llama"]), dropout=0.1, fused=True)
    assert not Policy.load(str(folders["llama"]), dropout=0.1)._fused_layers


@pytest.mark.parametrize("quantize, kind", [("nf4", "nf4"), ("int8", "int8"), ("none", "float32")])
def test_each_quantization_loads_samples_and_says_what_it_is(load, quantize, kind):
    policy = load(quantize=quantize)
    assert kind in describe(policy) and len(sample(policy)) == 2


def test_a_gpu_without_bf16_is_no_problem_since_nothing_is_bf16(load):
    policy = load(fused=False)
    assert not [name for name, p in policy.model.named_parameters() if p.dtype == torch.bfloat16]
    layers = [m for m in policy.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert {layer.compute_dtype for layer in layers} == {torch.float32}


def test_the_prompt_style_is_the_models_own(load, folders, tmp_path):
    assert load().chat.prompts["planner"] == "You are the planner."
    for file in folders["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["prompt_style"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "FINAL ANSWER" in Policy.load(str(tmp_path)).chat.prompts["planner"]


# -------------------------------------------------------------------------------------------------------------- silence

WORK = """
import sys
from pathlib import Path
from minimgrpo.learner import Learner, Objective
from minimgrpo.policy import Policy
from minimgrpo.trajectory import Trajectory

out = Path(sys.argv[1])
for folder in sys.argv[2:]:
    for quantize in ("nf4", "int8", "none"):
        policy = Policy.load(folder, quantize, fused=quantize != "nf4")
        prompt = policy.chat.open("planner", "Hi")
        [sample] = policy.conversations("planner", [prompt]).generate([0], None, 5, 1.0)
        trajectory = Trajectory("planner", "q", 0, advantage=1.0)
        trajectory.read("user", "Hi", prompt)
        trajectory.wrote("text", sample.ids, sample.logprobs)
        learner = Learner(policy, "planner", Objective(kl=0.1))
        learner.update([trajectory])
        learner.save(out / quantize)
        learner.load(out / quantize)
"""


def test_loading_sampling_and_training_write_nothing_to_stdout_or_stderr(folders, tmp_path):
    command = [sys.executable, "-c", WORK, str(tmp_path), str(folders["llama"]), str(folders["gpt2"])]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=one_thread)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_importing_the_package_takes_less_than_five_seconds_and_prints_nothing():
    started = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", "import minimgrpo"], capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert time.perf_counter() - started < 5


def test_an_adapter_starts_the_same_whoever_else_is_loaded(folders):
    """A process that serves one role must start from the weights of the process that serves both."""
    both = Policy.load(str(folders["llama"]), seed=3)
    for role in ("planner", "executor"):
        alone = Policy.load(str(folders["llama"]), seed=3, roles=(role,)).parameters(role)
        assert all(torch.equal(p, alone[name]) for name, p in both.parameters(role).items())
    pairs = zip(both.parameters("planner").values(), both.parameters("executor").values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_a_description_counts_the_bases_own_numbers_packed_or_not_and_no_adapters(quantize):
    both, one = (Policy.load("atlas-lm", quantize=quantize, roles=roles) for roles in (("a", "b"), ("a",)))
    assert describe(both) == describe(one)
    assert describe(both).startswith("atlas-lm (0.8 M parameters, ")  # 787,072 in its file
