"""MAS-OPD's advantages by hand, its fixed points against closed forms, and language models as students."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minimgrpo import tasks
from minimgrpo.learner import Learner, Objective
from minimgrpo.lessons import distillation
from minimgrpo.lessons.distillation import Teacher, Workflow, log_softmax
from minimgrpo.policy import Policy
from minimgrpo.trajectory import Trajectory


def test_advantages_by_hand():
    assert distillation.opd_advantage(-1.0, -3.0) == 2.0  # the teacher likes it more than the student does
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
    distillation.train(workflow.beginners(), workflow, pac=True, steps=1, batch=8)
    assert [priv is None for _, priv in heard] == [is_draft for is_draft, _ in heard] == [True] * 4 + [False] * 4
    *_, (_, _, _, good) = workflow.play(workflow.beginners(), 8, np.random.default_rng(0))[:1]
    assert np.array_equal(heard[4][1], good[:, 0]) and np.array_equal(heard[-1][1], good[:, 1])


def test_the_fixed_points_are_reached(monkeypatch):
    monkeypatch.setattr(distillation, "atlas_claims", lambda quick: [])
    shown, no = "shown", "not shown"
    assert [c.verdict for c in distillation.claims(quick=True)] == [shown, "reversed", shown, no, shown, no, no]


# ---------------------------------------------------------------------------------------------------- language models


def test_each_token_gets_its_own_advantage(load, converse):
    """The core's loss on rows of one token is the paper's loss, written out here token by token."""
    student, teacher, lam = load(), load(seed=7), 0.5
    trajectories = converse(student, rows=4, turns=2)
    loss, kl = 0.0, []
    for t in trajectories:
        start, user = t.mask.index(1), t.messages[1]["content"]
        opening = student.chat.open("executor", user)
        assert opening != t.token_ids[:start]
        shift, mask = len(opening) - start, [0] * len(opening) + t.mask[start:]
        logprobs = student.score("planner", [t.token_ids], [t.mask])[0][0]
        target = teacher.score("planner", [t.token_ids], [t.mask])[0][0].tolist()
        contrast = teacher.score("executor", [opening + t.token_ids[start:]], [mask])[0][0].tolist()
        turns, last = [], 0
        for k, sampled in enumerate(t.mask):
            if sampled and not last:
                turns.append([])
            if sampled:
                turns[-1].append(k)
            last = sampled
        assert len(turns) == t.mask.count(1) - sum(a and b for a, b in zip(t.mask, t.mask[1:], strict=False))
        for turn in turns:
            for k in turn:
                A = target[k] - t.logprobs[k] + lam * (target[k] - contrast[k + shift])
                loss = loss - A * logprobs[k] / len(turn) / len(turns) / len(trajectories)
                d = target[k] - t.logprobs[k]
                kl.append(np.exp(d) - 1 - d)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in student.parameters("planner").items()}
    assert max(len(t.messages) for t in trajectories) > 3  # one of two turns is among them
    learner = Learner(student, "planner", Objective(max_grad_norm=1e9))
    assert distillation.learn(learner, teacher, trajectories, lam, lr=1e-3) == pytest.approx(np.mean(kl), rel=1e-3)
    assert all(expected[name].any() for name in expected)
    for name, p in student.parameters("planner").items():
        assert torch.allclose(p.grad, expected[name], atol=1e-5, rtol=1e-3), name


def test_a_step_brings_a_student_nearer_to_its_teacher(load, folders, converse):
    """On the very tokens of one batch: those that the teacher likes better rise, on average, and the others fall."""
    student, teacher = Policy.load(str(folders["llama"])), load()
    trajectories = converse(student, rows=8, turns=1, length=6)
    own = np.concatenate([np.array(t.logprobs)[np.array(t.mask) == 1] for t in trajectories])
    A = distillation.force_decode(teacher, trajectories, "planner").numpy() - own
    for _ in range(3):
        distillation.learn(Learner(student, "planner", Objective()), teacher, trajectories, 0.0, lr=1e-3)
    moved = distillation.force_decode(student, trajectories, "planner").numpy() - own
    assert np.corrcoef(A, moved)[0, 1] > 0.5


def test_the_opening_is_the_only_thing_that_a_contrast_changes(load, converse):
    teacher = load(seed=7)
    trajectories = converse(load(), rows=2, turns=1)
    own = distillation.force_decode(teacher, trajectories, "planner")
    logprobs, mask = teacher.score("planner", [t.token_ids for t in trajectories], [t.mask for t in trajectories])
    assert torch.allclose(own, logprobs[mask.bool()]) and not own.requires_grad
    assert (
        len(own)
        == sum(t.sampled for t in trajectories)
        == len(distillation.force_decode(teacher, trajectories, "executor"))
    )
    certain = Trajectory("planner", "", 0)
    certain.read("user", "x", [5, 6])
    certain.wrote("y", [7], [-0.5])
    teacher.score = lambda *_: (torch.tensor([[0.0, 0.0, -1e9]]), torch.tensor([[0, 0, 1]]))
    assert distillation.force_decode(teacher, [certain], "planner").tolist() == [distillation.FLOOR]


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """A random teacher of another width with the tokenizer of atlas-lm."""
    folder = tmp_path_factory.mktemp("teacher") / "wider"
    tokenizer = AutoTokenizer.from_pretrained(tasks.DATA / "atlas-lm")
    shape = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **shape, **ends)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.config.prompt_style = "brief"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SHORT = ["--steps", "1", "--batch", "2", "--asked", "2", "--lam", "0.1"]


def test_a_teacher_of_another_width(wider, capsys):
    assert distillation.main(["--teacher", str(wider), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert not err and "student, before" in out and "student, after" in out and str(wider) in out.replace("\n", "")


def test_the_default_teacher_is_warmed_up(capsys):
    assert distillation.main([*SHORT, "--demonstrations", "4"]) == 0
    out, err = capsys.readouterr()
    assert not err and "warmed up" in out
    assert [line.split()[1] for line in out.splitlines() if line.split()[:1] == ["teacher"]] == ["0.000"]


def test_a_teacher_with_another_tokenizer_is_refused(folders, capsys):
    assert distillation.main(["--teacher", str(folders["llama"]), *SHORT]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "another tokenizer" in err
    assert distillation.main(["--teacher", "no/such/model/here", *SHORT]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        distillation.main(["--steps", "0"])
    assert stop.value.code == 2


@pytest.mark.lesson
def test_claims():
    found = [claim.verdict for claim in distillation.claims()]
    shown, no = "shown", "not shown"
    assert found == [shown, "reversed", shown, no, shown, no, no, shown, shown]
