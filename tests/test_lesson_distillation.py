"""MAS-OPD's advantages by hand, and its fixed points against closed forms."""

import numpy as np
import pytest
import torch

from minimgrpo.lessons import distillation
from minimgrpo.lessons.distillation import Teacher, Workflow, log_softmax


def test_advantages_by_hand():
    assert distillation.ras_advantage(-1.0, -3.0, -7.0, 0.0) == 2.0  # the teacher likes it more than the student does
    assert distillation.ras_advantage(-1.0, -3.0, -1.0, 5.0) == 2.0  # a token of no role: RAS adds nothing
    assert distillation.ras_advantage(-4.0, -3.0, -1.0, 0.5) == -2.5
    assert torch.equal(distillation.ras_advantage(*torch.tensor([[-1.0], [-3.0], [-2.0]]), 0.0), torch.tensor([2.0]))


def test_the_teacher_by_hand():
    """Two tokens, probabilities 1/4 and 3/4; the fact 1 multiplies the first token's odds by 9."""
    told = np.log([[1.0, 1.0], [9.0, 1.0]])
    teacher = Teacher(np.log([[[[1.0, 3.0], [1.0, 0.0001]], [[2.0, 2.0], [1.0, 1e-12]]]]), told)
    tokens, state = np.array([[[0, 1]]]), np.array([[0]])
    assert np.exp(teacher.logp(tokens, state, 0)).ravel() == pytest.approx([0.25, 0.75])
    assert np.exp(teacher.logp(tokens, state, 1)).ravel() == pytest.approx([0.5, 0.5])
    assert np.exp(teacher.logp(tokens, state, 0, np.array([[1]]))).ravel() == pytest.approx([0.75, 0.25])
    assert np.exp(teacher.logp(tokens, state, 0, np.array([[0]]))).ravel() == pytest.approx([0.25, 0.75])
    assert teacher.logp(tokens, np.array([[1]]), 1).ravel()[1] == distillation.FLOOR


def test_the_gradient_is_that_of_autograd_and_of_the_kl():
    rng = np.random.default_rng(0)
    logits, states, tokens = rng.normal(size=(1, 2, 3)), np.array([[0, 1, 1]]), np.array([[[0, 2], [1, 1], [2, 0]]])
    A = rng.normal(size=tokens.shape)
    theta = torch.tensor(logits, requires_grad=True)
    chosen = theta.log_softmax(-1)[0][torch.tensor(states[0])].gather(-1, torch.tensor(tokens[0]))
    (torch.tensor(A[0]) * chosen).mean().backward()
    assert np.allclose(distillation.score_mean(A, log_softmax(logits), states, tokens), theta.grad.numpy())

    # over all tokens in their own proportions, the OPD advantage gives minus the gradient of KL(student || teacher)
    student, teacher = torch.tensor(logits[0, 0], requires_grad=True), log_softmax(logits[0, 1])
    logp = student.log_softmax(-1)
    (logp.exp() * (logp - torch.tensor(teacher))).sum().backward()
    own = log_softmax(logits[:, :1])
    A = np.exp(own) * (teacher - own) * 3  # [1, 1, 3]: each token once, weighted by its probability
    by_score = distillation.score_mean(A, own, np.array([[0]]), np.array([[[0, 1, 2]]]))
    assert np.allclose(by_score[0, 0], -student.grad.numpy())


def test_closed_forms_by_hand():
    teacher = Teacher(np.log([[[[0.5, 0.25, 0.25]], [[0.25, 0.5, 0.25]]]]))
    pi = np.exp(distillation.guided(teacher, 1.0))[0, 0, 0]  # 1/4 / (1/4) : (1/16) / (1/2) : 1/4 = 8 : 1 : 2
    assert pi == pytest.approx(np.array([8, 1, 2]) / 11)
    assert np.exp(distillation.guided(teacher, 0.0))[0, 1, 0] == pytest.approx([0.25, 0.5, 0.25])


def test_what_guidance_does_to_shared_tokens():
    """It keeps their proportions, and their mass falls with slope -mass * KL: nothing of it is a matter of training."""
    teacher = Workflow.random([3]).draft
    logps = log_softmax(teacher.role_logits)
    shared = slice(2 * distillation.TOKENS, None)
    tilted = distillation.guided(teacher, 1.0)
    assert np.allclose(log_softmax(tilted[..., shared]), log_softmax(logps[..., shared]))
    difference = logps - logps[:, ::-1]
    kl = (np.exp(logps) * difference).sum(-1)
    mass = distillation.masses(logps)[2]
    on_shared = difference[..., -1]  # the same on all of them: how the two roles' normalisers differ
    slope = (distillation.masses(distillation.guided(teacher, 1e-6))[2] - mass) / 1e-6
    assert np.allclose(slope, mass * (on_shared - kl), atol=1e-5) and slope.mean() < -0.05
    # at the fixed point the RAS advantage is not 0 but log Z >= 0, the same for every token of a state
    A = distillation.ras_advantage(logps, tilted, logps[:, ::-1], 1.0)
    assert np.ptp(A, axis=-1).max() < 1e-12 and A.min() > 0.05


