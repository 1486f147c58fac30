"""Advantages, the clipped loss and k3, each against a literal transcription in plain Python loops."""

import itertools
import math
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimgrpo.alignment import align, duplicate
from minimgrpo.grpo import (
    AVERAGES,
    RATIOS,
    group_advantages,
    kl_k3,
    loss_normalizer,
    policy_loss,
    policy_stats,
)

MODES = list(itertools.product(RATIOS, AVERAGES))
NAN, INF = float("nan"), float("inf")


# ---- the reference: the formulas, written out; a row of weight c is c rows -------------------------------------------


def reference_advantages(rewards, weights, scale=True):
    rewards = [struct.unpack("f", struct.pack("f", r))[0] for r in rewards]
    group = [r for r, c in zip(rewards, weights, strict=True) for _ in range(c)]
    if not group or all(r == group[0] for r in group):
        return [0.0] * len(rewards)
    mean = math.fsum(group) / len(group)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / len(group)) if scale else 1.0
    return [(r - mean) / std if c > 0 else 0.0 for r, c in zip(rewards, weights, strict=True)]


def reference_loss(new, old, advantages, mask, weights, clip_low, clip_high, ratio, average):
    rows = []
    for b, c in enumerate(weights):
        rows += [b] * c
    T = len(mask[0])
    token_values, row_means, live_rows = [], [], 0
    for b in rows:
        tokens = [t for t in range(T) if mask[b][t]]
        if not tokens:
            continue
        live_rows += 1
        token_ratios = [math.exp(new[b][t]) / math.exp(old[b][t]) for t in tokens]
        product = 1.0
        for r in token_ratios:
            product *= r
        values = []
        for r in token_ratios:
            r = {"token": r, "sequence": product, "sequence_mean": product ** (1 / len(tokens))}[ratio]
            clipped = min(max(r, 1 - clip_low), 1 + clip_high)
            values.append(-min(r * advantages[b], clipped * advantages[b]))
        token_values += values
        row_means.append(sum(values) / len(values))
    if not token_values:
        return 0.0
    if average == "token":
        return sum(token_values) / len(token_values)
    if average == "sequence":
        return sum(row_means) / len(row_means)
    return sum(token_values) / (live_rows * T)


def random_batch(seed, lengths=(5, 1, 3, 0, 4), T=6, spread=0.4, dtype=torch.float64):
    """Rows of given lengths (the mask has holes, as tool output makes them), log-probs off by `spread`."""
    g = torch.Generator().manual_seed(seed)
    B = len(lengths)
    old = -torch.rand(B, T, generator=g, dtype=torch.float64) * 2 - 0.1
    new = old + spread * torch.randn(B, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(B, generator=g, dtype=torch.float64)
    mask = torch.zeros(B, T, dtype=torch.bool)
    for b, length in enumerate(lengths):
        mask[b, torch.randperm(T, generator=g)[:length]] = True
    return new.to(dtype), old.to(dtype), advantages.to(dtype), mask


def loss_and_grad(new, *args, **kwargs):
    new = new.clone().requires_grad_()
    loss = policy_loss(new, *args, **kwargs)
    loss.backward()
    return loss.detach(), new.grad


# ---- group advantages ------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    # mean 2, population std sqrt(2/3); the sample std would be 1
    expected = [-math.sqrt(1.5), 0.0, math.sqrt(1.5)]
    assert group_advantages([1, 2, 3]).tolist() == pytest.approx(expected, rel=1e-6)
    assert group_advantages([1, 2, 3], scale=False).tolist() == [-1, 0, 1]
    # one success in four: mean 1/4, std sqrt(3)/4
    assert group_advantages([1, 0, 0, 0]).tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3, rel=1e-6)


def test_statistics_are_those_of_the_group_not_of_the_batch():
    assert group_advantages([[1.0, 1.0], [0.0, 0.0]]).tolist() == [[0, 0], [0, 0]]
    assert group_advantages([[0.0, 1.0], [10.0, 20.0]]).tolist() == [[-1, 1], [-1, 1]]
    cube = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    copies = torch.randint(0, 3, (2, 3, 4), generator=torch.Generator().manual_seed(1))
    batched = group_advantages(cube, copies)
    for i, j in itertools.product(range(2), range(3)):
        assert torch.equal(batched[i, j], group_advantages(cube[i, j], copies[i, j]))


