"""Language models as students: the loss token by token, what the teacher reads, and the command."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minimgrpo import protocol, tasks
from minimgrpo.chat import Chat
from minimgrpo.learner import Learner, Objective
from minimgrpo.lessons import opd
from minimgrpo.policy import Policy
from minimgrpo.trajectory import Trajectory


def test_each_token_gets_its_own_advantage(load, converse):
    """The core's loss on rows of one token is the paper's loss, written out here token by token."""
    student, teacher, lam = load(), load(seed=7), 0.5
    other = next(style for style, prompts in protocol.PROMPTS.items() if prompts != student.chat.prompts)
    teacher.chat = Chat(student.chat.tokenizer, other)  # used to other prompts: both openings are the student's still
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
    assert opd.learn(learner, teacher, trajectories, lam, lr=1e-3) == pytest.approx(np.mean(kl), rel=1e-3)
    assert all(expected[name].any() for name in expected)
    for name, p in student.parameters("planner").items():
        assert torch.allclose(p.grad, expected[name], atol=1e-5, rtol=1e-3), name


def test_a_step_brings_a_student_nearer_to_its_teacher(load, folders, converse):
    """On the very tokens of one batch: those that the teacher likes better rise, on average, and the others fall."""
    student, teacher = Policy.load(str(folders["llama"])), load()
    trajectories = converse(student, rows=8, turns=1, length=6)
    own = np.concatenate([np.array(t.logprobs)[np.array(t.mask) == 1] for t in trajectories])
    A = opd.force_decode(teacher, trajectories, "planner").numpy() - own
    for _ in range(3):
        opd.learn(Learner(student, "planner", Objective()), teacher, trajectories, 0.0, lr=1e-3)
    moved = opd.force_decode(student, trajectories, "planner").numpy() - own
    assert np.corrcoef(A, moved)[0, 1] > 0.5


def test_the_opening_is_the_only_thing_that_a_contrast_changes(load, converse):
    teacher = load(seed=7)
    trajectories = converse(load(), rows=2, turns=1)
    own = opd.force_decode(teacher, trajectories, "planner")
    logprobs, mask = teacher.score("planner", [t.token_ids for t in trajectories], [t.mask for t in trajectories])
    assert torch.allclose(own, logprobs[mask.bool()]) and not own.requires_grad
    assert len(own) == sum(t.sampled for t in trajectories) == len(opd.force_decode(teacher, trajectories, "executor"))
    certain = Trajectory("planner", "", 0)
    certain.read("user", "x", [5, 6])
    certain.wrote("y", [7], [-0.5])
    teacher.score = lambda *_: (torch.tensor([[0.0, 0.0, -1e9]]), torch.tensor([[0, 0, 1]]))
    assert opd.force_decode(teacher, [certain], "planner").tolist() == [opd.FLOOR]


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
    assert opd.main(["--teacher", str(wider), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert not err and "student, before" in out and "student, after" in out and str(wider) in out.replace("\n", "")


def test_the_default_teacher_is_warmed_up(capsys):
    assert opd.main([*SHORT, "--demonstrations", "4"]) == 0
    out, err = capsys.readouterr()
    assert not err and "warmed up" in out
    assert [line.split()[1] for line in out.splitlines() if line.split()[:1] == ["teacher"]] == ["0.000"]


def test_a_teacher_with_another_tokenizer_is_refused(folders, capsys):
    assert opd.main(["--teacher", str(folders["llama"]), *SHORT]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "another tokenizer" in err
    assert opd.main(["--teacher", "no/such/model/here", *SHORT]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        opd.main(["--steps", "0"])
    assert stop.value.code == 2


@pytest.mark.lesson
def test_claims():
    assert [claim.verdict for claim in opd.claims()] == ["shown", "shown"]
