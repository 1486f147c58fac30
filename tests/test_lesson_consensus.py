"""The ring and ADMM against sums, least squares and closed forms; the lesson's measurements at their bounds."""

from functools import partial

import numpy as np
import pytest
import torch

from minimgrpo.lessons import consensus
from minimgrpo.lessons._consensus_tasks import L2
from minimgrpo.lessons.consensus import admm, fedavg, ring_allreduce


def quadratics(weights, centres):
    """f_k(theta) = w/2 (theta - c)^2."""
    return [lambda theta, w=w, c=c: w * (theta - c) for w, c in zip(weights, centres, strict=True)]


@pytest.mark.parametrize(("K", "d"), [(1, 5), (2, 8), (3, 7), (4, 1000), (5, 3)])
def test_ring_is_the_sum_and_its_traffic_the_formula(K, d):
    vectors = [np.random.default_rng(k).normal(size=(2, d)) for k in range(K)]
    before = [v.copy() for v in vectors]
    sums, sent = ring_allreduce(vectors)
    for own in sums:
        assert abs(own - sum(vectors)).max() < 1e-12
        assert np.array_equal(own, sums[0])  # not only close: the same
    assert sum(sent) == 2 * (K - 1) * 2 * d  # each of 2 (K - 1) steps moves every chunk once
    if d % K == 0:
        assert sent == [2 * 2 * (K - 1) * d // K] * K
    assert all(np.array_equal(v, b) for v, b in zip(vectors, before, strict=True))


def test_one_round_by_hand():
    """f = (theta - 0)^2/2 and (theta - 4)^2/2 from 0, one step of 0.5: theta 0 and 2, z 1, u -1 and 1."""
    result = admm(quadratics([1, 1], [0, 4]), np.zeros(1), rounds=1, steps=1, lr=0.5, rho=1.0)
    assert result["z"].tolist() == [[1.0]] and result["theta"].tolist() == [[0.0], [2.0]]
    assert result["primal"][0] == pytest.approx(2**0.5) and result["dual"][0] == pytest.approx(2**0.5)
    # second round: theta_0 <- 0 - 0.5 (0 + (0 - 1 - 1)) = 1, theta_1 <- 2 - 0.5 (-2 + (2 - 1 + 1)) = 2, z = 1.5
    assert admm(quadratics([1, 1], [0, 4]), np.zeros(1), 2, 1, 0.5, 1.0)["z"][-1].tolist() == [1.5]


def test_admm_is_least_squares_and_fedavg_is_its_own_closed_form():
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(3, 8, 4)), rng.normal(size=(3, 8))
    grads = [lambda theta, k=k: A[k].T @ (A[k] @ theta - b[k]) / 8 for k in range(3)]
    direct = np.linalg.lstsq(A.reshape(24, 4), b.reshape(24), rcond=None)[0]
    result = admm(grads, np.zeros(4), rounds=400)
    assert abs(result["z"][-1] - direct).max() < 1e-6
    assert result["primal"][-1] < 1e-5 > result["dual"][-1]

    w, c, E, lr = np.array([1.0, 4.0]), np.array([0.0, 1.0]), 20, 0.1
    moved = 1 - (1 - lr * w) ** E  # how far E steps go towards each centre
    z = fedavg(quadratics(w, c), np.zeros(1), 200, E, lr)[-1, 0]
    assert z == pytest.approx((moved * c).sum() / moved.sum()) and abs(z - 0.8) > 0.2  # the optimum is 4/5
    assert fedavg(quadratics(w, c), np.zeros(1), 500, 1, lr)[-1, 0] == pytest.approx(0.8)  # one step: no bias


