"""Consensus ADMM: agents that keep their data to themselves learn one policy, and agree on it by a ring all-reduce.

Source: only an abstract was found (role-local training in S-MAS and H-MAS, a compromised agent). Everything below it is
derived from Boyd et al. 2011 and, for the inexact local step, from DiNNO (arXiv 2109.08665).

    problem     min sum_k f_k(theta_k)  so that  theta_k = z for all k
    1 local     theta_k <- a few gradient steps on f_k(theta) + rho/2 |theta - z + u_k|^2
    2 consensus z <- mean_k(theta_k + u_k): a ring all-reduce of 2 (K - 1) steps; an agent sends 2 (K - 1) / K d numbers
    3 dual      u_k <- u_k + theta_k - z
    residuals   primal sqrt(sum_k |theta_k - z|^2), dual rho sqrt(K) |z - z_before|: both go to 0

FedAvg is the same without u: theta_k starts at z, takes its steps on f_k alone, and is averaged.

Our choices. A policy is a logistic regression that refuses or answers a request; each of the four roles sees harm of
one kind only. So f_k is convex and the centralized optimum is exact (Newton). S-MAS is a chain in which every role may
refuse. H-MAS answers unless two of its three analyzers or its synthesizer refuse. A compromised agent (the solver, the
synthesizer) never refuses. A pair of LoRA factors stands for the case that is not convex.

What this is not. Only data stays local: z is one policy shared by all, so nothing specializes. The abstract's numbers
(HarmBench attack success down by up to 26.4 points with Qwen3-8B) could not be checked. Its compromise happens after
training: nothing in ADMM stops an agent that lies in the all-reduce, which is measured here too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minimgrpo.lessons import Claim, compare, show
from minimgrpo.lessons._consensus_tasks import (
    attack_success,
    centralized,
    hmas,
    logistic_grad,
    lora_data,
    lora_grad,
    lora_loss,
    objective,
    requests,
    smas,
)


def ring_allreduce(vectors: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """Every agent's copy of the sum of K vectors [..., d], and how many numbers each agent sent to its neighbour.

    >>> sums, sent = ring_allreduce([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    >>> [s.tolist() for s in sums], sent
    ([[11.0, 22.0], [11.0, 22.0]], [2, 2])
    """
    K = len(vectors)
    chunks = [np.array_split(v.copy(), K, axis=-1) for v in vectors]  # chunks[agent][chunk]
    sent = [0] * K
    for step in range(2 * (K - 1)):
        messages = [chunks[k][(k - step) % K].copy() for k in range(K)]  # all send at once, to the next on the ring
        for k, message in enumerate(messages):
            mine, c = chunks[(k + 1) % K], (k - step) % K
            mine[c] = mine[c] + message if step < K - 1 else message  # sums travel round first, then what they became
            sent[k] += message.size
    return [np.concatenate(own, axis=-1) for own in chunks], sent


def ring_process(vector: torch.Tensor) -> torch.Tensor:
    """The same ring between processes: this process's copy of the sum [d], by send and receive of torch.distributed."""
    K, k = dist.get_world_size(), dist.get_rank()
    chunks = list(vector.tensor_split(K))
    for step in range(2 * (K - 1)):
        c = (k - 1 - step) % K  # what the agent before me sends
        message = torch.empty_like(chunks[c])
        sending = dist.isend(chunks[(k - step) % K].contiguous(), (k + 1) % K)
        dist.recv(message, (k - 1) % K)
        sending.wait()
        chunks[c] = chunks[c] + message if step < K - 1 else message
    return torch.cat(chunks)


def local_steps(grad: Callable, theta: np.ndarray, pull: np.ndarray, rho: float, steps: int, lr: float) -> np.ndarray:
    """Gradient steps on f(theta) + rho/2 |theta - pull|^2, where pull is z - u."""
    for _ in range(steps):
        theta = theta - lr * (grad(theta) + rho * (theta - pull))
    return theta


def admm(
    grads: Sequence[Callable],
    theta0: np.ndarray,
    rounds: int,
    steps: int = 20,
    lr: float = 0.2,
    rho: float = 0.1,
    lie: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Consensus ADMM from theta0 [..., d]; leading dimensions are independent problems (seeds).

    grads: one function per agent, theta [..., d] -> gradient [..., d] of its own f_k.
    lie: what agent 0 puts into every all-reduce instead of theta_0 + u_0.
    Returns z [rounds, ..., d], theta [K, ..., d], and the primal and dual residuals [rounds, ...].
    """
    K = len(grads)
    theta, u, z = [theta0] * K, [np.zeros_like(theta0)] * K, theta0
    history = {"z": [], "primal": [], "dual": []}
    for _ in range(rounds):
        theta = [local_steps(grads[k], theta[k], z - u[k], rho, steps, lr) for k in range(K)]
        offers = [theta[k] + u[k] for k in range(K)]
        if lie is not None:
            offers[0] = np.broadcast_to(lie, theta0.shape)
        before, z = z, ring_allreduce(offers)[0][0] / K
        u = [u[k] + theta[k] - z for k in range(K)]
        history["z"].append(z)
        history["primal"].append(np.sqrt(sum(((t - z) ** 2).sum(-1) for t in theta)))
        history["dual"].append(rho * K**0.5 * np.sqrt(((z - before) ** 2).sum(-1)))
    return {name: np.array(values) for name, values in history.items()} | {"theta": np.array(theta)}


def fedavg(grads: Sequence[Callable], theta0: np.ndarray, rounds: int, steps: int = 20, lr: float = 0.2) -> np.ndarray:
    """z after each round [rounds, ..., d]: everyone starts at z, takes its own steps, and z is their mean."""
    z, history = theta0, []
    for _ in range(rounds):
        z = ring_allreduce([local_steps(grad, z, z, 0.0, steps, lr) for grad in grads])[0][0] / len(grads)
        history.append(z)
    return np.array(history)


def _process(rank: int, grads: list[Callable], theta0: np.ndarray, rounds: int, folder: str, options: dict) -> None:
    """One agent of ``admm_processes``: it calls its own gradient only, and hears of the others by the ring."""
    torch.set_num_threads(1)
    K = len(grads)
    dist.init_process_group("gloo", init_method=Path(folder, "meet").as_uri(), rank=rank, world_size=K)
    theta, u, z = theta0, np.zeros_like(theta0), theta0
    for _ in range(rounds):
        theta = local_steps(grads[rank], theta, z - u, **options)
        z = ring_process(torch.from_numpy(theta + u)).numpy() / K
        u = u + theta - z
    np.save(Path(folder, f"z{rank}.npy"), z)
    dist.destroy_process_group()


def admm_processes(
    grads: list[Callable], theta0: np.ndarray, rounds: int, steps: int = 20, lr: float = 0.2, rho: float = 0.1
) -> list[np.ndarray]:
    """ADMM for one problem, theta0 [d], with one process per agent over gloo -> every process's last z."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"steps": steps, "lr": lr, "rho": rho}
        mp.spawn(_process, (grads, theta0, rounds, folder, options), nprocs=len(grads))
        return [np.load(Path(folder, f"z{k}.npy")) for k in range(len(grads))]


def train(X: np.ndarray, y: np.ndarray, rounds: int) -> dict[str, np.ndarray]:
    """The policies of the arms, [K, S, d]: one per role. In "lying" the solver asks the others to refuse nothing."""
    S, K, _, d = X.shape
    grads, start = [partial(logistic_grad, X=X[:, k], y=y[:, k]) for k in range(K)], np.zeros((S, d))
    never = np.append(np.zeros(d - 1), -50.0)  # only the constant feature counts, against refusing
    shared = {
        "centralized": centralized(X, y),
        "ADMM": admm(grads, start, rounds)["z"][-1],
        "FedAvg": fedavg(grads, start, rounds)[-1],
        "lying": admm(grads, start, rounds, lie=never)["z"][-1],
    }
    local = np.array([centralized(X[:, k : k + 1], y[:, k : k + 1]) for k in range(K)])
    return {name: np.array([z] * K) for name, z in shared.items()} | {"local": local}


def claims(quick: bool = False) -> list[Claim]:
    """Each on 3 (quick) or 5 seeds: data is drawn anew, 100 or 200 requests of each sort per role; 80 rounds."""
    seeds, n, rounds, rank = (3, 100, 80, 2) if quick else (5, 200, 80, 2)
    (X, y), (new_X, new_y) = requests(seeds, n), requests(seeds, 500, seed=1)
    policies = train(X, y, rounds)
    best = objective(policies["centralized"][0], X, y)
    gap = {name: objective(policies[name][0], X, y) - best for name in ("ADMM", "FedAvg", "lying")}

    def asr(arm: str, system: Callable = smas, compromised: bool = True) -> np.ndarray:
        return attack_success(policies[arm], new_X, new_y, system, compromised)[0]

    def percent(*how) -> str:
        return f"{show(asr(*how), '.1f')} %"

    vectors = list(np.random.default_rng(2).normal(size=(4, 1000)))
    sums, sent = ring_allreduce(vectors)
    error = max(abs(s - sum(vectors)).max() for s in sums)

    data, Y, start = lora_data(seeds)
    loras = [partial(lora_grad, X=data[:, k], Y=Y[:, k], rank=rank) for k in range(2)]
    both, every = data.reshape(seeds, -1, data.shape[-1]), Y.reshape(seeds, -1, Y.shape[-1])
    options = {"lr": 0.05, "rho": 0.3}
    agreed = admm(loras, start, 150, **options)
    alone = [local_steps(grad, start, start, 0.0, 3000, 0.05) for grad in loras]
    lora = {
        "ADMM": lora_loss(agreed["z"][-1], both, every, rank),
        "alone": np.mean([lora_loss(theta, both, every, rank) for theta in alone], axis=0),
        "averaged once": lora_loss(sum(alone) / 2, both, every, rank),
    }
    one = [partial(lora_grad, X=data[0, k], Y=Y[0, k], rank=rank) for k in range(2)]
    together = admm(one, start[0], 10, **options)["z"][-1]
    apart = max(abs(z - together).max() for z in admm_processes(one, start[0], 10, **options))
    traffic = 2 * 3 * 1000 // 4
    return [
        Claim(
            "the ring gives every agent the sum for 2 (K - 1) / K d numbers sent",
            f"K = 4, d = 1000: largest error {error:.0e}, {max(sent)} numbers sent, theory {traffic}",
            "shown" if error < 1e-12 and sent == [traffic] * 4 else "reversed",
        ),
        Claim(
            "over two processes (gloo) it trains the same adapter as in one",
            f"largest difference of z after 10 rounds {apart:.0e}",
            "shown" if apart < 1e-12 else "reversed",
        ),
        compare(
            "ADMM reaches the centralized optimum (within 1e-5), with the data left where it is",
            f"objective above it {show(gap['ADMM'], '.0e')} after {rounds} rounds",
            1e-5 - gap["ADMM"],
        ),
        compare(
            "so does averaging without the dual step (FedAvg)",
            f"objective above it {show(gap['FedAvg'], '.3f')}",
            1e-5 - gap["FedAvg"],
        ),
        compare(
            "S-MAS with its solver compromised: consensus answers at least 10 points less harm than local training",
            f"{percent('ADMM')} against {percent('local')}; centralized {percent('centralized')}",
            asr("local") - asr("ADMM"),
            10,
        ),
        compare(
            "H-MAS with its synthesizer compromised: the same",
            f"{percent('ADMM', hmas)} against {percent('local', hmas)}",
            asr("local", hmas) - asr("ADMM", hmas),
            10,
        ),
        compare(
            "with nobody compromised S-MAS answers no more harm after consensus than after local training",
            f"{percent('ADMM', smas, False)} against {percent('local', smas, False)}",
            asr("local", smas, False) - asr("ADMM", smas, False),
        ),
        compare(
            "consensus also protects from an agent that lies in the all-reduce (less harm than local training)",
            f"{percent('lying')} harm answered, {percent('local')} after local training",
            asr("local") - asr("lying"),
        ),
        compare(
            "two LoRA adapters agree on one that fits both agents' data better than averaging them once",
            f"loss {show(lora['ADMM'], '.0e')}, averaged once {show(lora['averaged once'], '.3f')}, "
            f"alone {show(lora['alone'], '.3f')}",
            np.log(lora["averaged once"] / lora["ADMM"]),  # losses of many orders of magnitude
        ),
    ]