@pytest.mark.parametrize("rewards", [[0.35] * 7, [0.1] * 3, [1 / 3] * 5, [0.7], [-2.0], [1e30] * 3, [0.0] * 4])
@pytest.mark.parametrize("scale", [True, False])
def test_flat_groups_get_exactly_zero(rewards, scale):
    for values in (rewards, torch.tensor(rewards), torch.tensor(rewards, dtype=torch.float64)):
        assert group_advantages(values, scale=scale).tolist() == [0.0] * len(rewards)
    assert group_advantages(rewards, weights=[3] * len(rewards), scale=scale).tolist() == [0.0] * len(rewards)


def test_float_residue_is_not_a_difference():
    assert 0.1 + 0.2 != 0.3
    assert group_advantages([0.1 + 0.2, 0.3, 0.3]).tolist() == [0, 0, 0]
    # a real difference, however small, counts in full: there is no epsilon in the std
    assert group_advantages([1e-6, 0.0]).tolist() == [1, -1]
    assert group_advantages([1.0, 1.0 + 2**-20]).tolist() == [-1, 1]


def test_weights_in_advantages_by_hand():
    # 0 counted three times and 4 once: mean 1, variance (3 * 1 + 9) / 4 = 3
    assert group_advantages([0, 4], weights=[3, 1]).tolist() == pytest.approx([-1 / math.sqrt(3), math.sqrt(3)])
    # a dropped row is out of mean and std, and gets 0
    assert group_advantages([0, 100, 1], weights=[1, 0, 1]).tolist() == [-1, 0, 1]
    # only equal rewards are left
    assert group_advantages([5, 7, 5], weights=[2, 0, 1]).tolist() == [0, 0, 0]
    assert group_advantages([5, 7], weights=[0, 4]).tolist() == [0, 0]
    assert group_advantages([5, 7], weights=[0, 0]).tolist() == [0, 0]
    assert group_advantages([[5, 7], [0, 1]], weights=[[0, 0], [1, 1]]).tolist() == [[0, 0], [-1, 1]]


def test_long_rollouts_do_not_weigh_more():
    # rollout A: one turn, reward 0; rollout B: three turns, reward 1. One row each: the baseline is 0.5, not 0.75
    assert group_advantages([0.0, 1.0], scale=False).tolist() == [-0.5, 0.5]
    # in the loss, each rollout pulls equally hard with average="sequence", whatever its number of tokens
    mask = torch.zeros(2, 6)
    mask[0, :2], mask[1, :] = 1, 1
    zeros = torch.zeros(2, 6)
    _, grad = loss_and_grad(zeros, zeros, torch.tensor([-0.5, 0.5]), mask, average="sequence")
    assert grad.sum(dim=1).tolist() == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize(
    "rewards, weights, match",
    [
        ([], None, "at least one reward"),
        (torch.zeros(3, 0), None, "at least one reward"),
        (1.0, None, "at least one reward"),
        ([1.0, NAN], None, "finite"),
        ([1.0, INF], None, "finite"),
        ([1.0, -INF], [1, 0], "finite"),
        ([1.0, 1e39], None, "finite"),
        ([1.0, 2.0], [1, -1], "not negative"),
        ([1.0, 2.0], [1, NAN], "finite"),
        ([1.0, 2.0], [1], "weights"),
        ([1.0, 2.0], [1, 1, 1], "weights"),
        ([[1.0, 2.0]], [1, 1], "weights"),
    ],
)
def test_advantages_refuse(rewards, weights, match):
    with pytest.raises(ValueError, match=match):
        group_advantages(rewards, weights)


def test_advantages_are_constants():
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    advantages = group_advantages(rewards)
    assert not advantages.requires_grad
    assert advantages.dtype == torch.float32
    assert group_advantages([False, True]).tolist() == [-1, 1]


