"""Workflows: who sees what, groups, credits and masks by hand on a scripted policy; sharing, resuming, the command."""

import itertools
import random
from dataclasses import replace
from zlib import crc32

import pytest
import torch
from conftest import FEW, SHORT

from minimgrpo import casting, learner, log, protocol, show, train, workflow_play, workflow_team, workflows
from minimgrpo.agents import Limits
from minimgrpo.atlas import Step
from minimgrpo.casting import RoleDemonstrator
from minimgrpo.log import LogError
from minimgrpo.protocol import Call, Malformed, Result
from minimgrpo.tasks import Question
from minimgrpo.tools import Page, Tools
from minimgrpo.workflow_team import Cast, WorkflowConfig, WorkflowTeam
from minimgrpo.workflows import ROLES, WORKFLOWS, Said

Q = "What is the capital of Ghana?"
TASK = Step("Find the capital of Ghana", "search", "capital Ghana", "Accra")
GHANA = Question("g", Q, 1, "Accra", "lookup", ("Ghana",), ("Ghana",), (TASK,))
PAGES = [Page("1", "Ghana", "Its capital is Accra."), Page("2", "Nigeria", "Its capital is Abuja.")]
ANSWER = protocol.ANSWER
WORDS, ROUTES = "correct or incorrect?", "generator or solver or done?"
ALL_ROLES = sorted({role for roles in ROLES.values() for role in roles})


def played(name, replies):
    """Play one workflow; ``replies(role, slot, text)`` -> Said. Returns the answer and the rounds of asks."""
    rounds = []

    def speak(batch):
        rounds.append([(turn.ask.role, turn.ask.slot, turn.ask.text, turn.ask.default, turn.time) for _, turn in batch])
        return [replies(turn.ask.role, turn.ask.slot, turn.ask.text) for _, turn in batch]

    return workflows.run(WORKFLOWS[name], [Q], speak)[0], rounds


# ---------------------------------------------------------------------------------------------------- who sees what


def test_voting():
    votes = ["Accra", "Kumasi", "Kumasi"]
    answer, rounds = played("voting", lambda role, slot, _: Said(votes[slot] if role == "generator" else "Accra"))
    read = f"{Q}\n- Accra\n- Kumasi\n- Kumasi"
    assert rounds == [[("generator", s, Q, "unknown", 0) for s in range(3)], [("aggregator", 0, read, "Kumasi", 0)]]
    assert answer == "Accra"


def test_eval_opt_refines_until_it_is_called_correct_and_twice_at_most():
    def replies(verdicts):
        drafts, said = iter(["Lagos", "", "Accra"]), iter(verdicts)
        return lambda role, *_: Said(next(said)) if role == "evaluator" else Said(next(drafts), "search: capital")

    answer, rounds = played("eval-opt", replies(["incorrect", "correct"]))
    did = "search: capital\nanswer: "
    assert [ask for (ask,) in rounds] == [
        ("generator", 0, Q, "unknown", 0),
        ("evaluator", 0, f"{Q}\n{did}Lagos\n{WORDS}", "correct", 0),
        ("generator", 0, f"{Q}\nnot correct: Lagos", "unknown", 1),
        ("evaluator", 0, f"{Q}\n{did}unknown\n{WORDS}", "correct", 1),
    ]
    assert answer == ""
    answer, rounds = played("eval-opt", replies(["incorrect"] * 5))
    assert answer == "Accra" and [ask[0] for (ask,) in rounds] == ["generator", "evaluator"] * 2 + ["generator"]
    assert played("eval-opt", replies([""]))[0] == "Lagos"  # a malformed verdict is no objection


def test_orch_workers():
    plan = "Find A\n\n Find B \nFind C\nFind D"
    said = {"orchestrator": plan, "synthesizer": "5"}
    answer, rounds = played("orch-workers", lambda role, slot, _: Said(said.get(role, ["2", "", "2"][slot])))
    assert rounds[0] == [("orchestrator", 0, Q, Q, 0)]
    assert rounds[1] == [("worker", s, f"Find {'ABC'[s]}", "unknown", 0) for s in range(3)]
    assert rounds[2] == [("synthesizer", 0, f"{Q}\n- Find A: 2\n- Find B: unknown\n- Find C: 2", "2", 0)]
    assert answer == "5"
    answer, rounds = played("orch-workers", lambda *_: Said(f"{ANSWER} Accra"))
    assert answer == "Accra" and len(rounds) == 1  # it solved the task itself: nobody works
    assert [
        len(r) for r in played("orch-workers", lambda role, *_: Said("" if role == "orchestrator" else "x"))[1]
    ] == [
        1,
        1,
    ]


