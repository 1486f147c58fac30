"""Credits against enumeration and by hand, MA-GRPO against its definition; chains and votes against closed forms."""

from itertools import permutations
from math import comb

import numpy as np
import pytest
import torch

from minimgrpo.credit import shapley_mc
from minimgrpo.lessons import credit, patterns


def shapley_by_orders(values):
    """All n! orders of arrival, for one game [2^n]: what the weights of ``shapley_exact`` stand for."""
    n = len(values).bit_length() - 1
    phi, orders = np.zeros(n), list(permutations(range(n)))
    for order in orders:
        S = 0
        for i in order:
            phi[i] += (values[S | 1 << i] - values[S]) / len(orders)
            S |= 1 << i
    return phi


def test_shapley_is_the_mean_over_all_orders_and_sums_to_the_gain():
    games = np.random.default_rng(0).normal(size=(10, 16))
    phi = credit.shapley_exact(games)
    assert abs(phi - np.array([shapley_by_orders(v) for v in games])).max() < 1e-12
    assert abs(phi.sum(1) - (games[:, -1] - games[:, 0])).max() < 1e-12
    estimate = shapley_mc(games, 3000, np.random.default_rng(1))
    assert abs(estimate - phi).max() < 0.15 and abs(estimate.sum(1) - phi.sum(1)).max() < 1e-9


def test_credits_of_two_workers_out_of_three_by_hand():
    values = credit.coalition_values(np.array([[1, 1, 0]]))  # V(N) = 3/4, one alone 1/2
    assert credit.credit("team", values)[0].tolist() == [0.25, 0.25, 0.25]
    assert credit.credit("undivided", values)[0].tolist() == [0.75, 0.75, 0.75]
    assert credit.credit("difference", values)[0].tolist() == [0.25, 0.25, 0.0]
    assert credit.credit("Shapley", values)[0] == pytest.approx([0.375, 0.375, 0.0])


def test_a_group_mean_has_no_signal():
    works = np.random.default_rng(0).integers(0, 2, size=(1, 6, 4))
    values = credit.coalition_values(works)
    mean = credit.credit("group-mean Shapley", values)
    assert np.ptp(mean, axis=1).max() == 0
    assert np.allclose(mean[0, 0], credit.credit("Shapley", values)[0].mean(0))


def test_ma_grpo_by_hand():
    rewards = torch.tensor([[[0.0, 1.0], [10.0, 12.0]]])  # one seed, two questions, two rollouts: advantages -1, 1
    logprobs = torch.randn(1, 2, 2, 3)
    by_hand = -(logprobs[0, :, 1] - logprobs[0, :, 0]).sum() / 4
    assert credit.ma_grpo(rewards, logprobs).item() == pytest.approx(by_hand.item(), abs=1e-6)

    A = (rewards.flatten() - 5.75) / rewards.flatten().std(correction=0)  # as printed: over both questions
    flat = logprobs.flatten(1, 2)[0]
    loss = -(A * flat[:, 0]).mean()
    for rollout in flat:  # as printed: advantages, of rollouts, zipped with the workers of one rollout
        loss -= sum(a * worker for a, worker in zip(A, rollout[1:], strict=False))
    assert credit.ma_grpo_literal(rewards, logprobs).item() == pytest.approx(loss.item(), abs=1e-5)


def test_the_printed_step_trains_nobody_but_the_orchestrator():
    literal = credit.train_team(credit.ma_grpo_literal, steps=150)
    fixed = credit.train_team(credit.ma_grpo, steps=150)
    assert literal[:, 1:].mean() <= 1 / 3 + 0.1 and literal[:, 0].mean() > 0.6
    assert fixed.mean(0).min() >= 0.95


def test_an_attribution_that_paid_would_be_seen():
    gradient = credit.attribution_gradient(pays=0.2)
    assert gradient.min() > 5 * abs(credit.attribution_gradient().mean())


def test_free_riding():
    work = {kind: credit.train_effort(kind, seeds=3, steps=300) for kind in credit.CREDITS}
    workers = {kind: result[0].mean() for kind, result in work.items()}
    assert workers["team"] <= 1.5 and workers["Shapley"] >= 3.5 and workers["group-mean Shapley"] < 0.5
    assert abs(workers["difference"] - 3) <= 0.5
    assert work["Shapley"][1].max() < work["difference"][1].min() <= 0.575


def test_chains_by_hand():
    assert patterns.chain(2)[0] == pytest.approx(0.85 * 0.85 + 0.15 * 0.1) and patterns.chain(2)[1] == 2
    n, p, r = 6, 0.85, 0.1
    rest = r / (1 - p + r)
    assert patterns.chain(n)[0] == pytest.approx(rest + (p - r) ** n * (1 - rest))  # the closed form
    assert patterns.chain(4, repair=0)[0] == pytest.approx(0.85**4)
    success, calls = patterns.chain(1, detect=0.8, alarm=0.2)
    assert success == pytest.approx(0.85 * 0.8 + (0.85 * 0.2 + 0.15 * 0.8) * 0.85) and calls == pytest.approx(1.29)
    # two steps: the second follows a right one with that probability, and its redo counts as a call
    s, flagged = success, {"right": 0.85 * 0.2 + 0.15 * 0.8, "wrong": 0.1 * 0.2 + 0.9 * 0.8}
    assert patterns.chain(2, detect=0.8, alarm=0.2)[1] == pytest.approx(
        1.29 + 1 + s * flagged["right"] + (1 - s) * flagged["wrong"]
    )
    assert patterns.chain(5, detect=0.3, alarm=0.3)[0] == pytest.approx(patterns.chain(5)[0])
    assert patterns.chain(5, detect=0.8, alarm=0.2)[0] >= patterns.chain(5)[0] + 0.1


def test_votes():
    p = 0.65
    by_binomial = sum(comb(9, k) * p**k * (1 - p) ** (9 - k) for k in range(5, 10))
    assert patterns.vote(9, "independent")[0] == pytest.approx(by_binomial, abs=0.01)
    assert patterns.vote(9, "restate") == patterns.vote(9, "independent")
    herd, unanimous = patterns.vote(9, "herd")
    assert patterns.vote(15, "herd")[0] == pytest.approx(
        p**2 / (p**2 + (1 - p) ** 2), abs=0.01
    )  # who leads by two first
    assert herd <= by_binomial - 0.05 and unanimous > 0.1
    assert unanimous == pytest.approx((1 - p) ** 2, abs=0.01)  # the first two were wrong
    assert patterns.vote(9, "last advocate") == (herd, 0)  # it cannot turn a lead, and nobody is unanimous any more
    assert patterns.vote(9, "third advocate")[0] > herd + 0.01


@pytest.mark.lesson
def test_claims():
    found = [claim.verdict for claim in credit.claims()]
    shown, no, opposite = "shown", "not shown", "reversed"
    assert found == [no, shown, opposite, shown, shown, opposite, opposite, no, no]
    assert [claim.verdict for claim in patterns.claims()] == [shown, no, shown, no, shown, shown, no]