reward_values = st.sampled_from([0.0, 0.1, 0.35, 0.5, 1.0]) | st.floats(-100, 100, width=32, allow_subnormal=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(reward_values, st.integers(0, 4)), min_size=1, max_size=12), st.booleans())
def test_advantages_equal_the_reference(rows, scale):
    rewards, weights = zip(*rows, strict=True)
    got = group_advantages(list(rewards), list(weights), scale)
    assert got.tolist() == pytest.approx(reference_advantages(rewards, weights, scale), rel=1e-5, abs=1e-5)

    weights = torch.tensor(weights)
    total = int(weights.sum())
    assert got.isfinite().all()
    if total and scale and got.any():
        assert (got.double() * weights).sum().item() == pytest.approx(0, abs=1e-4)
        assert (got.double() ** 2 * weights).sum().item() / total == pytest.approx(1, rel=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(reward_values, st.integers(0, 4)), min_size=1, max_size=10), st.booleans())
def test_weights_equal_literal_duplicates_in_advantages(rows, scale):
    rewards, weights = zip(*rows, strict=True)
    if not any(weights):
        return
    weighted = group_advantages(list(rewards), list(weights), scale).tolist()
    literal = group_advantages(duplicate([rewards], [weights]), scale=scale).tolist()
    assert duplicate([weighted], [weights]) == pytest.approx(literal, rel=1e-5, abs=1e-5)


def test_alignment_feeds_advantages():
    counts = [1, 0, 3, 9]
    rng = random.Random(5)
    rewards = [[rng.random() for _ in range(d)] for d in counts]
    copies = align(counts, d_max=4, seed="q1")
    flat_rewards, flat_copies = list(itertools.chain(*rewards)), list(itertools.chain(*copies))
    weighted = group_advantages(flat_rewards, flat_copies).tolist()
    literal = duplicate(rewards, copies)
    assert len(literal) == 3 * 4  # the rollout without a call has no rows
    mean = sum(literal) / 12
    std = math.sqrt(sum((r - mean) ** 2 for r in literal) / 12)
    for r, c, a in zip(flat_rewards, flat_copies, weighted, strict=True):
        assert a == pytest.approx((r - mean) / std if c else 0.0, abs=1e-5)


# ---- the clipped loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    "r, advantage, loss, slope",  # slope: d loss / d log-prob = -r * A where the gradient flows
    [
        (0.5, 1, -0.5, -0.5),
        (0.5, -1, 0.8, 0),
        (2, 1, -1.2, 0),
        (2, -1, 2.0, 2.0),
        (1.1, 1, -1.1, -1.1),
        (1.1, -1, 1.1, 1.1),
    ],
)
def test_clip_corners(ratio, average, r, advantage, loss, slope):
    new, old = torch.tensor([[math.log(r) - 1.5]]), torch.tensor([[-1.5]])
    got, grad = loss_and_grad(
        new, old, torch.tensor([float(advantage)]), torch.ones(1, 1), clip_high=0.2, ratio=ratio, average=average
    )
    assert got.item() == pytest.approx(loss, abs=1e-6)
    assert grad.item() == pytest.approx(slope, abs=1e-6)


def test_both_clips_are_where_they_were_asked_for():
    def loss(r, advantage, **clips):
        new = torch.tensor([[float(r)]]).log()
        return policy_loss(new, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), **clips).item()

    assert loss(9, 1.0) == pytest.approx(-1.28)
    assert loss(0.01, -1.0) == pytest.approx(0.8)
    assert loss(9, 1.0, clip_low=0.3, clip_high=0.5) == pytest.approx(-1.5)
    assert loss(0.01, -1.0, clip_low=0.3, clip_high=0.5) == pytest.approx(0.7)
    for clips in ({"clip_low": -0.1}, {"clip_high": -0.1}, {"clip_high": NAN}):
        with pytest.raises(ValueError, match="clip"):
            loss(1, 1.0, **clips)


@pytest.mark.parametrize("ratio, average", MODES)
def test_loss_equals_the_reference_and_its_finite_differences(ratio, average):
    for seed in range(4):
        new, old, advantages, mask = random_batch(seed)
        weights = [1, 3, 2, 1, 0]
        rest = (old.tolist(), advantages.tolist(), mask.tolist(), weights, 0.2, 0.28, ratio, average)
        loss, grad = loss_and_grad(new, old, advantages, mask, weights, ratio=ratio, average=average)
        assert loss.item() == pytest.approx(reference_loss(new.tolist(), *rest), rel=1e-9)
        h = 1e-6
        for b, t in itertools.product(range(new.shape[0]), range(new.shape[1])):
            up, down = new.tolist(), new.tolist()
            up[b][t] += h
            down[b][t] -= h
            slope = (reference_loss(up, *rest) - reference_loss(down, *rest)) / (2 * h)
            assert grad[b, t].item() == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("ratio, average", MODES)