def test_debate():
    def replies(role, slot, text):
        return Said({"generator": ["Accra", "Lagos"][slot], "debater": ["Accra", "Accra"][slot]}.get(role, "Accra"))

    answer, rounds = played("debate", replies)
    assert rounds[0] == [("generator", s, Q, "unknown", 0) for s in range(2)]
    assert rounds[1] == [  # at the same time, each with its own answer first
        ("debater", 0, f"{Q}\n- Accra\n- Lagos", "Accra", 0),
        ("debater", 1, f"{Q}\n- Lagos\n- Accra", "Lagos", 0),
    ]
    assert rounds[2] == [("judge", 0, f"{Q}\n- Accra\n- Accra", "Accra", 0)] and answer == "Accra"


def test_an_advisors_redo_reads_the_same_prompt_and_stands():
    drafts = iter(["Lagos", "Accra"])
    answer, rounds = played("advisor", lambda role, *_: Said("incorrect" if role == "evaluator" else next(drafts)))
    assert [ask[:3] for (ask,) in rounds] == [
        ("generator", 0, Q), ("evaluator", 0, f"{Q}\nanswer: Lagos\n{WORDS}"), ("generator", 0, Q),
    ]  # fmt: skip
    assert answer == "Accra"
    assert played("advisor", lambda role, *_: Said("correct" if role == "evaluator" else "Lagos"))[0] == "Lagos"


def test_a_swarm_goes_where_the_controller_says():
    routes, answers = iter(["solver", "generator", "done"]), iter(["Lagos", "Accra"])
    answer, rounds = played("swarm", lambda role, *_: Said(next(routes if role == "controller" else answers)))
    assert [ask for (ask,) in rounds] == [
        ("controller", 0, f"{Q}\n{ROUTES}", "generator", 0),
        ("solver", 0, Q, "unknown", 0),
        ("controller", 0, f"{Q}\n- Lagos\n{ROUTES}", "done", 1),
        ("generator", 0, Q, "unknown", 0),
        ("controller", 0, f"{Q}\n- Lagos\n- Accra\n{ROUTES}", "done", 2),
    ]
    assert answer == "Accra"
    answer, rounds = played("swarm", lambda role, *_: Said("solver" if role == "controller" else "x"))
    assert len(rounds) == 2 * workflows.HOPS and answer == "x"
    assert played("swarm", lambda *_: Said("done"))[0] == ""


def test_many_are_played_in_lock_step_and_apart():
    batches = []

    def speak(batch):
        batches.append(len(batch))
        return [Said("correct" if turn.ask.role == "evaluator" and i == 0 else "incorrect") for i, turn in batch]

    assert workflows.run(WORKFLOWS["advisor"], [Q, Q, Q], speak) == ["incorrect"] * 3
    assert batches == [3, 3, 2]


# ------------------------------------------------------------------------------------ credit, groups and masks by hand


def pick(text):
    """A scripted aggregator: the most frequent candidate, the last of equals."""
    lines = [line[2:] for line in text.split("\n")[1:]]
    return max(reversed(lines), key=lines.count)


VOTES = (("Accra", "Kumasi", "Kumasi"), ("Accra", "Accra", "Lagos"))


def voting_episodes(scripted):
    def script(role, user, row, turn):
        return f"{ANSWER} {VOTES[row // 3][row % 3] if role == 'generator' else pick(user)}"

    policy = scripted(script)
    cast = Cast(policy, {role: role for role in ROLES["voting"]})
    episodes = workflow_play.play("voting", cast, Tools(PAGES), [GHANA], 2, Limits(), 1.0, (0,))
    return policy, episodes


def by_place(episodes, what):
    return [[getattr(t, what) for _, t in episode.turns] for episode in episodes]


def test_a_vote_under_team_and_under_per_agent_credit(scripted):
    policy, episodes = voting_episodes(scripted)
    assert [e.answer for e in episodes] == ["Kumasi", "Accra"]
    assert policy.batches == [("generator", 6), ("aggregator", 2)]
    workflow_play.settle(episodes, "team")
    assert by_place(episodes, "reward") == [[0.1] * 4, [1.0] * 4]
    assert by_place(episodes, "advantage") == [[-1.0] * 4, [1.0] * 4]  # the wrong vote for Lagos too
    workflow_play.settle(episodes, "per-agent")
    assert by_place(episodes, "reward") == [[1.0, 0.1, 0.1, 0.1], [1.0, 1.0, 0.1, 1.0]]
    assert by_place(episodes, "advantage") == [[0, -1, 0, -1], [0, 1, 0, 1]]
    assert [t.reward_parts for _, t in episodes[1].turns[2:3]] == [
        {"format": 1.0, "correct": 1.0, "own": 0.0, "credit": 0.0}
    ]


