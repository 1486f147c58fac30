"""Sampling is exact: the log-probs, the distribution, the cache, and a row's independence from its neighbours."""

import math

import pytest
import torch
from conftest import FAMILIES, USERS

from minimgrpo import log, sampler
from minimgrpo.trajectory import Trajectory

PROMPTS = [f"{'a b c ' * n}{USERS[n % 3]}" for n in range(5)]  # of different lengths


def score(policy, trajectories, temperature=1.0):
    """Log-probs of the sampled tokens, computed again as the learner does: one list per trajectory."""
    with torch.no_grad():
        ids, masks = [t.token_ids for t in trajectories], [t.mask for t in trajectories]
        logprobs, _ = policy.score(trajectories[0].agent, ids, masks, temperature)
    return [row[: len(t.token_ids)].tolist() for row, t in zip(logprobs, trajectories, strict=True)]


def greedy(policy, prompts, length=12):
    return policy.conversations("planner", prompts).generate(list(range(len(prompts))), None, length, 0.0)


def assert_same(samples, others):
    assert [s.ids for s in samples] == [s.ids for s in others]
    for one, other in zip(samples, others, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.stopped_by == other.stopped_by


@pytest.fixture(params=FAMILIES)
def policy(request, load):
    return load(request.param)


# ------------------------------------------------------------------------------------------------------------ log-probs


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sampled_logprobs_equal_rescored_ones_over_ragged_conversations_of_several_turns(policy, converse, temperature):
    trajectories = converse(policy, temperature=temperature, rows=8)
    assert len({len(t.token_ids) for t in trajectories}) > 3 and max(len(t.messages) for t in trajectories) >= 7
    for trajectory, again in zip(trajectories, score(policy, trajectories, temperature), strict=True):
        assert trajectory.logprobs == pytest.approx(again, abs=1e-4)


def test_the_unfused_path_samples_what_it_scores_too(load, converse):
    policy = load("llama", fused=False)
    trajectories = converse(policy, temperature=0.7)
    for trajectory, again in zip(trajectories, score(policy, trajectories, 0.7), strict=True):
        assert trajectory.logprobs == pytest.approx(again, abs=1e-4)


def test_greedy_logprobs_are_those_at_temperature_one(policy):
    prompt = policy.chat.open("planner", "Hi")
    [sample] = greedy(policy, [prompt])
    mask = [0] * len(prompt) + [1] * len(sample.ids)
    with torch.no_grad():
        logprobs, _ = policy.score("planner", [prompt + sample.ids], [mask])
    assert sample.logprobs == pytest.approx(logprobs[0, len(prompt) :].tolist(), abs=1e-4)


def test_both_roles_may_take_turns(load, converse):
    """A planner's second turn comes after the executor has sampled: each role keeps its own adapter and cache."""
    policy = load("llama")
    prompt = policy.chat.open("planner", "Hi")
    conversations = policy.conversations("planner", [prompt])
    [first] = conversations.generate([0], None, 8, 0.0)
    converse(policy, role="executor", rows=2, turns=1)
    [second] = conversations.generate([0], [prompt], 8, 0.0)
    ids = prompt + first.ids + prompt
    assert_same([second], greedy(policy, [ids], 8))


# ----------------------------------------------------------------------------------------------------- the distribution


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_are_drawn_from_the_softmax_of_the_logits_over_the_temperature(load, temperature):
    """3 000 first tokens after one prompt against the exact distribution: chi-square over its common tokens."""
    policy, n = load("llama"), 3_000
    prompt = policy.chat.open("planner", "Hi")
    conversations = policy.conversations("planner", [prompt] * n)
    samples = conversations.generate(list(range(n)), None, 1, temperature, torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = torch.softmax(policy.model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=len(exact))
    common = exact * n > 5
    rest = torch.tensor([counts[~common].sum()]), exact[~common].sum()[None]  # no hidden top-k or top-p cuts the tail
    observed, expected = torch.cat([counts[common], rest[0]]), torch.cat([exact[common], rest[1]]) * n
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum().item(), len(expected) - 1
    assert freedom > 30 and counts[~common].sum() > 0
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (0.1, 1), (0.5, 2), (0.74, 2), (0.9999999, 3)])
def test_a_token_of_probability_zero_is_never_drawn(uniform, token):
    """Probabilities 0, 1/4, 1/2, 1/4, 0: the uniform number says where on the line from 0 to 1 to look."""
    logits = torch.tensor([[-torch.inf, 0.0, math.log(2), 0.0, -torch.inf]])
    chosen, logprob = sampler._draw(logits, 1.0, torch.tensor([uniform]))
    assert chosen.item() == token and logprob.exp().item() == pytest.approx(0.5 if token == 2 else 0.25)