def test_weights_equal_literal_duplicates_in_loss_and_gradient(ratio, average):
    copies = [2, 0, 1, 3, 4]
    for seed in range(3):
        new, old, advantages, mask = random_batch(seed)
        weighted = loss_and_grad(new, old, advantages, mask, copies, ratio=ratio, average=average)

        rows = torch.tensor(duplicate([range(5)], [copies]))
        parameter = new.clone().requires_grad_()
        literal = policy_loss(parameter[rows], old[rows], advantages[rows], mask[rows], ratio=ratio, average=average)
        literal.backward()
        torch.testing.assert_close(weighted, (literal.detach(), parameter.grad), rtol=1e-10, atol=1e-12)

        unweighted = loss_and_grad(new, old, advantages, mask, ratio=ratio, average=average)
        assert not torch.allclose(weighted[1], unweighted[1])


@pytest.mark.parametrize("ratio, average", MODES)
@pytest.mark.parametrize("trim", [False, True])
def test_micro_batches_change_nothing(ratio, average, trim):
    new, old, advantages, mask = random_batch(0, lengths=(2, 20, 20, 2, 0), T=24, dtype=torch.float32)
    mask = mask.sort(dim=1, descending=True).values  # completions first, so that padding can be cut off
    weights = torch.tensor([1, 2, 3, 1, 1])
    whole = loss_and_grad(new, old, advantages, mask, weights, ratio=ratio, average=average)
    normalizer = loss_normalizer(mask, weights, average)
    for size in (1, 2, 3):
        parameter, total = new.clone().requires_grad_(), 0.0
        for start in range(0, 5, size):
            b = slice(start, start + size)
            T = max(1, int(mask[b].sum(dim=1).max())) if trim else 24
            rows = (parameter[b, :T], old[b, :T], advantages[b], mask[b, :T], weights[b])
            loss = policy_loss(*rows, ratio=ratio, average=average, normalizer=normalizer)
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(whole[0].item(), abs=1e-6)
        torch.testing.assert_close(parameter.grad, whole[1], rtol=1e-5, atol=1e-6)


def test_averages_by_hand_on_lengths_2_and_20():
    mask = torch.zeros(2, 20)
    mask[0, :2], mask[1, :] = 1, 1
    zeros, advantages = torch.zeros(2, 20), torch.tensor([1.0, -1.0])  # ratio 1: each token's loss is -A
    loss = {a: policy_loss(zeros, zeros, advantages, mask, average=a).item() for a in AVERAGES}
    assert loss["token"] == pytest.approx((-2 + 20) / 22)
    assert loss["sequence"] == pytest.approx(0)
    assert loss["constant"] == pytest.approx((-2 + 20) / 40)
    weighted = {a: policy_loss(zeros, zeros, advantages, mask, [3, 1], average=a).item() for a in AVERAGES}
    assert weighted["token"] == pytest.approx((-6 + 20) / 26)
    assert weighted["sequence"] == pytest.approx((-3 + 1) / 4)
    assert weighted["constant"] == pytest.approx((-6 + 20) / 80)


@pytest.mark.parametrize("ratio", RATIOS)
def test_averages_agree_on_equal_lengths(ratio):
    new, old, advantages, _ = random_batch(3, lengths=(6, 6, 6))
    results = [
        loss_and_grad(new, old, advantages, torch.ones(3, 6), [1, 2, 1], ratio=ratio, average=a) for a in AVERAGES
    ]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_ratios_by_hand():
    # token ratios 1.1 and 1.2: product 1.32 (clipped at 1.28), geometric mean sqrt(1.32)
    new, old = torch.tensor([[1.1, 1.2, 7.0]]).log(), torch.zeros(1, 3)
    mask = torch.tensor([[1, 1, 0]])
    loss = {r: policy_loss(new, old, torch.tensor([1.0]), mask, ratio=r).item() for r in RATIOS}
    assert loss["token"] == pytest.approx(-1.15)
    assert loss["sequence"] == pytest.approx(-1.28)
    assert loss["sequence_mean"] == pytest.approx(-math.sqrt(1.32))
    wide = policy_loss(new, old, torch.tensor([1.0]), mask, clip_high=1.0, ratio="sequence")
    assert wide.item() == pytest.approx(-1.32)