def test_masks_and_prompts_are_those_of_what_was_read_and_said(scripted):
    policy, episodes = voting_episodes(scripted)
    for episode in episodes:
        assert [t.call for _, t in episode.turns] == [0, 1, 2, 3] and len(episode.players) == 4
        for turn, t in episode.turns:
            assert t.agent == turn.ask.role and t.messages[1]["content"] == turn.ask.text
            assert t.messages[0]["content"] == f"You are the {t.agent}."
            prompt = policy.chat.open(t.agent, turn.ask.text)
            assert t.token_ids[: len(prompt)] == prompt and not any(t.mask[: len(prompt)])
            spoken = [i for i, m in zip(t.token_ids, t.mask, strict=True) if m]
            assert spoken == policy.said[t.messages[2]["content"]] and all(t.mask[len(prompt) :])


def asked_again(episodes, credit):
    """The coalition values, with the scripted aggregator for whoever reads something new, and who was asked."""
    asked = []

    def ask(batch):
        asked.extend((i, turn.ask.role, turn.ask.text) for i, turn in batch)
        return [Said(pick(turn.ask.text)) for _, turn in batch]

    return workflow_play.coalition_values("voting", episodes, credit, ask), asked


def test_a_vote_under_difference_credit(scripted):
    _, episodes = voting_episodes(scripted)
    values, asked = asked_again(episodes, "difference")
    workflow_play.settle(episodes, "difference", values)
    # rollout 1: without either vote for Accra the aggregator takes the last, Lagos; without Lagos, or without the
    # aggregator (the majority stands in for it), it is Accra still. Rollout 0 is wrong in any case.
    assert by_place(episodes, "reward") == [[0.1] * 4, [1.0, 1.0, 0.1, 0.1]]
    assert by_place(episodes, "advantage") == [[-1, -1, 0, 0], [1, 1, 0, 0]]
    assert {role for _, role, _ in asked} == {"aggregator"} and len(asked) == 6  # 3 prompts a rollout are new
    assert asked[3][2] == f"{Q}\n- unknown\n- Accra\n- Lagos"


def test_a_vote_under_shapley_credit(scripted):
    _, episodes = voting_episodes(scripted)
    values, asked = asked_again(episodes, "shapley")
    workflow_play.settle(episodes, "shapley", values)

    def V(votes, S):
        said = [vote if s in S else "unknown" for s, vote in enumerate(votes)]
        others = [Said(v) for v in said]
        return (
            pick("\n".join([Q, *(f"- {v}" for v in said)])) == "Accra"
            if 3 in S
            else workflows.majority(others) == "Accra"
        )

    for episode, votes in zip(episodes, VOTES, strict=True):
        orders = list(itertools.permutations(range(4)))
        for player in range(4):
            gains = [V(votes, o[: o.index(player) + 1]) - V(votes, o[: o.index(player)]) for o in orders]
            paid = episode.turns[player][1].reward_parts["credit"]
            assert paid == pytest.approx(sum(gains) / len(orders), abs=1e-9)
        assert sum(t.reward_parts["credit"] for _, t in episode.turns) == pytest.approx(workflow_play.outcome(episode))
    assert len(asked) == len(set(asked)) == 14  # of 8 coalitions with an aggregator one was played


def episodes_of(name, scripted, script, rollouts=2):
    cast = Cast(scripted(script), {role: role for role in ROLES[name]})
    return workflow_play.play(name, cast, Tools(PAGES, k=1), [GHANA], rollouts, Limits(), 1.0, (0,))


def test_questions_are_groups_of_their_own(scripted):
    """An easy question, always right, does not make the rollouts of a hard one look bad."""
    easy = replace(GHANA, task_id="easy", question="What is the capital of Ghana, Accra?")

    def script(role, user, row, turn):
        right = "- Accra" in user if role == "aggregator" else "Accra?" in user or row < 3
        return f"{ANSWER} {'Accra' if right else 'Lagos'}"

    cast = Cast(scripted(script), {role: role for role in ROLES["voting"]})
    episodes = workflow_play.play("voting", cast, Tools(PAGES, k=1), [GHANA, easy], 2, Limits(), 1.0, (0,))
    assert [e.answer for e in episodes] == ["Accra", "Lagos", "Accra", "Accra"]
    workflow_play.settle(episodes, "team")
    assert by_place(episodes, "advantage") == [[1] * 4, [-1] * 4, [0] * 4, [0] * 4]


