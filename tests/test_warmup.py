"""Stage 1: correct demonstrations about invented facts, trained on token by token, and once only in a run's life."""

import random
import re

import pytest
import torch
from safetensors.torch import load_file

from minimgrpo import protocol, servers, tasks, train, warmup
from minimgrpo.chat import Chat
from minimgrpo.learner import Learner, Objective
from minimgrpo.log import RunLog
from minimgrpo.policy import Policy
from minimgrpo.protocol import Call, Malformed, Result
from minimgrpo.servers import Config, Team
from minimgrpo.tools import Tools
from minimgrpo.warmup import batches, demonstrations, encode, warm_up

ROLES = ("planner", "executor")


# ---------------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("role", ROLES)
def test_every_demonstration_is_a_correct_conversation(role):
    seen = set()
    for demo in demonstrations(role, 200, seed=0):
        actions = [protocol.parse(role, m.content) for m in demo.messages if m.role == "assistant"]
        assert demo.agent == role and not any(isinstance(action, Malformed) for action in actions)
        assert isinstance(actions[-1], Result) and all(isinstance(action, Call) for action in actions[:-1])
        assert [m.role for m in demo.messages] == ["user", "assistant"] * len(actions)
        seen |= {len(actions)} if role == "planner" else {a.name for a in actions if isinstance(a, Call)}
        told = " ".join(m.content for m in demo.messages[:-1])
        answer = actions[-1].text
        if "plus" not in told and "How many" not in told:  # what is answered was read before, unless it is computed
            assert answer in told
    assert seen == ({1, 2, 3, 4} if role == "planner" else {"search", "python"})


def test_the_planner_is_shown_as_many_questions_of_each_kind_as_the_atlas_asks():
    turns = [sum(m.role == "assistant" for m in demo.messages) for demo in demonstrations("planner", 40, seed=0)]
    assert [turns.count(n) for n in (1, 2, 3, 4)] == [10, 10, 10, 10]  # a puzzle needs no delegation, a sum three


def test_no_name_of_the_atlas_occurs(monkeypatch):
    pages = tasks.load_pages()
    known = {w for p in pages for w in re.findall(r"\b[A-Z]\w*", f"{p.title} {p.text}")}
    known -= {"The", "Its", "Find", "Isle"}  # ... words of the language, not of the facts
    names = set()
    entity = warmup.Demonstrator(random.Random(0), warmup.SYLLABLES).invent.name
    for _ in range(3000):
        names |= set(re.findall(r"\b[A-Z]\w*", entity()))
    assert len(names) > 1000 and not names & known


def test_the_demonstrations_depend_on_the_seed_and_the_role_and_on_nothing_else():
    first = [demonstrations(role, 20, seed) for role in ROLES for seed in (0, 1)]
    random.seed(5)
    assert first == [demonstrations(role, 20, seed) for role in ROLES for seed in (0, 1)]
    assert len({str(demos) for demos in first}) == 4


@pytest.mark.parametrize("role", ROLES)
def test_a_demonstration_has_the_ids_that_sampling_it_would_have_given(plain_tokenizer, role):
    chat = Chat(plain_tokenizer, "full")
    for demo in demonstrations(role, 10, seed=0):
        trajectory = encode(chat, demo)
        content = [{"role": m.role, "content": m.content} for m in demo.messages]
        for message in content[2::2]:
            message["content"] = protocol.response_text(message["content"])
        messages = [{"role": "system", "content": chat.prompts[role]}, *content]
        rendered = plain_tokenizer.apply_chat_template(messages, tokenize=False)
        assert plain_tokenizer.decode(trajectory.token_ids) == rendered.removesuffix("\n")
        written = [i for i, mask in zip(trajectory.token_ids, trajectory.mask, strict=True) if mask]
        stop = plain_tokenizer.decode([chat.stop_id])
        assert plain_tokenizer.decode(written) == "".join(m["content"] + stop for m in content[1::2])


def test_batches_hold_every_conversation_once_and_no_more_padded_tokens_than_allowed(tokenizer):
    chat = Chat(tokenizer, "brief")
    all_ = [encode(chat, demo) for demo in demonstrations("planner", 50, seed=0)]
    cut = batches(all_, 700)
    assert [t for batch in cut for t in batch] == all_ and len(cut) < 25
    assert all(len(batch) * max(len(t.token_ids) for t in batch) <= 700 or len(batch) == 1 for batch in cut)


# ------------------------------------------------------------------------------------------------------- the training


@pytest.fixture
def fresh(folders):
    def fresh(role="planner", tokens=600, **options):
        policy = Policy.load(str(folders["llama"]), **options)
        return Learner(policy, role, Objective(tokens=tokens))

    return fresh


def adapters(policy):
    return {name: p.detach().clone() for role in ROLES for name, p in policy.parameters(role).items()}


