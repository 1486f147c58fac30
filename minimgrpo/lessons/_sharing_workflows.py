"""The world of lesson 09 (``sharing``): tasks with six answers, softmax policies, and three workflows that play them.

The vocabulary is six answers and one more token; a policy is softmax(W x) over what a role may say:

    generator, worker        an answer (who refines: not the one that was rejected)
    aggregator, synthesizer  one of the candidates
    evaluator                the candidate, or OTHER ("incorrect")
    orchestrator             an answer (it solves the task itself, and the workers echo it) or OTHER ("delegate")

So a shared W knows its role by the options alone, as a language model does by the prompt. The base is 0.45 of the true
W, and noise. Workers see different parts of x (sub-tasks).

Arrays: E worlds at once (one per seed), P prompts, G rollouts of each, V tokens, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F, ANSWERS, COPIES = 24, 6, 3
OTHER = ANSWERS  # the token that is no answer
ROLES = {
    "voting": ("generator", "aggregator"),
    "eval-opt": ("generator", "evaluator"),
    "orch-workers": ("orchestrator", "worker", "synthesizer"),
}
SOLVERS = ("generator", "worker")


@dataclass(frozen=True)
class World:
    """E worlds: the base policy [E, V, F], what each worker sees [E, COPIES, F], prompts x [E, P, F], gold [E, P]."""

    base: np.ndarray
    views: np.ndarray
    x: dict[str, np.ndarray]
    gold: dict[str, np.ndarray]

    @classmethod
    def random(cls, seeds: list[int], train: int = 48, test: int = 200) -> World:
        rngs = [np.random.default_rng(seed) for seed in seeds]
        true = np.stack([rng.normal(0, 0.6, (ANSWERS, F)) for rng in rngs])
        base = np.stack([np.concatenate([rng.normal(0, 0.25, (ANSWERS, F)), np.zeros((1, F))]) for rng in rngs])
        base[:, :ANSWERS] += 0.45 * true
        base[:, OTHER, 0] = 2.0  # the base delegates about every second task, and calls many candidates incorrect
        views = np.stack([rng.random((COPIES, F)) < 0.7 for rng in rngs]).astype(float)
        views[..., 0] = 1.0
        x = {
            name: np.stack([rng.normal(size=(n, F)) for rng in rngs]) for name, n in (("train", train), ("test", test))
        }
        gold = {name: np.einsum("evf,epf->epv", true[..., 1:], some[..., 1:]).argmax(-1) for name, some in x.items()}
        for some in x.values():
            some[..., 0] = 1.0  # a constant: the bias
        return cls(base, views, x, gold)


@dataclass
class RoleStep:
    """One message of one role in G rollouts of every prompt. own: its own reward. live: 0 where it had no turn."""

    role: str
    slot: int
    x: np.ndarray  # [E, P, F]
    options: np.ndarray  # [E, P, G, V], how often each token is offered
    probs: np.ndarray  # [E, P, G, V]
    act: np.ndarray  # [E, P, G]
    own: np.ndarray  # [E, P, G]
    live: np.ndarray  # [E, P, G]


def policy(W: np.ndarray, x: np.ndarray, options: np.ndarray) -> np.ndarray:
    """Probabilities [E, P, G, V] of W [E, V, F] on prompts x [E, P, F] with ``options`` [E, P, G, V]."""
    logits = (x @ W.transpose(0, 2, 1))[:, :, None]
    weight = options * np.exp((logits - logits.max(-1, keepdims=True)).clip(-200))  # clipped: an offer is never 0
    return weight / weight.sum(-1, keepdims=True)


def rollout(kind: str, W: dict, world: World, split: str, G: int, rng) -> tuple[list[RoleStep], np.ndarray]:
    """G rollouts of every prompt with policies W (role -> [E, V, F]) -> the steps, the team's outcome [E, P, G]."""
    x, gold = world.x[split], world.gold[split][..., None]
    shape = (*x.shape[:2], G)
    steps: list[RoleStep] = []

    def say(role, slot, options, live=None, seen=x):
        options = np.broadcast_to(options, (*shape, OTHER + 1)).astype(float)
        probs = policy(W[role], seen, options)
        act = (probs.cumsum(-1) < rng.random((*shape, 1))).sum(-1).clip(max=OTHER)
        own = (act == gold).astype(float)
        steps.append(RoleStep(role, slot, seen, options, probs, act, own, np.ones(shape) if live is None else live))
        return act

    onehot = np.eye(OTHER + 1)
    answers = 1 - onehot[OTHER]
    if kind == "voting":
        votes = [say("generator", slot, answers) for slot in range(COPIES)]
        final = say("aggregator", 0, sum(onehot[v] for v in votes))
    elif kind == "eval-opt":
        first = say("generator", 0, answers)
        verdict = say("evaluator", 0, onehot[first] + onehot[OTHER])
        rejected = (verdict == OTHER).astype(float)
        steps[-1].own = ((first == gold) != (rejected > 0)).astype(float)
        second = say("generator", 1, answers - onehot[first], rejected)
        final = np.where(rejected > 0, second, first)
    else:
        said = say("orchestrator", 0, np.ones(OTHER + 1))
        delegated = (said == OTHER).astype(float)
        work = [say("worker", j, answers, delegated, x * world.views[:, j, None]) for j in range(COPIES)]
        final = np.where(delegated > 0, say("synthesizer", 0, sum(onehot[w] for w in work), delegated), said)
        steps[0].own = (final == gold).astype(float)
    return steps, (final == gold).astype(float)


def diagnostics(kind: str, W: dict, world: World, seed: int = 1) -> dict[str, np.ndarray]:
    """What policies W do on the test prompts, each [E]: accuracy and entropy of every role, the team's accuracy,
    contested recovery (candidates disagree, one is right: is it chosen?), how often the orchestrator answers itself."""
    steps, outcome = rollout(kind, W, world, "test", 8, np.random.default_rng(seed))

    def mean(values, where):
        return (values * where).sum((1, 2)) / np.maximum(where.sum((1, 2)), 1)

    found = {"team": outcome.mean((1, 2))}
    for role in ROLES[kind]:
        some = [step for step in steps if step.role == role]
        live = np.concatenate([s.live for s in some], -1)
        surprise = [-(s.probs * np.log(np.maximum(s.probs, 1e-300))).sum(-1) for s in some]
        found[f"accuracy {role}"] = mean(np.concatenate([s.own for s in some], -1), live)
        found[f"entropy {role}"] = mean(np.concatenate(surprise, -1), live)
    candidates = [s for s in steps if s.role in SOLVERS]
    if kind != "eval-opt":
        right = sum(s.own for s in candidates)
        found["contested recovery"] = mean(steps[-1].own, (right > 0) & (right < COPIES) & (steps[-1].live > 0))
    if kind == "orch-workers":
        found["pre-solved"] = 1 - candidates[0].live.mean((1, 2))
    return found


def peak_and_final(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[evaluations, 2, E] -> accuracy [E] on the second half: at the step that was best on the first, and at the end.

    >>> peak_and_final(np.array([[[0.1], [0.5]], [[0.9], [0.4]], [[0.2], [0.3]]]))
    (array([0.4]), array([0.3]))
    """
    best = curve[:, 0].argmax(0)
    return curve[best, 1, np.arange(curve.shape[-1])], curve[-1, 1]
