"""One update: the gradient is that of the plain textbook version, however the batch is cut, weighted or skipped."""

import copy
import math

import pytest
import torch

from minimgrpo import grpo, log
from minimgrpo.learner import Learner, Objective
from minimgrpo.metrics import LEARNED
from minimgrpo.policy import ModelError
from minimgrpo.trajectory import Trajectory

ADVANTAGES = [1.0, -1.0, 0.5, 0.0, -0.5, 2.0, 0.0, -2.0]
COPIES = [1, 2, 1, 3, 1, 2, 0, 1]
RAW = {"max_grad_norm": 1e9}  # so that .grad after an update is the gradient as it was


@pytest.fixture(scope="module")
def shared():
    return {}


@pytest.fixture
def batch(load, converse, shared):
    """Eight sampled trajectories of different lengths with advantages and copies; the tests get copies of them."""
    if not shared:
        shared["batch"] = converse(load(), rows=8, temperature=0.9)
        for t, advantage, copies in zip(shared["batch"], ADVANTAGES, COPIES, strict=True):
            t.advantage, t.copies = advantage, copies
    return copy.deepcopy(shared["batch"])


def update(policy, trajectories, temperature=0.9, **objective):
    """One update -> (gradients, what it measured); the weights are in the policy."""
    learner = Learner(policy, "planner", Objective(**(RAW | objective)), temperature)
    metrics = learner.update(trajectories)
    return [p.grad for p in learner.parameters], metrics


def weights(policy, role="planner"):
    return [p.detach().clone() for p in policy.parameters(role).values()]


def plain_gradients(policy, trajectories, kl=0.0, temperature=0.9, **options):
    """The loss written down once more: one padded batch, nothing skipped, nothing cut."""
    width = max(len(t.token_ids) for t in trajectories)
    old = torch.tensor([t.logprobs + [0.0] * (width - len(t.logprobs)) for t in trajectories])
    ids, masks = [t.token_ids for t in trajectories], [t.mask for t in trajectories]
    logprobs, mask = policy.score("planner", ids, masks, temperature)
    copies = torch.tensor([float(t.copies) for t in trajectories])
    advantages = torch.tensor([t.advantage for t in trajectories])
    loss = grpo.policy_loss(logprobs, old, advantages, mask, copies, **options)
    if kl:
        with torch.no_grad():
            reference, _ = policy.score(None, ids, masks, temperature)
        tokens = mask * copies[:, None]
        loss = loss + kl * (grpo.kl_k3(logprobs, reference) * tokens).sum() / tokens.sum()
    policy.model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in policy.parameters("planner").values()]


def assert_close(found, expected, atol=1e-4):
    """Equal to 1e-4 of the largest gradient: float32 sums in another order are."""
    largest = max(g.abs().max().item() for g in expected)
    assert largest > 1e-3  # there is something to compare
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=atol * largest, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize(
    "ratio, average", [*(("token", a) for a in grpo.AVERAGES), ("sequence", "token"), ("sequence_mean", "sequence")]
)
def test_an_update_has_the_plain_versions_gradient(load, batch, ratio, average):
    """Skipping flat and dropped rows and sorting into micro-batches is only faster."""
    kept = [t for t in batch if t.copies]  # a dropped row must not even widen the "constant" average
    expected = plain_gradients(load(), kept, ratio=ratio, average=average)
    found, metrics = update(load(), batch, ratio=ratio, average=average, tokens=200)
    assert metrics["trained"] == 6
    assert_close(found, expected, atol=1e-4 if ratio == "token" else 1e-3)  # a product gathers the tokens' rounding


@pytest.mark.parametrize("average", grpo.AVERAGES)
def test_micro_batching_changes_nothing(load, batch, average):
    whole, small = load(), load()
    expected, one = update(whole, batch, average=average, tokens=10**6)
    found, other = update(small, batch, average=average, tokens=1)
    assert_close(found, expected)
    for name in set(one) - {"learn_seconds"}:
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    for a, b in zip(weights(small), weights(whole), strict=True):
        assert (a - b).abs().mean() < 1e-5


def test_micro_batches_of_completions_of_2_and_20_tokens(load):
    rows = []
    for length, advantage in ((2, 1.0), (20, -1.0)):
        t = Trajectory("planner", "q", 0, advantage=advantage)
        t.read("user", "?", list(range(30, 40)))
        t.wrote("!", list(range(100, 100 + length)), [-6.0] * length)
        rows.append(t)
    found = [update(load(), rows, temperature=1.0, tokens=tokens)[0] for tokens in (1, 10**6)]
    assert_close(found[0], found[1])
    by_sequence = update(load(), rows, temperature=1.0, average="sequence")[0]
    assert max((a - b).abs().max() for a, b in zip(by_sequence, found[0], strict=True)) > 1e-3  # the switch is real