def test_gradients_are_those_of_autograd():
    X, y = consensus.requests(1, 5)
    theta = torch.randn(13, dtype=torch.float64, requires_grad=True)
    Xt, yt = torch.tensor(X[0, 0]), torch.tensor(y[0, 0].copy())
    (torch.nn.functional.softplus(-yt * (Xt @ theta)).mean() + L2 / 2 * theta.square().sum()).backward()
    assert np.allclose(consensus.logistic_grad(theta.detach().numpy(), X[0, 0], y[0, 0]), theta.grad.numpy())

    X, Y, start = consensus.lora_data(2)
    A = torch.tensor(start[1, :12].reshape(2, 6), requires_grad=True)
    B = torch.tensor(start[1, 12:].reshape(5, 2), requires_grad=True)
    loss = 0.5 * (torch.tensor(X[1, 0]) @ (B @ A).T - torch.tensor(Y[1, 0])).square().sum(-1).mean()
    loss.backward()
    assert np.allclose(consensus.lora_loss(start, X[:, 0], Y[:, 0], 2)[1], loss.item())
    expected = torch.cat([A.grad.flatten(), B.grad.flatten()]).numpy()
    assert np.allclose(consensus.lora_grad(start, X[:, 0], Y[:, 0], 2)[1], expected)


def test_newton_is_at_the_minimum():
    X, y = consensus.requests(2, 50)
    theta = consensus.centralized(X, y)
    total = sum(consensus.logistic_grad(theta, X[:, k], y[:, k]) for k in range(4))
    assert abs(total).max() < 1e-9


def test_the_systems_by_hand():
    one = np.array([[[0], [0], [0], [1]], [[1], [1], [0], [0]], [[1], [0], [0], [0]]], dtype=bool)  # [S, role, request]
    assert consensus.smas(one, False)[:, 0].tolist() == [True, True, True]
    assert consensus.smas(one, True)[:, 0].tolist() == [True, True, False]  # only the solver would have refused
    assert consensus.hmas(one, False)[:, 0].tolist() == [True, True, False]
    assert consensus.hmas(one, True)[:, 0].tolist() == [False, True, False]


def test_measurements_reach_the_bounds():
    (X, y), (new_X, new_y) = consensus.requests(5, 100), consensus.requests(5, 300, seed=1)
    policies = consensus.train(X, y, rounds=80)
    best = consensus.objective(policies["centralized"][0], X, y)
    assert (consensus.objective(policies["ADMM"][0], X, y) - best).max() < 1e-5
    assert (consensus.objective(policies["FedAvg"][0], X, y) - best).min() > 1e-2

    def asr(arm, compromised=True):
        return consensus.attack_success(policies[arm], new_X, new_y, consensus.smas, compromised)[0].mean()

    assert abs(asr("ADMM") - asr("centralized")) < 1 and asr("ADMM") < asr("local") - 10
    assert asr("local", False) < asr("ADMM", False)  # specialists are better while nobody is compromised
    assert asr("lying") > asr("local") + 10


def test_two_adapters_agree():
    X, Y, start = consensus.lora_data(3)
    grads = [partial(consensus.lora_grad, X=X[:, k], Y=Y[:, k], rank=2) for k in range(2)]
    result = admm(grads, start, 100, lr=0.05, rho=0.3)
    assert result["primal"][-1].max() < 0.05
    assert consensus.lora_loss(result["z"][-1], X.reshape(3, -1, 6), Y.reshape(3, -1, 5), 2).max() < 1e-2


def test_two_processes_compute_what_one_does():
    X, Y, start = consensus.lora_data(1)
    grads = [partial(consensus.lora_grad, X=X[0, k], Y=Y[0, k], rank=2) for k in range(2)]
    options = {"rounds": 10, "lr": 0.05, "rho": 0.3}
    together = admm(grads, start[0], **options)["z"][-1]
    for z in consensus.admm_processes(grads, start[0], **options):
        assert abs(z - together).max() < 1e-12


def test_three_processes_with_uneven_chunks():
    """With two, every wrong index on the ring is right by luck. Four numbers in three chunks: two, one, one."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(3, 8, 4)), rng.integers(2, size=(3, 8)).astype(float)
    grads = [partial(consensus.logistic_grad, X=X[k], y=y[k]) for k in range(3)]
    together = admm(grads, np.zeros(4), 3)["z"][-1]
    assert abs(together).min() > 1e-3
    for z in consensus.admm_processes(grads, np.zeros(4), 3):
        assert abs(z - together).max() < 1e-12


@pytest.mark.lesson
def test_claims():
    found = [claim.verdict for claim in consensus.claims()]
    assert found == ["shown"] * 3 + ["reversed"] + ["shown"] * 2 + ["reversed"] * 2 + ["shown"]
