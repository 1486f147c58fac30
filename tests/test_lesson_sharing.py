"""Lesson 09: roles as options, rewards, groups and gradients against hand-made cases, then the acceptance bounds."""

import numpy as np
import pytest
import torch

from minimgrpo.lessons import _sharing_workflows, sharing
from minimgrpo.lessons.sharing import COPIES, OTHER, ROLES, World


@pytest.fixture(scope="module")
def world():
    return World.random([0, 1, 2, 3], train=16, test=40)


def base(world, kind):
    return {role: world.base for role in ROLES[kind]}


def rollout(world, kind, G=8, seed=0):
    return sharing.rollout(kind, base(world, kind), world, "train", G, np.random.default_rng(seed))


def test_a_role_is_what_it_may_say():
    W = np.log(np.array([[[1.0], [2.0], [3.0], [4.0]]]))  # one world, one feature: weights 1, 2, 3, 4
    options = np.array([[[[0, 1, 1, 0], [2, 1, 0, 0]]]], dtype=float)
    p = sharing.policy(W, np.ones((1, 1, 1)), options)
    assert p[0, 0, 0].tolist() == pytest.approx([0, 0.4, 0.6, 0])
    assert p[0, 0, 1].tolist() == pytest.approx([0.5, 0.5, 0, 0])  # offered twice, weight 1; once, weight 2


def test_voting(world):
    steps, outcome = rollout(world, "voting")
    assert [(s.role, s.slot) for s in steps] == [("generator", j) for j in range(COPIES)] + [("aggregator", 0)]
    votes, final = np.stack([s.act for s in steps[:3]]), steps[3].act
    assert (votes == final).any(0).all() and (votes < OTHER).all()
    assert (outcome == (final == world.gold["train"][..., None])).all() and (steps[3].own == outcome).all()
    assert not (votes[0] == votes[1]).all()  # each draws its own


def test_an_evaluator_sends_back_and_the_refined_answer_differs(world):
    (first, verdict, second), outcome = rollout(world, "eval-opt")[0], rollout(world, "eval-opt")[1]
    gold, rejected = world.gold["train"][..., None], verdict.act == OTHER
    assert rejected.any() and not rejected.all()
    assert (verdict.act[~rejected] == first.act[~rejected]).all()
    assert (second.live == rejected).all() and (second.act != first.act)[rejected].all()
    assert (outcome == (np.where(rejected, second.act, first.act) == gold)).all()
    assert (
        verdict.own == ((first.act == gold) != rejected)
    ).all()  # right to accept a right one, to reject a wrong one


def test_an_orchestrator_that_answers_leaves_nobody_else_a_turn(world):
    steps, outcome = rollout(world, "orch-workers")
    delegated = steps[0].act == OTHER
    assert delegated.any() and not delegated.all()
    assert all((s.live == delegated).all() for s in steps[1:])
    final = np.where(delegated, steps[-1].act, steps[0].act)
    assert (outcome == (final == world.gold["train"][..., None])).all() and (steps[0].own == outcome).all()
    assert not (steps[1].x == steps[2].x).all()  # workers see different parts


def test_advantages_by_hand(world):
    steps, outcome = rollout(world, "voting")
    shared = sharing.advantages(steps, outcome)
    alone = sharing.advantages(steps, outcome, "per agent")

    def z(r):
        return (r - r.mean()) / r.std() if r.std() else r * 0

    for s, a, b in zip(steps, shared, alone, strict=True):
        assert a[1, 5] == pytest.approx(z(outcome[1, 5]), abs=1e-6) and b[1, 5] == pytest.approx(
            z(s.own[1, 5]), abs=1e-6
        )
    wrong = [(a > 0) & (s.own == 0) for s, a in zip(steps[:3], shared[:3], strict=True)]
    assert np.any(wrong) and not np.any([(b > 0) & (s.own == 0) for s, b in zip(steps, alone, strict=True)])


def test_one_group_for_a_role_changes_nothing_under_broadcast_and_something_per_agent(world):
    steps, outcome = rollout(world, "orch-workers")
    for reward, same in (("broadcast", True), ("per agent", False)):
        A, B = (sharing.advantages(steps, outcome, reward, group) for group in ("slot", "role"))
        assert np.allclose(A[1:4], B[1:4], atol=1e-6) == same
    live = steps[1].live > 0
    assert not any(a[~live].any() for a in A[1:])  # who had no turn has no advantage


def test_gradients_are_those_of_autograd(world):
    steps, outcome = rollout(world, "eval-opt")
    W = torch.tensor(world.base * 1.3, requires_grad=True)
    for step, A in zip(steps, sharing.advantages(steps, outcome), strict=True):
        step.probs = sharing.policy(W.detach().numpy(), step.x, step.options)
        options = torch.tensor(step.options)
        logits = torch.einsum("evf,epf->epv", W, torch.tensor(step.x))[:, :, None] + options.log()
        log = logits.log_softmax(-1)
        chosen = log.gather(-1, torch.tensor(step.act)[..., None])[..., 0]
        loss = (chosen * torch.tensor(A * step.live)).mean((1, 2)).sum()
        assert sharing.gradient(step, A) == pytest.approx(torch.autograd.grad(loss, W, retain_graph=True)[0].numpy())
        at_base = torch.tensor(sharing.policy(world.base, step.x, step.options)).clamp(min=1e-300).log()
        kl = torch.where(options > 0, log.exp() * (log.clamp(min=-1e3) - at_base), 0.0).sum(-1)
        kl = (kl * torch.tensor(step.live)).mean((1, 2)).sum()
        assert sharing.kl_gradient(step, world.base) == pytest.approx(torch.autograd.grad(kl, W)[0].numpy(), abs=1e-12)