def test_equal_votes_are_worth_the_same_whatever_their_seat(scripted):
    """An aggregator that finds Accra wherever it is: two right votes share what they are worth."""
    for votes, expected in (
        (("Accra", "Accra", "Lagos"), [0.5, 0.5, 0, 0]),
        (("Lagos", "Accra", "Accra"), [-1 / 6, 0.5, 0.5, 1 / 6]),  # without the others Lagos has the majority
    ):

        def script(role, user, row, turn, votes=votes):
            return f"{ANSWER} {'Accra' if role == 'aggregator' else votes[row % 3]}"

        (episode,) = episodes_of("voting", scripted, script, rollouts=1)
        values = workflow_play.coalition_values(
            "voting",
            [episode],
            "shapley",
            lambda batch: [Said("Accra" if "- Accra" in turn.ask.text else "unknown") for _, turn in batch],
        )
        workflow_play.settle([episode], "shapley", values)
        assert [t.reward_parts["credit"] for _, t in episode.turns] == pytest.approx(expected)


def test_the_advisors_redo_is_another_message_than_its_draft(scripted):
    """The same prompt twice: what was said the first time is not what was said the second time."""

    def script(role, user, row, turn):
        return "incorrect" if role == "evaluator" else f"{ANSWER} Lagos"

    (episode,) = episodes_of("advisor", scripted, script, rollouts=1)
    assert [t.agent for _, t in episode.turns] == ["generator", "evaluator", "generator"]
    redo = episode.turns[2][1]
    redo.messages[-1]["content"], redo.result, episode.answer = f"{ANSWER} Accra", "Accra", "Accra"
    (values,) = workflow_play.coalition_values("advisor", [episode], "shapley", lambda batch: [Said("incorrect")])
    # players: generator, evaluator. Alone the generator's draft stands, Lagos; together the redo is right
    assert values.tolist() == [0, 0, 0, 1]


def test_who_speaks_in_a_counterfactual_only_is_asked_in_every_coalition(scripted):
    def script(role, user, row, turn):
        return f"{ANSWER} Lagos"

    (episode,) = episodes_of("orch-workers", scripted, script, rollouts=1)
    assert episode.players == [("orchestrator", 0)] and episode.answer == "Lagos"
    asked = []

    def ask(batch):
        asked.extend(turn.ask.role for _, turn in batch)
        return [Said("Accra") for _ in batch]

    (values,) = workflow_play.coalition_values("orch-workers", [episode], "difference", ask)
    assert asked == ["worker", "synthesizer"] and values.tolist() == [1, 0]  # without it the question is delegated
    workflow_play.settle([episode], "difference", [values])
    assert by_place([episode], "reward") == [[pytest.approx(0.1 - 0.9)]]
    # a malformed message is not spared what it did: 0 for its form, and its (negative) worth
    episode.turns[0][1].stop_reason = "format"
    workflow_play.settle([episode], "difference", [values])
    assert by_place([episode], "reward") == [[pytest.approx(-0.9)]]


def test_a_worker_is_right_on_any_step_of_the_question(scripted):
    second = Step("Find the capital of Nigeria", "search", "capital Nigeria", "Abuja")
    both = replace(GHANA, steps=(TASK, second))

    def script(role, user, row, turn):
        said = {"orchestrator": "Find the capital of Nigeria", "synthesizer": f"{ANSWER} Accra"}
        return said.get(role, "Abuja")

    cast = Cast(scripted(script), {role: role for role in ROLES["orch-workers"]})
    (episode,) = workflow_play.play("orch-workers", cast, Tools(PAGES, k=1), [both], 1, Limits(), 1.0, (0,))
    workflow_play.settle([episode], "per-agent")
    assert by_place([episode], "reward") == [[1.0, 1.0, 1.0]]


def test_eval_opt_groups_by_how_often_a_player_spoke(scripted):
    def script(role, user, row, turn):
        if role == "evaluator":
            return "incorrect" if "Lagos" in user else "correct"
        return f"{ANSWER} {'Accra' if 'not correct' in user else ('Lagos', 'Kumasi')[row]}"

    episodes = episodes_of("eval-opt", scripted, script)
    assert [e.answer for e in episodes] == ["Accra", "Kumasi"]
    workflow_play.settle(episodes, "team")
    assert by_place(episodes, "advantage") == [[1, 1, 0, 0], [-1, -1]]  # nobody else refined: nothing to compare with
    workflow_play.settle(episodes, "per-agent")
    assert by_place(episodes, "reward") == [[0.1, 1.0, 1.0, 1.0], [0.1, 0.1]]  # verdicts: right, right; wrong
    assert by_place(episodes, "advantage") == [[0, 1, 0, 0], [0, -1]]
    assert episodes[0].players == [("generator", 0), ("evaluator", 0)]
    # without the evaluator Lagos stands; without the generator it says "unknown", and the evaluator, who reads
    # something new, says correct: so both are worth 1 in the first rollout
    values = workflow_play.coalition_values(
        "eval-opt", episodes, "shapley", lambda batch: [Said("correct") for _ in batch]
    )
    assert [v.tolist() for v in values] == [[0, 0, 0, 1], [0, 0, 0, 0]]