@pytest.mark.parametrize("role", ROLES)
def test_the_loss_falls_and_only_the_adapter_of_the_role_moves(fresh, role, capsys):
    learner = fresh(role)
    before = adapters(learner.policy)
    losses = warm_up(learner, demonstrations(role, 60, seed=0))
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.1
    mine = set(learner.policy.parameters(role))
    for name, value in adapters(learner.policy).items():
        assert torch.equal(value, before[name]) == (name not in mine), name
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"warm-up of the {role}, 60 demonstrations, loss( \d+\.\d\d){{10}} \(\d+ s\)\n", out)
    assert err == "" and learner.version == 0 and not learner.optimizer.state
    assert all(p.grad is None for p in learner.parameters)


def test_the_loss_is_the_mean_surprise_of_the_agents_own_tokens(fresh):
    learner = fresh(tokens=10**6)
    [first] = warm_up(learner, demonstrations("planner", 5, seed=0))
    policy = fresh().policy
    total = count = 0
    for demo in demonstrations("planner", 5, seed=0):
        trajectory = encode(policy.chat, demo)
        with torch.no_grad():
            logits = policy.model(torch.tensor([trajectory.token_ids])).logits[0]
        for t, mask in enumerate(trajectory.mask):
            if mask:
                total -= torch.log_softmax(logits[t - 1], -1)[trajectory.token_ids[t]].item()
                count += 1
    assert first == pytest.approx(total / count, abs=1e-4)


def test_on_a_float16_base_it_trains_the_same(fresh):
    exact = warm_up(fresh(quantize="none"), demonstrations("planner", 30, seed=0))
    half = warm_up(fresh(quantize="none", dtype="float16"), demonstrations("planner", 30, seed=0))
    assert half == pytest.approx(exact, abs=0.05)


def test_a_loss_that_is_not_finite_stops_it(fresh):
    learner = fresh()
    with torch.no_grad():
        learner.parameters[0].fill_(torch.inf)
    with pytest.raises(FloatingPointError, match=r"planner's loss is not finite in step 1 of the warm-up"):
        warm_up(learner, demonstrations("planner", 5, seed=0))


def test_when_it_is_interrupted_the_adapter_is_as_before_and_again_it_comes_to_the_same(fresh, monkeypatch):
    learner, score, calls = fresh(), Policy.score, []
    before = adapters(learner.policy)

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*args, **kwargs)

    monkeypatch.setattr(Policy, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm_up(learner, demonstrations("planner", 20, seed=0))
    assert all(torch.equal(value, before[name]) for name, value in adapters(learner.policy).items())
    other = fresh()
    assert warm_up(learner, demonstrations("planner", 20, seed=0)) == warm_up(
        other, demonstrations("planner", 20, seed=0)
    )
    assert all(torch.equal(v, adapters(other.policy)[name]) for name, v in adapters(learner.policy).items())


# ------------------------------------------------------------------------------------------------------ in a run's life


def test_a_negative_warmup_is_refused():
    with pytest.raises(ValueError, match="warmup cannot be negative"):
        Config(warmup=-1)


def test_a_new_team_warms_up_once_and_a_resumed_one_reads_it_back(folders, tmp_path, monkeypatch):
    config, pages = Config(warmup=4, threads=1), tasks.load_pages()[:3]

    def team():
        return Team(config, Policy.load(str(folders["llama"])), tmp_path, [], Tools(pages))

    first = team()
    assert first.resume() == 0
    log = RunLog(tmp_path)
    assert [log.last_checkpoint(role) for role in ROLES] == [0, 0]
    state = torch.load(log.checkpoint("planner", 0) / "optimizer.pt", weights_only=True)
    assert state["state"] == {}  # M-GRPO starts with a fresh optimizer
    warmed = adapters(first.planner.policy)
    assert not all(torch.equal(v, w) for v, w in zip(warmed.values(), adapters(team().planner.policy).values()))  # noqa: B905

    monkeypatch.setattr(servers, "warm_up", lambda *_: pytest.fail("warmed up again"))
    second = team()
    assert second.resume() == 0
    assert all(torch.equal(v, warmed[name]) for name, v in adapters(second.planner.policy).items())


def test_a_run_killed_in_its_warm_up_comes_to_what_it_would_have_been(folders, tmp_path, monkeypatch, capsys):
    flags = ["--model", str(folders["llama"]), "--threads", "1", "--questions", "2", "--rollouts", "2", "--length", "8"]
    flags += ["--steps", "1", "--warmup", "6"]
    assert train.main([str(tmp_path / "whole"), *flags]) == 0
    roles = []

    def stopped(learner, *args):
        roles.append(learner.role)
        if len(roles) == 2:
            raise KeyboardInterrupt
        return warm_up(learner, *args)

    monkeypatch.setattr(servers, "warm_up", stopped)
    run = tmp_path / "run"
    assert train.main([str(run), *flags]) == 130
    assert "0 complete steps are saved" in capsys.readouterr().out
    assert train.main([str(run), "--resume"]) == 0
    assert roles == ["planner", "executor", "executor"]  # the planner's was done and is not done again
    for role in ROLES:
        for number in ("checkpoint-000000", "checkpoint-000001"):
            name = f"{role}/{number}/adapter_model.safetensors"
            one, other = load_file(tmp_path / "whole" / name), load_file(run / name)
            assert all(torch.equal(one[key], other[key]) for key in one)