def test_drafts_and_exchange_against_sampling():
    workflow, rng = Workflow.random([1, 2]), np.random.default_rng(0)
    students = {"draft": workflow.draft.role_logits, "check": workflow.check.role_logits}
    (_, _, drafts, good), (_, seen, action, right) = workflow.play(students, 20_000, rng)
    expected = distillation.good_drafts(log_softmax(students["draft"]))
    assert abs(good.mean(-1) - expected).max() < 0.015
    assert abs((seen == good).mean() - distillation.CUE) < 0.01
    assert np.array_equal(right, (action[..., 0] == distillation.REVISE) != good.astype(bool))
    assert good[0, 0, 0] == (drafts[0, 0, 0] < 4).any() * (drafts[0, 0, 0] >= 8).any()
    assert good[0, 1, 0] == ((drafts[0, 1, 0] >= 4) & (drafts[0, 1, 0] < 8)).any() * (drafts[0, 1, 0] >= 8).any()
    swapped = {"draft": students["draft"][:, ::-1]}
    assert np.allclose(distillation.exchange_penalty(swapped), -distillation.exchange_penalty(students))
    assert (distillation.exchange_penalty(students) > 0.1).all()
    assert np.allclose(distillation.exchange_penalty(workflow.beginners()), 0)


def test_self_check_by_hand(monkeypatch):
    monkeypatch.setattr(distillation, "good_drafts", lambda logps: np.full(logps.shape[:2], 0.5))
    check = np.log(np.array([[0.3, 0.7], [0.6, 0.4]]))  # reads "wrong": revises .7; reads "good": keeps .6
    students = {"draft": np.zeros((1, 2, 3, 12)), "check": np.broadcast_to(check, (1, 2, 2, 2))}
    found = {name: value.item() for name, value in distillation.self_check(students, cue=0.8).items()}
    assert found["success"] == pytest.approx(0.5 * (0.8 * 0.7 + 0.2 * 0.4) + 0.5 * (0.8 * 0.6 + 0.2 * 0.3))
    assert found["over-revise"] == pytest.approx(0.5 * (0.8 * 0.4 + 0.2 * 0.7))
    assert found["success"] + found["over-revise"] + found["keep wrong"] == pytest.approx(1)
    assert found["Bayes"] == found["greedy"] == pytest.approx(0.8)
    odds = 19**0.6  # 0.95 : 0.05 to the power 0.8 - 0.2
    p = odds / (1 + odds)
    assert found["geometric"] == pytest.approx(0.8 * p + 0.2 * (1 - p))


def test_the_teacher_hears_of_completed_turns_only(monkeypatch):
    """Told of the draft while it scores the draft, it would reward what nobody could know yet."""
    heard = []
    ask = Teacher.logp
    monkeypatch.setattr(
        Teacher, "logp", lambda self, *args: heard.append((self.priv_logits is None, args[3])) or ask(self, *args)
    )
    workflow = Workflow.random([0])
    distillation.train(workflow.beginners(), workflow, pac=True, steps=1)
    assert [priv is None for _, priv in heard] == [is_draft for is_draft, _ in heard] == [True] * 4 + [False] * 4
    *_, (_, _, _, good) = workflow.play(workflow.beginners(), distillation.BATCH, np.random.default_rng(0))[:1]
    assert np.array_equal(heard[4][1], good[:, 0]) and np.array_equal(heard[-1][1], good[:, 1])


def test_a_teacher_that_trusts_the_check():
    """Untold it does as the check says in 80 % of the cases; told, its log-odds are the sum of both."""
    check = Workflow.random([0], trust=0.8).check
    ones, state = np.ones((1, 1, 1), dtype=int), np.zeros((1, 1), dtype=int)  # it reads "wrong"; revise?
    assert np.exp(check.logp(ones, state, 0)) == pytest.approx(0.8)
    assert np.exp(check.logp(ones, state + 1, 1)) == pytest.approx(0.2)
    odds = 4 * 19
    assert np.exp(check.logp(ones, state, 0, state)) == pytest.approx(odds / (1 + odds))
    assert np.exp(check.logp(ones, state, 0, state + 1)) == pytest.approx(4 / (4 + 19))


def test_the_fixed_points_are_reached():
    shown, no = "shown", "not shown"
    assert [c.verdict for c in distillation.claims(quick=True)] == [shown, "reversed", shown, no, shown, shown, no, no]


@pytest.mark.lesson
def test_claims():
    found = [claim.verdict for claim in distillation.claims()]
    shown, no = "shown", "not shown"
    assert found == [shown, "reversed", shown, no, shown, shown, no, no]