@pytest.mark.parametrize("average", grpo.AVERAGES)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_copies_are_literal_duplicates(load, batch, average, kl):
    literal = [copy.deepcopy(t) for t in batch for _ in range(t.copies)]
    for t in literal:
        t.copies = 1
    weighted, duplicated = load(), load()
    expected, one = update(duplicated, literal, average=average, kl=kl)
    found, other = update(weighted, batch, average=average, kl=kl)
    assert_close(found, expected)
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
    for name in ("approx_kl_k1", "ratio_mean", *(["kl"] if kl else [])):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
    for a, b in zip(weights(weighted), weights(duplicated), strict=True):
        assert (a - b).abs().mean() < 1e-5


def test_the_order_of_the_trajectories_changes_nothing(load, batch):
    assert_close(update(load(), batch[::-1])[0], update(load(), batch)[0])


def test_a_row_without_a_sampled_token_changes_nothing(load, batch):
    masked = Trajectory("planner", "q", 0, advantage=5.0)
    masked.read("user", "?", list(range(200)))
    for average in ("token", "constant"):
        expected = update(load(), batch, average=average)[0]
        assert_close(update(load(), [masked, *batch], average=average)[0], expected)


def test_what_stands_at_prompts_and_tool_output_is_never_trained(load, batch):
    expected = update(load(), batch)[0]
    for t in batch:
        t.logprobs = [logprob if sampled else float("nan") for logprob, sampled in zip(t.logprobs, t.mask, strict=True)]
    assert_close(update(load(), batch)[0], expected)


def test_tool_output_is_attended_to(load, batch):
    t = max(batch, key=lambda t: len(t.messages))
    policy = load()
    last_turn = len(t.mask) - t.mask[::-1].index(0)  # the first token after the last tool output
    changed = list(t.token_ids)
    changed[last_turn - 30] = 300
    assert t.mask[last_turn - 30] == 0
    with torch.no_grad():
        scores, _ = policy.score("planner", [t.token_ids, changed], [t.mask] * 2)
    assert not torch.allclose(scores[0, last_turn:], scores[1, last_turn:], atol=1e-4)


def test_the_sampled_stop_token_is_trained(load, batch):
    t = next(t for t in batch if t.advantage and t.copies and len(t.messages) > 3)  # more than one message
    ends = [i for i in range(len(t.mask) - 1) if t.mask[i] and not t.mask[i + 1]]
    t.mask = [int(i == ends[0]) for i in range(len(t.mask))]
    assert max(g.abs().max() for g in update(load(), [t])[0]) > 1e-3


@pytest.mark.parametrize("ratio, kl", [("token", 0.0), ("sequence", 0.0), ("sequence_mean", 0.5)])
def test_the_whole_loss_against_finite_differences_in_one_lora_weight(load, batch, ratio, kl):
    policy = load()
    learner = Learner(policy, "planner", Objective(ratio=ratio, kl=kl), 0.9)
    batch = [t for t in batch if t.copies]
    for t in batch:  # a stale batch, so that some ratios are clipped
        t.logprobs = [x + 0.3 * math.sin(i) * m for i, (x, m) in enumerate(zip(t.logprobs, t.mask, strict=True))]

    def total():
        learner.optimizer.zero_grad()
        measured = learner._accumulate(batch, learner._normalizer(batch), learner._tokens(batch))
        return measured["loss"]

    total()
    gradient = max((p.grad for p in learner.parameters), key=lambda g: g.abs().max()).clone()
    weight = max(learner.parameters, key=lambda p: p.grad.abs().max())
    at, step = gradient.abs().argmax(), 3e-4  # small: the clip has kinks
    ends = []
    for change in (step, -2 * step):
        weight.data.view(-1)[at] += change
        ends.append(total())
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(gradient.view(-1)[at].item(), rel=0.05)


