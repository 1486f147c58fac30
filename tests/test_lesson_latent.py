"""Lesson 15: the latent channel against transformers' own generation, a plain forward pass and finite differences."""

import pytest
import torch

from minimgrpo.lessons import latent
from minimgrpo.lessons.latent import FACTS, KEYS, PROMPT, VALUES


@pytest.fixture(scope="module")
def lm():
    return latent.tiny_lm(0)


def questions(n, seed=0):
    keys, values = latent.episodes(n, torch.Generator().manual_seed(seed))
    return keys, values, latent.written(keys, values)


def test_episodes_leave_nothing_to_guess_from():
    keys, values, tokens = questions(2000)
    assert all(len(set(row)) == FACTS for row in keys.tolist()) and keys.max() < KEYS <= values.min()
    assert (values[:, 0] == values.roll(1, 0)[:, 0]).float().mean().item() == pytest.approx(1 / VALUES, abs=0.02)
    assert (values[:, 0] == values[:, 1]).float().mean().item() == pytest.approx(1 / VALUES, abs=0.02)
    assert tokens.shape == (2000, PROMPT)


def test_realign_solves_the_ridge_problem(lm):
    """Independent of the normal equations: ridge regression is least squares with sqrt(lambda) I appended."""
    W_in, W_out = (m.weight.detach().double() for m in (lm.get_input_embeddings(), lm.get_output_embeddings()))
    above = torch.cat([W_out, 1e-5**0.5 * torch.eye(64, dtype=torch.float64)])
    W = torch.linalg.lstsq(above, torch.cat([W_in, torch.zeros(64, 64, dtype=torch.float64)]), driver="gelsd").solution
    h = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.normalize(h.double() @ W, dim=-1) * W_in.norm(dim=-1).mean()
    assert torch.allclose(latent.realign(lm)(h).double(), expected, atol=1e-5)
    # the head's row of a token comes back as that token's embedding, up to its norm
    assert torch.cosine_similarity(latent.realign(lm)(W_out[5].float()), W_in[5].float(), dim=0) > 0.99
    assert torch.cosine_similarity(latent.realign(lm, None)(W_out[5].float()), W_in[5].float(), dim=0) < 0.6


def test_a_trace_is_what_one_pass_over_all_positions_computes(lm):
    """Prompt, latents and query in one forward pass, with transformers' own positions and no cache."""
    keys, _, tokens = questions(5)
    embed, back = lm.get_input_embeddings(), latent.realign(lm)
    with torch.no_grad():
        kv, hidden = latent.trace(lm, embed(tokens), 2, back, keep=PROMPT + 2)
        logits = latent.answer(lm, keys, kv, 2)
        row, first = embed(tokens), lm.model(input_ids=tokens).last_hidden_state[:, -1:]
        row = torch.cat([row, back(first), back(hidden[:, :1])], 1)
        for place in range(FACTS):
            whole = torch.cat([row, embed(keys[:, place : place + 1])], 1)
            assert torch.allclose(lm(inputs_embeds=whole).logits[:, -1], logits[place::FACTS], atol=1e-5)
        # two positions only: the same two, and B still reads at place 10
        short, _ = latent.trace(lm, embed(tokens), 2, back)
        assert all(
            torch.equal(a[:, :, -2:], b) for x, y in zip(kv, short, strict=True) for a, b in zip(x, y, strict=True)
        )
        dropped = latent.answer(lm, keys, short, 2)
        assert not torch.allclose(dropped, logits, atol=1e-5)
        fours = [(latent.each(k), latent.each(v)) for k, v in short]
        assert torch.allclose(latent.read(lm, embed(keys.reshape(-1, 1)), fours, PROMPT + 2), dropped, atol=1e-6)
        restarted = latent.read(lm, embed(keys.reshape(-1, 1)), fours, 2)  # as if the positions began anew
        assert not torch.allclose(restarted, dropped, atol=1e-5)


def test_the_payload_is_what_is_handed_over(lm):
    _, _, tokens = questions(1)
    kv, _ = latent.trace(lm, lm.get_input_embeddings()(tokens), 3, latent.realign(lm))
    assert sum(t.numel() for pair in kv for t in pair) == latent.payload(lm.config, 3) == 2 * 2 * 3 * 64


def test_text_is_greedy_generation_and_cipher_its_expectation(lm):
    _, _, tokens = questions(6)
    E = lm.get_input_embeddings().weight
    with torch.no_grad():
        expected = lm.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)[:, PROMPT:]
        assert torch.equal(latent.write(lm, E[tokens], 4, expected=False), E[expected])
        soft = lm(tokens).logits[:, -1].softmax(-1) @ E
        assert torch.allclose(latent.write(lm, E[tokens], 1, expected=True)[:, 0], soft, atol=1e-6)


def test_the_gradient_through_the_cache(lm):
    exact, numeric = latent.gradient(lm, 4, end_to_end=True)
    assert exact == pytest.approx(numeric, rel=0.01) and abs(numeric) > 1e-4
    dropped, there = latent.gradient(lm, 4, end_to_end=False)
    assert dropped == 0 and there == pytest.approx(numeric)  # it is there; Figure 1's reading does not look


@pytest.mark.parametrize("end_to_end", [False, True])
def test_only_the_adapter_learns(lm, end_to_end):
    before = {name: p.clone() for name, p in lm.named_parameters()}
    student = latent.train(lm, 2, end_to_end, steps=2, seed=0, batch=4)
    assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())
    adapter = {name: p for name, p in student.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in adapter) and sum(p.numel() for p in adapter.values()) == 22_016
    assert all(p.abs().sum() > 0 for name, p in adapter.items() if "lora_B" in name)  # B starts at 0: all have moved
    kept = [p for name, p in student.named_parameters() if "lora_" not in name]
    assert all(torch.equal(a, b) for a, b in zip(kept, before.values(), strict=True))


def test_a_detached_sender_is_the_base(lm, monkeypatch):
    senders = []
    monkeypatch.setattr(latent, "trace", lambda who, *rest, real=latent.trace: senders.append(who) or real(who, *rest))
    students = [latent.train(lm, 1, end_to_end, steps=1, seed=0, batch=2) for end_to_end in (False, True)]
    assert senders[0] is lm and senders[1] is students[1]


def test_channels(lm):
    with pytest.raises(ValueError, match="a channel is everything, nothing"):
        latent.accuracy(lm, "telepathy")
    for channel in ("nothing", "permuted"):
        assert latent.accuracy(lm, channel, n=1000).mean().item() == pytest.approx(latent.CHANCE, abs=0.03)