def test_shared_is_the_sum_of_the_roles_gradients_and_isolated_is_each_its_own(world, monkeypatch):
    trained = {}
    for mode in ("SP", "IP"):
        monkeypatch.setattr(sharing, "diagnostics", lambda kind, W, world, mode=mode: trained.update({mode: W}) or {})
        sharing.train(world, "voting", mode, steps=1, lr=0.5)
    steps, outcome = rollout(world, "voting")
    parts = [sharing.gradient(s, a) for s, a in zip(steps, sharing.advantages(steps, outcome), strict=True)]
    moved = {mode: {role: w - world.base for role, w in W.items()} for mode, W in trained.items()}
    assert moved["IP"]["generator"] == pytest.approx(0.5 * sum(parts[:3])) and abs(parts[0]).max() > 0
    assert moved["IP"]["aggregator"] == pytest.approx(0.5 * parts[3])
    assert moved["SP"]["aggregator"] == pytest.approx(0.5 * sum(parts))
    assert trained["SP"]["generator"] is trained["SP"]["aggregator"]


def test_an_anchor_holds_its_role_near_the_base_and_no_other(world, monkeypatch):
    trained = {}
    for name, kl in (("free", None), ("held", {"generator": 1.0})):
        monkeypatch.setattr(sharing, "diagnostics", lambda kind, W, world, name=name: trained.update({name: W}) or {})
        sharing.train(world, "voting", steps=10, lr=0.2, kl=kl)
    gone = {name: {role: sharing.norm(w - world.base) for role, w in W.items()} for name, W in trained.items()}
    assert (gone["held"]["generator"] < 0.8 * gone["free"]["generator"]).all()
    assert (gone["held"]["aggregator"] > 0.8 * gone["free"]["aggregator"]).all()


def test_coherence_shortens_and_mean_divides(world):
    options = {"steps": 5, "lr": 0.0}
    plain, coherent, mean = (
        sharing.train(world, "voting", **options, **changed) for changed in ({}, {"coherence": 0.3}, {"reduce": "mean"})
    )
    assert plain["norm generator"] == pytest.approx(3 * mean["norm generator"])
    assert (coherent["norm generator"] < plain["norm generator"]).all()


def test_the_acceptance_bounds_on_few_seeds():
    world = World.random(list(range(4)))
    broadcast, per_agent = (sharing.train(world, "voting", reward=r, steps=25) for r in ("broadcast", "per agent"))
    assert 0.1 <= broadcast["wrong votes reinforced"].mean() <= 0.35
    assert per_agent["wrong votes reinforced"].max() == 0
    assert (per_agent["accuracy generator"] > broadcast["accuracy generator"]).sum() >= 3


def test_coherence_shortens_what_agrees_with_the_mean_of_before(world, monkeypatch):
    """The aggregator's gradients are U times these; the mean moves by 1/32 of each, so one small -0.1 turns nothing."""
    E = len(world.base)
    U, sizes = np.ones_like(world.base), iter([1.0, 1.0, 1.0, -0.1, 1.0])
    monkeypatch.setattr(sharing, "gradient", lambda step, A: U * (next(sizes) if step.role == "aggregator" else 0.0))
    ends = []
    monkeypatch.setattr(sharing, "diagnostics", lambda kind, W, world: ends.append(W) or {})
    sharing.train(world, "voting", steps=5, lr=1.0, coherence=0.3)
    moved = ends[0]["aggregator"] - world.base
    assert moved == pytest.approx(np.full(moved.shape, 1 + 0.7 + 0.7 - 0.1 + 0.7)) and len(moved) == E
    assert (ends[0]["generator"] == world.base).all()


def test_an_anchor_holds_its_own_role_only(world, monkeypatch):
    monkeypatch.setattr(sharing, "gradient", lambda step, A: np.zeros_like(world.base))
    monkeypatch.setattr(sharing, "kl_gradient", lambda step, base: np.ones_like(base))
    ends = []
    monkeypatch.setattr(sharing, "diagnostics", lambda kind, W, world: ends.append(W) or {})
    sharing.train(world, "voting", steps=1, lr=0.5, kl={"generator": 0.2})
    assert np.allclose(ends[0]["generator"] - world.base, -0.5 * 0.2 * 3)  # three copies
    assert (ends[0]["aggregator"] == world.base).all()


def test_contested_votes_by_hand(world, monkeypatch):
    """Rollouts with one right vote, three, none, two; the aggregator is right in the second and the last."""
    own = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]]).T[:, None, None].astype(float)
    chosen = np.array([[[0.0, 1.0, 0.0, 1.0]]])
    one, probs = np.ones((1, 1, 4)), np.full((1, 1, 4, 7), 1 / 7)
    steps = [sharing.RoleStep("generator", j, None, None, probs, None, own[j], one) for j in range(3)]
    steps.append(sharing.RoleStep("aggregator", 0, None, None, probs, None, chosen, one))
    monkeypatch.setattr(_sharing_workflows, "rollout", lambda *_: (steps, chosen))
    found = sharing.diagnostics("voting", {}, world)
    assert found["contested recovery"] == pytest.approx([0.5]) and found["team"] == pytest.approx([0.5])
    assert found["accuracy generator"] == pytest.approx([0.5]) and found["entropy aggregator"] == pytest.approx(
        np.log(7)
    )


@pytest.mark.lesson
def test_claims():
    shown, no, other = "shown", "not shown", "reversed"
    found = {c.claim: c.verdict for c in sharing.claims()}
    assert list(found.values()) == [shown, no, shown, shown, no, no, no, no, other, other, other, other, no], found