# ------------------------------------------------------------------------------------------------------------ the ratio


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_first_pass_has_ratio_one_even_with_lora_dropout_and_the_second_has_not(load, converse, dropout):
    policy = load(dropout=dropout)
    trajectories = converse(policy, temperature=1.3)
    for t, advantage in zip(trajectories, ADVANTAGES, strict=False):
        t.advantage = advantage or 1.0
    first = Learner(policy, "planner", Objective(lr=1e-2), 1.3).update(copy.deepcopy(trajectories))
    assert first["ratio_max"] == pytest.approx(1, abs=5e-5) and first["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["clip_fraction"] == 0 and first["approx_kl"] == pytest.approx(0, abs=1e-7)
    second = Learner(policy, "planner", Objective(lr=1e-2), 1.3).update(trajectories)
    assert second["ratio_max"] > 1.01 and second["approx_kl"] > 1e-5 and abs(second["approx_kl_k1"]) > 1e-5


def test_the_second_epoch_of_one_batch_is_no_longer_at_ratio_one(load, batch):
    _, metrics = update(load(), batch, epochs=2, lr=1e-2)
    assert metrics["ratio_max"] > 1.01 and metrics["approx_kl"] > 1e-5


def test_the_base_models_own_dropout_stays_off_in_an_update(load, converse, monkeypatch):
    policy = load("gpt2")
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    trajectories = converse(policy)
    for t in trajectories:
        t.advantage = 1.0
    assert Learner(policy, "planner", Objective()).update(trajectories)["ratio_max"] == pytest.approx(1, abs=5e-5)


def test_a_wrong_temperature_shows_in_the_ratio(load, batch):
    _, metrics = update(load(), batch, temperature=1.3)
    assert metrics["ratio_max"] > 1.05


# --------------------------------------------------------------------------------------------------------------- the KL


def test_the_kl_is_zero_with_zero_gradient_while_the_policy_is_the_base(folders, batch):
    from minimgrpo.policy import Policy

    without, measured = update(Policy.load(str(folders["llama"])), batch)
    found, with_kl = update(Policy.load(str(folders["llama"])), batch, kl=10.0)
    assert "kl" not in measured and with_kl["kl"] == pytest.approx(0, abs=1e-9)
    assert_close(found, without)


def test_the_kl_term_has_the_plain_versions_gradient_and_takes_flat_rows_in(load, batch):
    kept = [t for t in batch if t.copies]
    expected = plain_gradients(load(), kept, kl=0.5)
    for tokens in (1, 10**6):
        found, metrics = update(load(), batch, kl=0.5, tokens=tokens)
        assert metrics["trained"] == 7 and metrics["kl"] > 0.01
        assert_close(found, expected)


def test_the_kl_alone_pulls_the_policy_to_the_base(load, batch):
    policy = load()
    for t in batch:
        t.advantage = 0.0
    learner = Learner(policy, "planner", Objective(kl=1.0, lr=1e-2), 0.9)
    measured = [learner.update(batch)["kl"] for _ in range(8)]
    assert measured[-1] < measured[0] / 2


def test_the_reference_pass_leaves_the_trained_adapter_active(load, batch):
    policy = load()
    update(policy, batch, kl=0.5)
    assert policy.model.active_adapter == "planner"
    assert all(p.requires_grad for p in policy.parameters("planner").values())


# --------------------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_good_trajectory_becomes_more_likely_and_a_bad_one_less(load, batch, advantage):
    policy, t = load(), batch[0]
    t.advantage = advantage

    def likelihood():
        with torch.no_grad():
            return policy.score("planner", [t.token_ids], [t.mask], 0.9)[0].sum().item()

    before = likelihood()
    update(policy, [t], lr=1e-4)
    assert (likelihood() - before) * advantage > 0.01


@pytest.mark.parametrize(
    "kind, kl", [("flat", 0.0), ("dropped", 0.0), ("masked", 0.0), ("empty", 0.0), ("dropped", 0.5)]
)
def test_a_batch_without_a_signal_takes_no_step_but_counts(load, batch, kind, kl):
    for t in batch:
        t.advantage = 0.0 if kind == "flat" else t.advantage
        t.copies = 0 if kind == "dropped" else t.copies
        t.mask = [0] * len(t.mask) if kind == "masked" else t.mask
    policy = load()
    before = weights(policy)
    learner = Learner(policy, "planner", Objective(kl=kl))
    metrics = learner.update([] if kind == "empty" else batch)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy), before, strict=True))
    assert learner.version == 1 and metrics["trained"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_one_roles_update_leaves_the_other_adapter_alone_to_the_bit(load, batch):
    policy = load()
    planner, executor = (Learner(policy, role, Objective()) for role in ("planner", "executor"))
    before = weights(policy, "executor")
    planner.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy, "executor"), before, strict=True))
    mine = weights(policy, "planner")
    executor.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy, "planner"), mine, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(policy, "executor"), before, strict=True))