@pytest.mark.parametrize("ratio, average", MODES)
def test_first_pass_is_the_plain_policy_gradient(ratio, average):
    new, _, advantages, mask = random_batch(1, lengths=(4, 2, 5))
    lengths = mask.sum(dim=1).double()
    share = {
        "token": 1 / lengths.sum().expand(3),
        "sequence": 1 / (3 * lengths),
        "constant": torch.tensor([1 / 18] * 3),
    }
    new.requires_grad_()
    loss = policy_loss(
        new, new, advantages, mask, ratio=ratio, average=average
    )  # old log-probs must not carry gradient
    loss.backward()
    if ratio == "token":
        expected = -(advantages * share[average])[:, None] * mask
    elif ratio == "sequence":  # d (product) / d log-prob is the product, once for each of the row's tokens
        expected = -(advantages * share[average] * lengths)[:, None] * mask
    else:
        expected = -(advantages * share[average])[:, None] * mask
    torch.testing.assert_close(new.grad, expected, check_dtype=False)
    assert loss.item() == pytest.approx(-(advantages * share[average] * lengths).sum().item())


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio, average", MODES)
@pytest.mark.parametrize("how", ["mask", "weights", "no rows"])
def test_nothing_to_learn_from(ratio, average, how):
    new, old, advantages, mask = random_batch(0, dtype=torch.float32)
    weights = [1] * 5
    if how == "mask":
        mask = torch.zeros_like(mask)
    elif how == "weights":
        weights = [0] * 5
    else:
        new, old, advantages, mask, weights = new[:0], old[:0], advantages[:0], mask[:0], []
    for normalizer in (None, 0.0, 5.0):
        loss, grad = loss_and_grad(
            new, old, advantages, mask, weights, ratio=ratio, average=average, normalizer=normalizer
        )
        assert loss.item() == 0
        assert torch.equal(grad, torch.zeros_like(new))
    assert loss_normalizer(mask, weights, average) == 0
    stats = policy_stats(new, old, advantages, mask, weights)
    assert stats == {"clip_fraction": 0, "approx_kl": 0, "approx_kl_k1": 0, "ratio_mean": 1, "ratio_max": 1}


@pytest.mark.parametrize("ratio, average", MODES)
@pytest.mark.parametrize("garbage", [0.0, -1e9, 1e9, INF, -INF, NAN])
def test_masked_positions_may_hold_anything(ratio, average, garbage):
    new, old, advantages, mask = random_batch(2, dtype=torch.float32)
    weights = [1, 2, 0, 1, 1]
    expected = loss_and_grad(new, old, advantages, mask, weights, ratio=ratio, average=average)
    dead = ~mask | torch.tensor([False, False, True, False, False])[:, None]  # row 2 has weight 0
    dirty_advantages = advantages.clone()
    dirty_advantages[2:4] = garbage  # row 3 is fully masked
    for dirty_new, dirty_old in itertools.product(
        (new, new.masked_fill(dead, garbage)), (old, old.masked_fill(dead, garbage))
    ):
        got = loss_and_grad(dirty_new, dirty_old, dirty_advantages, mask, weights, ratio=ratio, average=average)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        assert not got[1][dead].any()
        assert policy_stats(dirty_new, dirty_old, dirty_advantages, mask, weights) == policy_stats(
            new, old, advantages, mask, weights
        )


@pytest.mark.parametrize("ratio, average", MODES)
def test_a_dead_row_changes_neither_numerator_nor_denominator(ratio, average):
    new, old, advantages, mask = random_batch(4, lengths=(5, 1, 3))
    alone = loss_and_grad(new, old, advantages, mask, ratio=ratio, average=average)
    more = [torch.cat([x, x[:1] + 3]) for x in (new, old, advantages)]
    masked = loss_and_grad(*more, torch.cat([mask, torch.zeros_like(mask[:1])]), ratio=ratio, average=average)
    dropped = loss_and_grad(*more, torch.cat([mask, mask[:1]]), [1, 1, 1, 0], ratio=ratio, average=average)
    for loss, grad in (masked, dropped):
        torch.testing.assert_close(loss, alone[0])
        torch.testing.assert_close(grad[:3], alone[1])
        assert not grad[3].any()