def test_orch_workers_per_agent(scripted):
    def script(role, user, row, turn):
        if role == "worker" and turn == 0:
            return protocol.call_text("search", query="capital Ghana" if row % 2 == 0 else "capital Nigeria")
        said = {"orchestrator": "Find the capital of Ghana\nFind the capital", "synthesizer": f"{ANSWER} Accra"}
        return said.get(role, ("Accra", "Abuja")[row % 2])

    episodes = episodes_of("orch-workers", scripted, script)
    workflow_play.settle(episodes, "per-agent")
    assert [t.agent for _, t in episodes[0].turns] == ["orchestrator", "worker", "worker", "synthesizer"]
    assert by_place(episodes, "reward") == [[1.0, 1.0, 0.1, 1.0]] * 2
    synthesizer = episodes[0].turns[3][1].messages[1]["content"]
    assert synthesizer == f"{Q}\n- Find the capital of Ghana: Accra\n- Find the capital: Abuja"
    assert "Accra" in episodes[0].turns[1][1].tool_calls[0]["output"]  # the workers' tools are real


def test_debate_and_swarm_on_a_policy(scripted):
    def debaters(role, user, row, turn):
        return f"{ANSWER} {('Accra', 'Lagos')[row % 2] if role == 'generator' else user.split('- ')[-1]}"

    episodes = episodes_of("debate", scripted, debaters)
    workflow_play.settle(episodes, "per-agent")  # each takes over the other's answer; the judge the last one
    assert by_place(episodes, "reward") == [[1.0, 0.1, 0.1, 1.0, 1.0]] * 2

    def hops(role, user, row, turn):
        if role == "controller":
            return "done" if "\n- " in user else ("solver", "generator")[row]
        return f"{ANSWER} {'Accra' if role == 'generator' else 'Lagos'}"

    episodes = episodes_of("swarm", scripted, hops)
    workflow_play.settle(episodes, "team")
    assert [[t.agent for _, t in e.turns] for e in episodes] == [
        ["controller", who, "controller"] for who in ("solver", "generator")
    ]
    assert by_place(episodes, "advantage") == [[-1, 0, -1], [1, 0, 1]]  # the same place: the controller's
    workflow_play.settle(episodes, "per-agent")  # a route is not right by itself: the controller is paid the outcome
    assert by_place(episodes, "reward") == [[0.1, 0.1, 0.1], [1.0, 1.0, 1.0]]


def test_a_malformed_message_earns_nothing_and_says_nothing(scripted):
    def script(role, user, row, turn):
        if role == "evaluator":
            return "perhaps" if row == 0 else "correct"
        return f"{ANSWER} Accra"

    episodes = episodes_of("advisor", scripted, script)
    workflow_play.settle(episodes, "team")
    assert by_place(episodes, "reward") == [[1.0, 0.0], [1.0, 1.0]]
    assert episodes[0].turns[1][1].stop_reason == "format"


def test_what_an_evaluator_reads_of_the_work(scripted):
    def script(role, user, row, turn):
        if role == "generator" and turn == 0:
            return protocol.call_text("search", query="capital Ghana")
        return "correct" if role == "evaluator" else f"{ANSWER} Accra"

    episodes = episodes_of("advisor", scripted, script)
    assert episodes[0].turns[1][1].messages[1]["content"] == f"{Q}\nsearch: capital Ghana\nanswer: Accra\n{WORDS}"


# ---------------------------------------------------------------------------------- training, sharing, resuming


def read(role, message):
    """What a random model's messages mean: see conftest.read_checksum."""
    text, draw = message or "x", crc32(message.encode()) % 8
    if role == "evaluator":
        return Result("incorrect" if draw % 2 else "correct")
    if draw < 2 and "search" in protocol.TOOLS[role]:
        return Call("search", {"query": text})
    return Malformed("an unlucky checksum") if draw == 4 else Result(text)