def test_rows_of_one_prompt_are_drawn_independently_and_a_seed_repeats_them(load):
    policy = load("llama")
    prompts = [policy.chat.open("planner", "Hi")] * 8

    def sample(seed):
        return policy.conversations("planner", prompts).generate(
            list(range(8)), None, 6, 1.0, torch.Generator().manual_seed(seed)
        )

    first = sample(0)
    assert len({tuple(s.ids) for s in first}) == 8
    assert sample(0) == first and sample(1) != first


# --------------------------------------------------------------------------------------------------- rows and the cache


def test_a_row_alone_equals_the_same_row_in_a_ragged_batch(policy):
    prompts = [policy.chat.open("planner", text) for text in PROMPTS]
    assert len({len(p) for p in prompts}) == 5
    together = greedy(policy, prompts)
    assert_same(together, [greedy(policy, [p])[0] for p in prompts])


def test_reusing_the_cache_equals_reading_the_whole_context_again(policy):
    prompts = [policy.chat.open("planner", text) for text in PROMPTS]
    conversations = policy.conversations("planner", prompts)
    first = conversations.generate(list(range(5)), None, 9, 0.0)
    new = [policy.chat.respond("No results. " * (12 * (i % 2) + 1), 2) for i in range(5)]  # some outgrow the buffer
    rows = [4, 0, 3]
    second = conversations.generate(rows, [new[i] for i in rows], 9, 0.0)
    third = conversations.generate([0], [new[1]], 9, 0.0)
    whole = [prompts[i] + first[i].ids + new[i] for i in rows]
    assert_same(second, greedy(policy, whole, 9))
    assert_same(third, greedy(policy, [whole[1] + second[1].ids + new[1]], 9))


def test_a_shared_prompt_is_read_once_and_gives_what_separate_reading_gives(policy):
    a, b = (policy.chat.open("planner", text) for text in USERS[:2])
    rows_read = []
    hook = policy.model.get_output_embeddings().register_forward_hook(lambda *args: rows_read.append(len(args[2])))
    shared = greedy(policy, [a, b, a, a, b])
    hook.remove()
    assert rows_read[0] == 2
    assert_same(shared, [greedy(policy, [p])[0] for p in (a, b, a, a, b)])


def test_rows_that_finish_early_leave_the_batch_and_change_nothing_for_the_others(policy, monkeypatch):
    """Each row gets the same uniform numbers alone and in the batch, which is cut down more than once on the way."""
    policy.chat.stop_ids = set(range(20, 90))
    prompts = [policy.chat.open("planner", text) for text in PROMPTS * 2]
    uniform, sizes = torch.rand(10, 30, generator=torch.Generator().manual_seed(3)), []
    hook = policy.model.get_output_embeddings().register_forward_hook(lambda *args: sizes.append(len(args[2])))
    monkeypatch.setattr(sampler.torch, "rand", lambda *_args, **_kwargs: uniform)
    together = policy.conversations("planner", prompts).generate(list(range(10)), None, 30, 1.0)
    hook.remove()
    assert len(set(sizes[1:])) >= 3 and len({len(s.ids) for s in together}) >= 4
    alone = []
    for i, prompt in enumerate(prompts):
        monkeypatch.setattr(sampler.torch, "rand", lambda *_args, i=i, **_kwargs: uniform[i : i + 1])
        alone += policy.conversations("planner", [prompt]).generate([0], None, 30, 1.0)
    assert_same(together, alone)


def test_padding_is_never_recognised_by_its_id(policy):
    """pad = eos = an id that stands in every prompt, against a pad id that stands in none."""
    eos = policy.chat.tokenizer.eos_token_id
    prompts = [policy.chat.open("planner", text) for text in PROMPTS]
    assert all(eos in p for p in prompts)
    policy.pad_id = eos
    samples = greedy(policy, prompts)
    ids = [p + s.ids for p, s in zip(prompts, samples, strict=True)]
    masks = [[0] * len(p) + [1] * len(s.ids) for p, s in zip(prompts, samples, strict=True)]
    with torch.no_grad():
        scored, mask = policy.score("planner", ids, masks)
        policy.pad_id = 7
        assert_same(greedy(policy, prompts), samples)
        assert torch.allclose(policy.score("planner", ids, masks)[0], scored, atol=1e-5)
    assert mask.sum(dim=1).tolist() == [len(s.ids) for s in samples]