def test_mask_kinds_agree():
    new, old, advantages, mask = random_batch(0)
    losses = {policy_loss(new, old, advantages, kind).item() for kind in (mask, mask.int(), mask.float())}
    assert len(losses) == 1


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("log_ratio", [100.0, 1e6, -100.0, -1e6, INF, -INF])
def test_extreme_ratios_stay_finite(ratio, log_ratio):
    new = torch.tensor([[log_ratio, -1.0], [-1.0, -1.0]])
    old = torch.tensor([[0.0, -1.0], [-1.0, -1.0]])
    for advantage in (1.0, -1.0):
        loss, grad = loss_and_grad(new, old, torch.tensor([advantage, 1.0]), torch.ones(2, 2), ratio=ratio)
        assert loss.isfinite()
        assert grad.isfinite().all()
        assert grad[1].tolist() == pytest.approx([-0.5 if ratio == "sequence" else -0.25] * 2)
        if (log_ratio > 0) == (advantage > 0):  # the clip, or an exponential that has vanished, cuts the row's gradient
            assert grad[0, 0] == 0


def test_the_gradient_flows_at_large_ratios_that_still_fit():
    new = torch.tensor([[50.0]])
    _, grad = loss_and_grad(new, torch.zeros(1, 1), torch.tensor([-1.0]), torch.ones(1, 1))
    assert grad.item() == pytest.approx(math.exp(50), rel=1e-5)


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_unknown_names_list_the_valid_ones():
    new, old, advantages, mask = random_batch(0)
    with pytest.raises(ValueError, match="token, sequence, sequence_mean"):
        policy_loss(new, old, advantages, mask, ratio="tokens")
    with pytest.raises(ValueError, match="token, sequence, sequence_mean"):
        policy_stats(new, old, advantages, mask, ratio="tokens")
    with pytest.raises(ValueError, match="token, sequence, constant"):
        policy_loss(new, old, advantages, mask, average="mean")
    with pytest.raises(ValueError, match="token, sequence, constant"):
        loss_normalizer(mask, average="mean")


def test_shapes_that_would_broadcast_are_refused():
    new, old, advantages, mask = random_batch(0)
    for function in (policy_loss, policy_stats):
        for args in [
            (new, old[:1], advantages, mask),
            (new, old, advantages, mask[:1]),
            (new[:, :1], old[:, :1], advantages, mask),
            (new, old, advantages[:, None], mask),
            (new, old, advantages[:1], mask),
            (new, old, advantages[:, None].expand_as(new), mask),
            (new, old, advantages, mask[0]),
            (new, old, advantages, mask, [1.0]),
            (new, old, advantages, mask, [1, 1, 1, 1, -1]),
        ]:
            with pytest.raises(ValueError):
                function(*args)
    with pytest.raises(ValueError, match="ref_logprobs"):
        kl_k3(new, old[:1])


@pytest.mark.parametrize("normalizer", [0.0, -1.0, NAN, INF])
def test_a_normalizer_that_cannot_be_right(normalizer):
    with pytest.raises(ValueError, match="normalizer"):
        policy_loss(*random_batch(0), normalizer=normalizer)


