"""What the agents of lesson 13 (``consensus``) learn: to refuse harmful requests, and a linear map as a LoRA adapter.

Arrays: S seeds at once, K agents (or roles), n requests, d features. All data is drawn here; the constants are ours.
"""

from __future__ import annotations

import numpy as np

L2 = 0.01


def logistic_grad(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient [..., d] of mean log(1 + exp(-y x.theta)) + L2/2 |theta|^2; X [..., n, d], y [..., n] in {-1, 1}."""
    pull = -y / (1 + np.exp(np.minimum(y * (X @ theta[..., None])[..., 0], 50)))  # [..., n]
    return (pull[..., None, :] @ X)[..., 0, :] / X.shape[-2] + L2 * theta


def objective(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """sum_k f_k at one theta [S, d], for X [S, K, n, d] and y [S, K, n] -> [S]."""
    margin = y * (X @ theta[:, None, :, None])[..., 0]
    return np.logaddexp(0, -margin).mean(-1).sum(-1) + X.shape[1] * L2 / 2 * (theta**2).sum(-1)


def centralized(X: np.ndarray, y: np.ndarray, iterations: int = 25) -> np.ndarray:
    """The minimum of ``objective`` with all data in one place, by Newton's method -> [S, d]."""
    S, K, n, d = X.shape
    X, y, theta = X.reshape(S, K * n, d), y.reshape(S, K * n), np.zeros((S, d))
    for _ in range(iterations):
        p = 1 / (1 + np.exp(np.minimum(y * (X @ theta[..., None])[..., 0], 50)))
        hessian = np.swapaxes(X, 1, 2) @ (X * (p * (1 - p))[..., None]) / (K * n) + L2 * np.eye(d)
        theta = theta - np.linalg.solve(hessian, logistic_grad(theta, X, y)[..., None])[..., 0]
    return theta


def lora_factors(theta: np.ndarray, d: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """theta [..., rank (d + o)] holds A [rank, d] and then B [o, rank], both flattened."""
    A, B = np.split(theta, [rank * d], axis=-1)
    return A.reshape(*A.shape[:-1], rank, d), B.reshape(*B.shape[:-1], -1, rank)


def lora_grad(theta: np.ndarray, X: np.ndarray, Y: np.ndarray, rank: int) -> np.ndarray:
    """Gradient [..., rank (d + o)] of ``lora_loss``."""
    A, B = lora_factors(theta, X.shape[-1], rank)
    G = np.swapaxes(X @ np.swapaxes(B @ A, -1, -2) - Y, -1, -2) @ X / X.shape[-2]  # [..., o, d]
    parts = np.swapaxes(B, -1, -2) @ G, G @ np.swapaxes(A, -1, -2)
    return np.concatenate([part.reshape(*theta.shape[:-1], -1) for part in parts], axis=-1)


def lora_loss(theta: np.ndarray, X: np.ndarray, Y: np.ndarray, rank: int) -> np.ndarray:
    """1/2 mean |B A x - y|^2 [...], for X [..., n, d] and Y [..., n, o]."""
    A, B = lora_factors(theta, X.shape[-1], rank)
    return 0.5 * ((X @ np.swapaxes(B @ A, -1, -2) - Y) ** 2).sum(-1).mean(-1)


def requests(seeds: int, n: int, K: int = 4, d: int = 12, strength: float = 6.0, seed: int = 0) -> tuple:
    """For each seed and role k, n harmless requests and n with harm of kind k -> X [S, K, 2n, d + 1], y (1: refuse).

    Harm of kind k is a shift of ``strength`` along feature k, in unit noise; the last feature is 1.
    """
    X = np.random.default_rng(seed).normal(size=(seeds, K, 2 * n, d + 1))
    X[..., d] = 1.0
    for k in range(K):
        X[:, k, n:, k] += strength
    return X, np.broadcast_to(np.repeat([-1.0, 1.0], n), X.shape[:-1])


def lora_data(seeds: int, n: int = 40, d: int = 6, o: int = 5, rank: int = 2, seed: int = 0) -> tuple:
    """X [S, 2, n, d] and Y [S, 2, n, o] of a map of this rank; each agent sees half of the inputs. And a start."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(seeds, 2, n, d))
    X[:, 0, :, d // 2 :] = 0
    X[:, 1, :, : d // 2] = 0
    W = rng.normal(size=(seeds, o, rank)) @ rng.normal(size=(seeds, rank, d)) / rank**0.5
    start = 0.3 * rng.normal(size=(seeds, rank * (d + o)))
    return X, X @ np.swapaxes(W, -1, -2)[:, None], start


def smas(refusals: np.ndarray, compromised: bool) -> np.ndarray:
    """Solver -> verifier -> corrector -> decider, each may refuse: [S, 4, N] of bool -> which are refused [S, N]."""
    return refusals[:, 1:].any(1) if compromised else refusals.any(1)


def hmas(refusals: np.ndarray, compromised: bool) -> np.ndarray:
    """Three analyzers and a synthesizer (the last): refused if two analyzers or the synthesizer do."""
    analyzers = refusals[:, :3].sum(1) >= 2
    return analyzers if compromised else analyzers | refusals[:, 3]


def attack_success(theta: np.ndarray, X: np.ndarray, y: np.ndarray, system=smas, compromised=False) -> tuple:
    """Percent of harmful requests that are answered, and of harmless ones, per seed; theta [K, S, d], one per role."""
    X, y = X.reshape(len(X), -1, X.shape[-1]), y.reshape(len(y), -1)
    refusals = np.moveaxis((X @ theta[..., None])[..., 0] > 0, 0, 1)  # [S, K, N]
    refused, harmful = system(refusals, compromised), y > 0
    return tuple(100 * ((~refused & kind).sum(1) / kind.sum(1)) for kind in (harmful, ~harmful))