def test_a_conversation_may_fill_the_models_context_to_the_last_position(policy):
    """Also when a neighbour reads more than would fit, so that padding stands beyond the last position."""
    filler = policy.chat.encode("a b c " * 400)
    prompts, new = [filler[: policy.max_context - 20], filler[:20]], [filler[:4], filler[:60]]
    conversations = policy.conversations("planner", prompts)
    first = conversations.generate([0, 1], None, 8, 0.0)
    assert_same(first, [greedy(policy, [p], 8)[0] for p in prompts])
    second = conversations.generate([0, 1], new, 8, 0.0)
    whole = [p + s.ids + n for p, s, n in zip(prompts, first, new, strict=True)]
    assert len(whole[0]) + 8 == policy.max_context
    assert_same(second, [greedy(policy, [ids], 8)[0] for ids in whole])


def test_a_model_left_in_training_mode_samples_without_dropout(load):
    policy = load("gpt2")
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    prompt = policy.chat.open("planner", "Hi")
    expected = greedy(policy, [prompt])
    policy.model.train()
    assert_same(greedy(policy, [prompt]), expected)


# ------------------------------------------------------------------------------------------------------ stop and length


def test_the_stop_token_is_the_last_of_its_message_and_is_trained(load, converse):
    policy = load("llama")
    trajectories = converse(policy, rows=8)
    stops = policy.chat.stop_ids
    ends = 0
    for t in trajectories:
        assert len(t.token_ids) == len(t.mask) == len(t.logprobs)
        for at, (token, sampled) in enumerate(zip(t.token_ids, t.mask, strict=True)):
            if sampled and token in stops:
                ends += 1
                assert t.logprobs[at] < 0
                assert at + 1 == len(t.mask) or t.mask[at + 1] == 0  # nothing is sampled after it
    assert ends > 8


def test_prompts_and_tool_output_are_never_in_the_mask(load, converse):
    for t in converse(load("llama")):
        assert t.mask[0] == 0
        assert all(logprob == 0.0 for logprob, sampled in zip(t.logprobs, t.mask, strict=True) if not sampled)


def test_a_message_that_is_cut_has_no_stop_token(load):
    policy = load("llama")
    policy.chat.stop_ids = set()
    [sample] = greedy(policy, [policy.chat.open("planner", "Hi")], 7)
    assert (len(sample.ids), len(sample.logprobs), sample.stopped_by) == (7, 7, None)


def test_a_stop_token_sampled_last_of_all_counts_as_a_stop(load):
    policy = load("llama")
    prompt = policy.chat.open("planner", "Hi")
    [sample] = greedy(policy, [prompt], 7)
    policy.chat.stop_ids = {sample.ids[3]}
    [cut] = greedy(policy, [prompt], sample.ids.index(sample.ids[3]) + 1)
    assert cut.stopped_by == sample.ids[3] == cut.ids[-1]


def test_a_temperature_below_zero_is_refused(load):
    policy = load("llama")
    with pytest.raises(ValueError, match="temperature"):
        policy.conversations("planner", [[1, 2]]).generate([0], None, 4, -1.0)


def test_the_first_call_must_read_every_prompt(load):
    conversations = load("llama").conversations("planner", [[1, 2], [3]])
    with pytest.raises(ValueError, match="every prompt"):
        conversations.generate([0], None, 4, 1.0)


# ----------------------------------------------------------------------------------------------------- ids and the text


def test_training_reads_the_sampled_ids_even_where_decoding_and_encoding_gives_others(load, converse, tmp_path):
    """Half characters and BPE merges across a sampled boundary change on the way through text; the log keeps ids."""
    policy = load("llama")
    trajectories = converse(policy, rows=8)
    changed = 0
    for t in trajectories:
        sampled = [token for token, mask in zip(t.token_ids, t.mask, strict=True) if mask]
        changed += policy.chat.encode(policy.chat.tokenizer.decode(sampled)) != sampled
    assert changed > 0
    log.publish(tmp_path / "step.jsonl", (t.to_json() for t in trajectories))
    back = [Trajectory.from_json(row) for row in log.read(tmp_path / "step.jsonl")]
    assert back == trajectories
    for trajectory, again in zip(back, score(policy, back), strict=True):
        assert trajectory.logprobs == pytest.approx(again, abs=1e-4)