def test_long_gradients_are_shortened_and_the_learning_rate_can_be_given(load, batch):
    policy = load()
    before = weights(policy)
    learner = Learner(policy, "planner", Objective(max_grad_norm=0.01), 0.9)
    metrics = learner.update(batch, lr=0.0)
    norm = torch.stack([p.grad.norm() for p in learner.parameters]).norm()
    assert metrics["grad_norm"] > 0.01 and norm == pytest.approx(0.01, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy), before, strict=True))


def test_a_gradient_that_is_not_finite_is_an_error_before_any_step(load, batch):
    policy = load()
    before = weights(policy)
    batch[0].logprobs = [float("nan")] * len(batch[0].logprobs)
    learner = Learner(policy, "planner", Objective())
    with pytest.raises(FloatingPointError, match="the planner's loss is not finite in update 1"):
        learner.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(weights(policy), before, strict=True)) and learner.version == 0


def test_what_an_update_measures_by_hand(load, batch):
    _, metrics = update(load(), batch)
    used = [t for t in batch if t.copies and t.advantage]
    assert metrics["trained"] == len(used) == 6 and metrics["lr"] == Objective().lr
    assert metrics["trained_tokens"] == sum(len(t.token_ids) for t in used)
    kept = [t for t in batch if t.copies]
    loss = -sum(t.copies * t.advantage * t.sampled for t in kept) / sum(t.copies * t.sampled for t in kept)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-4)
    assert abs(metrics["approx_kl_k1"]) < 1e-6
    assert set(metrics) | {"kl"} == set(LEARNED)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_training_at_temperature_zero_or_below_is_refused(load, temperature):
    with pytest.raises(ValueError, match="temperature above 0"):
        Learner(load(), "planner", Objective(), temperature)


def test_micro_batches_hold_every_row_once_and_stay_within_their_size(load, batch):
    rows = sorted(batch, key=lambda t: len(t.token_ids))
    pieces = Learner(load(), "planner", Objective(tokens=300))._micro_batches(rows)
    assert [t for piece in pieces for t in piece] == rows and len(pieces) > 1
    assert all(len(piece) == 1 or len(piece) * len(piece[-1].token_ids) <= 300 for piece in pieces)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_two_updates_equal_one_plus_save_plus_load_plus_one_to_the_bit(load, batch, tmp_path):
    straight, first, second = load(), load(), load()
    learner = Learner(straight, "planner", Objective(), 0.9)
    learner.update(batch)
    learner.update(batch)
    before = Learner(first, "planner", Objective(), 0.9)
    before.update(batch)
    before.save(tmp_path)
    after = Learner(second, "planner", Objective(), 0.9)
    after.load(tmp_path)
    assert after.version == 1
    after.update(batch)
    assert after.version == 2
    assert all(torch.equal(a, b) for a, b in zip(weights(second), weights(straight), strict=True))


@pytest.mark.parametrize("room", [0, 3000, 60_000])
def test_a_disk_that_fills_up_while_a_checkpoint_is_written_is_an_os_error(load, batch, tmp_path, room):
    """Then the commands say so in one sentence; what is written is not published."""
    resource = pytest.importorskip("resource")
    learner = Learner(load(), "planner", Objective(), 0.9)
    learner.update(batch[:2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # no file may grow beyond it
    try:
        with pytest.raises(OSError):
            log.publish_folder(tmp_path / "checkpoint", learner.save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "checkpoint").exists()
    log.publish_folder(tmp_path / "checkpoint", learner.save)
    learner.load(tmp_path / "checkpoint")


def test_a_damaged_checkpoint_is_refused_with_a_sentence(load, batch, tmp_path):
    learner = Learner(load(), "planner", Objective(), 0.9)
    learner.update(batch[:2])
    learner.save(tmp_path)
    for name in ("optimizer.pt", "learner.json", "adapter_model.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for damaged in (None, b"", whole[: len(whole) // 2], bytes(range(256))):
            (tmp_path / name).unlink()
            if damaged is not None:
                (tmp_path / name).write_bytes(damaged)
            with pytest.raises(ModelError, match=r"damaged|cannot read the adapter"):
                learner.load(tmp_path)
            (tmp_path / name).write_bytes(whole)
    learner.load(tmp_path)