def test_low_precision_log_probs_are_widened():
    new, old = torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.25]], dtype=torch.bfloat16)
    loss = policy_loss(new, old, torch.tensor([-1.0]), torch.ones(1, 1))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.exp(0.25), rel=1e-6)


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_stats_by_hand():
    # ratios per token; A = +1 in row 0, -1 in row 1 (three copies), 0 in row 2
    r = torch.tensor([[0.5, 2.0, 99.0], [0.5, 2.0, 1.0], [4.0, 1.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    stats = policy_stats(r.log(), torch.zeros(3, 3), torch.tensor([1.0, -1.0, 0.0]), mask, [1, 3, 1])
    assert stats["clip_fraction"] == pytest.approx((1 + 3) / 12)  # 2.0 at A = +1, 0.5 at A = -1, none at A = 0
    assert stats["ratio_mean"] == pytest.approx((2.5 + 3 * 3.5 + 4) / 12)
    assert stats["ratio_max"] == pytest.approx(4)
    k3 = {x: x - 1 - math.log(x) for x in (0.5, 2.0, 1.0, 4.0)}
    assert stats["approx_kl"] == pytest.approx((4 * (k3[0.5] + k3[2.0]) + 3 * k3[1.0] + k3[4.0]) / 12, rel=1e-6)
    k1 = {x: -math.log(x) for x in (0.5, 2.0, 1.0, 4.0)}
    expected = (4 * (k1[0.5] + k1[2.0]) + 3 * k1[1.0] + k1[4.0]) / 12
    assert stats["approx_kl_k1"] == pytest.approx(expected, rel=1e-6)
    assert list(stats) == ["clip_fraction", "approx_kl", "approx_kl_k1", "ratio_mean", "ratio_max"]
    assert all(type(value) is float for value in stats.values())
    shrunk = policy_stats(torch.tensor([[-1.0, 0.0]]), torch.zeros(1, 2), torch.ones(1), torch.tensor([[1, 0]]))
    assert shrunk["ratio_max"] == pytest.approx(math.exp(-1))  # padding, whose ratio is 1, is not looked at


@pytest.mark.parametrize("ratio", RATIOS)
def test_clip_fraction_is_the_share_of_tokens_without_gradient(ratio):
    new, old, advantages, mask = random_batch(7, lengths=(6, 4, 5, 3, 0), spread=0.5)
    _, grad = loss_and_grad(new, old, advantages, mask, ratio=ratio)
    stats = policy_stats(new.requires_grad_(), old, advantages, mask, ratio=ratio)
    assert stats["clip_fraction"] == pytest.approx((grad[mask] == 0).double().mean().item())
    assert 0 < stats["clip_fraction"] < 1


def test_stats_of_fresh_samples():
    new, _, advantages, mask = random_batch(0)
    stats = policy_stats(new, new, advantages, mask)
    assert stats == {"clip_fraction": 0, "approx_kl": 0, "approx_kl_k1": 0, "ratio_mean": 1, "ratio_max": 1}


# ---- KL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_k3_expectation_is_the_kl_by_enumeration(seed):
    g = torch.Generator().manual_seed(seed)
    policy, ref = torch.randn(2, 8, generator=g, dtype=torch.float64).log_softmax(dim=-1)
    p, q = policy.exp().tolist(), ref.exp().tolist()
    exact = sum(p[i] * math.log(p[i] / q[i]) for i in range(8))
    other_way = sum(q[i] * math.log(q[i] / p[i]) for i in range(8))
    k3 = kl_k3(policy[None], ref[None])
    assert k3.shape == (1, 8)
    assert (k3 >= 0).all()
    assert (policy.exp() * k3[0]).sum().item() == pytest.approx(exact, rel=1e-9)
    assert abs(exact - other_way) > 1e-4
    # approx_kl is the same estimate for samples of the old policy: KL(old || new)
    weights = policy.exp()[:, None]  # the eight tokens as eight rows, weighted by their probability
    stats = policy_stats(ref[:, None], policy[:, None], torch.zeros(8), torch.ones(8, 1), weights[:, 0])
    assert stats["approx_kl"] == pytest.approx(exact, rel=1e-5)


def test_k3_values_and_gradient():
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    k3 = kl_k3(logprobs, ref)
    assert k3.tolist()[0] == pytest.approx([0, math.e - 2, math.exp(-1.5) + 0.5])
    k3.sum().backward()
    assert logprobs.grad[0, 0] == 0
    assert logprobs.grad.tolist()[0] == pytest.approx([0, 1 - math.e, 1 - math.exp(-1.5)])
    assert ref.grad is None


def test_k3_is_exact_close_to_zero():
    d = 1e-3
    k3 = kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.0 + d]])).item()
    assert k3 == pytest.approx(d**2 / 2, rel=2e-3)
    assert kl_k3(torch.full((2, 2), -3.3), torch.full((2, 2), -3.3)).tolist() == [[0, 0], [0, 0]]