@pytest.fixture
def checksums(monkeypatch):
    monkeypatch.setattr(protocol, "parse", read)
    monkeypatch.setattr(workflow_play, "gaia_score", lambda a, gold: bool(a) and crc32(a.encode()) % 2 == 0)


def a_team(load, root, **changed):
    fields = {
        name: getattr(SHORT, name) for name in ("seed", "questions", "rollouts", "threads", "objective", "limits")
    }
    config = WorkflowConfig(**fields | {"steps": 3} | changed)
    adapters = tuple(dict.fromkeys(config.adapters.values()))
    policy = load(roles=adapters)
    policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 120)}  # else hardly any message would end
    return WorkflowTeam(config, policy, root, FEW, Tools(PAGES), PAGES)


def files(root):
    """Every file's bytes but for wall-clock figures."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in ("metrics.jsonl", "lock")
    }


def finish(team):
    done = team.resume()
    for step in range(done + 1, team.config.steps + 1):
        team.step(step)
    return files(team.log.root)


@pytest.mark.parametrize(
    ("workflow", "sharing", "credit"),
    [("voting", "isolated", "difference"), ("voting", "shared", "team"), ("eval-opt", "isolated", "shapley")],
)
def test_a_run_that_was_interrupted_is_the_same_to_the_bit(
    load, tmp_path, checksums, monkeypatch, workflow, sharing, credit
):
    options = {"workflow": workflow, "sharing": sharing, "credit": credit}
    whole = finish(a_team(load, tmp_path / "whole" / "run", **options))
    names = {"shared"} if sharing == "shared" else set(ROLES[workflow])
    rows = [row for name in names for row in log.read_metrics(tmp_path / "whole" / "run" / name / "metrics.jsonl")]
    assert sum(bool(row["grad_norm"]) for row in rows) > len(rows) / 2  # it learned
    assert {name.split("/")[0] for name in whole} == names | {"outcomes"}
    assert all(f"{name}/checkpoint-000003/adapter_model.safetensors" in whole for name in names)

    team = a_team(load, tmp_path / "cut" / "run", **options)
    team.resume()
    team.step(1)
    last = team.servers[-1]
    monkeypatch.setattr(last, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        team.step(2)  # the others' trajectories of step 2 are published, its own are not
    team = a_team(load, tmp_path / "cut" / "run", **options)
    assert team.resume() == 1
    monkeypatch.setattr(team.servers[-1], "learn", lambda version: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        team.step(2)
    assert finish(a_team(load, tmp_path / "cut" / "run", **options)) == whole


def test_shared_is_one_adapter_and_one_optimizer(load, tmp_path, checksums):
    team = a_team(load, tmp_path / "run", sharing="shared")
    team.resume()
    (server,) = team.servers
    assert team.cast.adapters == {"generator": "shared", "aggregator": "shared"}
    trajectories, facts = team.step(1)
    assert {t.agent for t in trajectories} == {"generator", "aggregator"} and server.learner.version == 1
    norms = workflow_team.grad_norms(facts)
    assert set(norms) == {"generator", "aggregator"} and min(norms.values()) > 0
    assert facts["shared"]["grad_norm"] <= sum(norms.values()) + 1e-6
    with pytest.raises(Exception, match="no adapter called 'generator'"):
        team.cast.policy.parameters("generator")


def test_isolated_adapters_do_not_move_each_other(load, tmp_path, checksums):
    teams = [a_team(load, tmp_path / name) for name in ("both", "one")]

    def values(team, role):
        return [p.detach().clone() for p in team.cast.policy.parameters(role).values()]

    start = values(teams[1], "aggregator")
    teams[1].servers[1].learn = lambda version: None
    teams[1].servers[1].measured = lambda step: {}
    for team in teams:
        team.resume()
        team.step(1)
    same = [
        torch.equal(a, b) for a, b in zip(values(teams[0], "generator"), values(teams[1], "generator"), strict=True)
    ]
    assert all(same)
    assert all(torch.equal(a, b) for a, b in zip(values(teams[1], "aggregator"), start, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(values(teams[0], "aggregator"), start, strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(values(teams[0], "generator"), values(teams[0], "aggregator"), strict=True)
    )


def test_the_roles_gradients_add_up(load, converse):
    policy = load()
    batch = converse(policy, rows=4)
    for n, t in enumerate(batch):
        t.advantage = (-1.0, 0.5, 2.0, -0.3)[n]
    one = learner.Learner(policy, "planner", SHORT.objective)
    plain = one._accumulate(batch, one._normalizer(batch), one._tokens(batch))
    whole = one._gradient().clone()
    assert "grad_norms" not in plain
    for n, t in enumerate(batch):
        t.agent = ("a", "b")[n % 2]
    parts = {}
    for agents in ("a", "b", "ab"):
        one.optimizer.zero_grad(set_to_none=True)
        some = [t for t in batch if t.agent in agents]
        found = one._accumulate(some, one._normalizer(batch), one._tokens(batch))
        parts[agents] = one._gradient().clone()
    assert torch.allclose(parts["ab"], whole, atol=1e-6) and found["loss"] == pytest.approx(plain["loss"])
    for agent in "ab":
        assert found["grad_norms"][agent] == pytest.approx(parts[agent].norm().item(), rel=1e-4)


def test_a_lost_file_of_a_run_that_went_on_is_noticed(load, tmp_path, checksums):
    team = a_team(load, tmp_path / "run")
    finish(team)
    team.log.trajectories("aggregator", 2).unlink()
    with pytest.raises(LogError, match="aggregator"):
        a_team(load, tmp_path / "run").step(2)


# ------------------------------------------------------------------------------------------------- demonstrations


PIECES = ["An", "Bo", "Ri", "Sta", "ia", "kel", "um", "tor", "mi", "ves", "lo", "gra"]


@pytest.mark.parametrize("role", ALL_ROLES)
def test_demonstrations_are_conversations_of_the_role_with_mistakes(role):
    demonstrator = RoleDemonstrator(random.Random(0), PIECES)
    demos = [demonstrator.role(role) for _ in range(300)]
    ended = [protocol.parse(role, d.messages[-1].content) for d in demos]
    assert all(d.agent == role for d in demos)
    good = sum(isinstance(end, Result) for end in ended) / len(demos)
    assert 0.85 < good < 1  # some are broken on purpose
    for demo in demos:
        for message in demo.messages[1:-1]:
            assert message.role == "user" or isinstance(protocol.parse(role, message.content), Call)


def test_roles_read_in_demonstrations_what_workflows_show_them():
    demonstrator = RoleDemonstrator(random.Random(0), PIECES)

    def opened(role):
        return [demonstrator.role(role).messages[0].content.split("\n") for _ in range(100)]

    for role, count in (("aggregator", 3), ("debater", 2), ("judge", 2)):
        assert all(len(lines) == count + 1 and all(x.startswith("- ") for x in lines[1:]) for lines in opened(role))
    assert all(lines[-2].startswith("answer: ") and lines[-1] == WORDS for lines in opened("evaluator"))
    refining = [lines[-1].startswith("not correct: ") for lines in opened("generator")]
    assert 5 < sum(refining) < 40
    assert {len(lines) for lines in opened("synthesizer")} == {2, 3}


def test_roles_do_in_demonstrations_what_their_shares_say(monkeypatch):
    """The last message of 400 conversations, with and without the right answer; 4 standard errors are at most 0.1."""
    demonstrator = RoleDemonstrator(random.Random(1), PIECES)
    demonstrator.mistakes = False  # well-formed throughout

    def share(role, what):
        return sum(bool(what(demonstrator.role(role).messages)) for _ in range(400)) / 400

    def says(word):
        return lambda messages: messages[-1].content == word

    question, attempt = demonstrator._question, demonstrator._attempt
    for right, verdict in ((True, "correct"), (False, "incorrect")):
        monkeypatch.setattr(
            demonstrator, "_attempt", lambda right=right: (GHANA, Said("Accra" if right else "Lagos", "search: Ghana"))
        )
        assert share("evaluator", says(verdict)) == pytest.approx(0.55 + 0.45 / 2, abs=0.1)
        # one of the three is certain to be that attempt; the others are right in 40 %
        most = share("aggregator", lambda m: m[-1].content == f"{ANSWER} Accra")
        assert (0.4 < most < 0.75) if right else most < 0.4
    monkeypatch.setattr(demonstrator, "_attempt", attempt)
    tried = [attempt() for _ in range(400)]
    right = [(q, said) for q, said in tried if said.text == q.answer]
    assert 0.4 < len(right) / len(tried) < 0.6
    whole = [len(q.steps) == len([line for line in said.work.split("\n") if line]) for q, said in right]
    assert sum(whole) > 0.95 * len(whole)  # a wrong answer is now and then right by luck
    done = share("controller", lambda m: m[-1].content == "done" or "\n- " not in m[0].content)
    assert done == pytest.approx(0.25 + 0.75 * 0.6, abs=0.1)  # a quarter has no answers yet: nothing to be done with

    draw = demonstrator._draw
    with monkeypatch.context() as patch:
        patch.setattr(demonstrator, "_draw", lambda shares: "majority" if "majority" in shares else draw(shares))
        votes = [demonstrator.role("aggregator").messages for _ in range(100)]
    for messages in votes:
        answers = [Said(line.removeprefix("- ")) for line in messages[0].content.split("\n")[1:]]
        assert messages[-1].content == f"{ANSWER} {workflows.majority(answers)}"

    monkeypatch.setattr(demonstrator, "_question", lambda: (GHANA, "capital"))
    assert share("orchestrator", says(TASK.task)) == pytest.approx(0.5, abs=0.1)
    assert share("solver", says(f"{ANSWER} unknown")) == 1
    puzzles = iter(lambda: question(), None)
    monkeypatch.setattr(demonstrator, "_question", lambda: next(q for q in puzzles if not q[1]))
    fixed = demonstrator._question()
    monkeypatch.setattr(demonstrator, "_question", lambda: fixed)
    assert share("solver", says(f"{ANSWER} {fixed[0].answer}")) == pytest.approx(0.8, abs=0.1)

    sums = next(q for q in puzzles if q[0].kind == "calculation")
    monkeypatch.setattr(demonstrator, "_question", lambda: sums)
    operator = "+" if " plus " in sums[0].question else "-"

    def computed(messages):
        if len(messages) < 4:
            return False
        a, b = (line.rpartition(": ")[2] for line in messages[0].content.split("\n")[1:])
        return f"{a} {operator} {b}" in messages[1].content and (
            not (a.isdecimal() and b.isdecimal()) or messages[-1].content == f"{ANSWER} {eval(f'{a} {operator} {b}')}"
        )

    assert share("synthesizer", computed) == pytest.approx(0.65, abs=0.1)


def test_an_adapter_that_is_shared_sees_all_its_roles_shuffled(load):
    tokenizer = load().chat.tokenizer
    shown = casting.demonstrations(tokenizer, PAGES, ("generator", "aggregator"), 30, seed=0)
    assert [sum(d.agent == role for d in shown) for role in ("generator", "aggregator")] == [30, 30]
    assert len({d.agent for d in shown[:12]}) == 2
    assert shown == casting.demonstrations(tokenizer, PAGES, ("generator", "aggregator"), 30, seed=0)


# ----------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workflow", "nonsense"], "workflow is voting"),
        (["--workflow", "voting", "--credit", "blame"], "credit is team"),
        (["--workflow", "voting", "--sharing", "both"], "sharing is isolated"),
        (["--workflow", "voting", "--decoupled"], "one process"),
        (["--workflow", "voting", "--staleness", "1"], "no executor server"),
        (["--sharing", "shared"], "--workflow"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as stopped:
        train.main([str(tmp_path / "run"), *flags])
    _, err = capsys.readouterr()
    assert stopped.value.code == 2 and words in err and err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_run_of_the_other_kind_is_not_continued(tmp_path, capsys):
    train.publish_config(tmp_path / "flow", WorkflowConfig(workflow="debate"))
    with pytest.raises(LogError, match="the workflow debate"):
        train.stored_config(tmp_path / "flow")
    assert train.trained(tmp_path / "flow") == ROLES["debate"]
    assert show.main([str(tmp_path / "flow")]) == 2 and "workflow" in capsys.readouterr().err
    train.publish_config(tmp_path / "team", SHORT)
    assert train.main([str(tmp_path / "team"), "--resume", "--workflow", "debate"]) == 2
    assert "a planner and an executor" in capsys.readouterr().err


def test_the_command_trains_and_resumes(tmp_path, capsys):
    small = ["--steps", "1", "--questions", "1", "--rollouts", "2", "--warmup", "3", "--threads", "1", "--length", "24"]
    run = str(tmp_path / "run")
    assert train.main([run, "--workflow", "advisor", "--sharing", "shared", "--credit", "per-agent", *small]) == 0
    out = capsys.readouterr().out
    assert "advisor: generator, evaluator; adapters: shared; credit: per-agent" in out and "1/1  accuracy" in out
    assert (tmp_path / "run" / "shared" / "checkpoint-000001").is_dir()
    (row,) = log.read_metrics(tmp_path / "run" / "shared" / "metrics.jsonl")
    assert 0 <= row["correct"] <= 1 and set(row["roles"]) <= {"generator", "evaluator"}
    before = files(tmp_path / "run")
    assert train.main([run, "--resume"]) == 0 and files(tmp_path / "run") == before
    stored = train.stored_config(tmp_path / "run", WorkflowConfig)
    assert stored == replace(stored, workflow="advisor", sharing="shared", credit="per-agent", warmup=3)
