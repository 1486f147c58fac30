"""A whole run of both servers: advantages, alignment, the files, and a run that is killed and continued.

A checksum of a message decides what it meant (``conftest.checksums``). Everything else is real: sampling, tools, mail,
rewards, alignment, updates, checkpoints.
"""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import FEW, SHORT

from minimgrpo import agents, log, settle, tasks
from minimgrpo.alignment import duplicate
from minimgrpo.experts import Rating
from minimgrpo.grpo import group_advantages
from minimgrpo.learner import Objective
from minimgrpo.log import LogError, RunLog
from minimgrpo.policy import ModelError, Policy
from minimgrpo.servers import Config, ExecutorServer, PlannerServer, Team
from minimgrpo.storm import contents as files
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory


@pytest.fixture(scope="module")
def new_team(folders, checksums):
    """A new team over the run in ``root``, as a new process would build it."""
    tools = Tools(tasks.load_pages()[:40])

    def new_team(root, questions=FEW, config=SHORT, expert=None):
        policy = Policy.load(str(folders["llama"]), seed=config.seed)
        policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}
        return Team(config, policy, root, questions, tools, expert)

    return new_team


@pytest.fixture(scope="module")
def run(new_team, tmp_path_factory):
    """Four steps in one go, and what stood on the disk after three of them."""
    folder = tmp_path_factory.mktemp("straight")
    team = new_team(folder / "run")
    results = []
    for step in range(1, 5):
        results.append(team.step(step))
        if step == 3:
            shutil.copytree(folder / "run", folder / "after-3")
    return {"root": folder / "run", "after 3": folder / "after-3", "results": results, "team": team}


# ------------------------------------------------------------------------------------------------- killed and continued


def test_the_run_is_worth_comparing(run):
    """It delegates, it disagrees about rewards, both adapters move, and every first pass is on-policy."""
    for planned, executed, metrics in run["results"]:
        assert len(planned) == 8 and executed
        for role in ("planner", "executor"):
            ratio = metrics[role]["ratio_max"]
            assert ratio == pytest.approx(1, abs=1e-4) or (ratio is None and metrics[role]["trained"] == 0)
    everyone = [t for planned, executed, _ in run["results"] for t in planned + executed]
    for role in ("planner", "executor"):
        assert sum(t.advantage != 0 for t in everyone if t.agent == role) > 6
    assert {t.stop_reason for t in everyone} >= {"result", "format", "length"}
    fresh = Policy.load(run["team"].planner.policy.name, seed=SHORT.seed)
    for role in ("planner", "executor"):
        trained = run["team"].planner.policy.parameters(role)
        assert all(not torch.equal(p, trained[name]) for name, p in fresh.parameters(role).items())


def test_four_steps_equal_two_and_two_of_a_new_process_to_the_bit(run, new_team, tmp_path):
    first = new_team(tmp_path / "run")
    for step in (1, 2):
        first.step(step)
    second = new_team(tmp_path / "run")
    assert second.resume() == 2
    for step in (3, 4):
        second.step(step)
    assert files(tmp_path / "run") == files(run["root"])  # ids, log-probs, rewards, mail, adapters, optimizers


def remove(*names):
    def damage(root):
        for name in names:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def leave_temporary_files(root):
    """Killed while both checkpoints and the executor's trajectories were being written."""
    for name in ("planner/checkpoint-000003", "executor/checkpoint-000003"):
        (root / name).rename(root / f"{name}.tmp")
        (root / f"{name}.tmp" / "optimizer.pt").write_bytes(b"half")
    (root / "executor/step-000003.jsonl").unlink()
    (root / "executor/step-000003.jsonl.tmp").write_text('{"agent": "exe', encoding="utf-8")


def lose_a_line(root):
    """Killed after the trajectories and before the executor's metrics; the planner's were written already."""
    remove(*BOTH)(root)
    path = root / "executor/metrics.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")


BOTH = ("planner/checkpoint-000003", "executor/checkpoint-000003")
KILLS = {
    "after the planner's update": remove(BOTH[1]),
    "after the executor's update": remove(BOTH[0]),
    "between the rollouts and the updates": remove(*BOTH),
    "between the planner's metrics and the executor's": lose_a_line,
    "between the two trajectory files": remove(*BOTH, "executor/step-000003.jsonl"),
    "before the trajectory files": remove(*BOTH, "executor/step-000003.jsonl", "planner/step-000003.jsonl"),
    "during the rollouts": remove(
        *BOTH,
        *("executor/step-000003.jsonl", "planner/step-000003.jsonl", "outcomes/step-000003.jsonl"),
        "mail/step-000003/turn-0.reports.jsonl",
    ),
    "with temporary files left": leave_temporary_files,
    "between two steps": remove(),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_run_killed_and_continued_is_the_run_that_never_was(run, new_team, tmp_path, when):
    shutil.copytree(run["after 3"], tmp_path / "run")
    KILLS[when](tmp_path / "run")
    team = new_team(tmp_path / "run")
    done = team.resume()
    assert done == (3 if when == "between two steps" else 2)
    for step in range(done + 1, 5):
        team.step(step)
    assert files(tmp_path / "run") == files(run["root"])


def test_an_update_that_was_finished_before_the_kill_is_not_made_again(run, new_team, tmp_path):
    shutil.copytree(run["after 3"], tmp_path / "run")
    remove("executor/checkpoint-000003")(tmp_path / "run")
    team = new_team(tmp_path / "run")
    team.resume()
    rows = (tmp_path / "run/planner/metrics.jsonl").read_bytes()
    _, _, measured = team.step(3)
    assert (tmp_path / "run/planner/metrics.jsonl").read_bytes() == rows  # to the second
    assert measured["planner"] == log.read(RunLog(tmp_path / "run").metrics("planner"))[2]
    assert measured["executor"]["sample_seconds"] is None  # they were read back
    assert (team.planner.learner.version, team.executor.learner.version) == (3, 3)


def test_a_step_interrupted_and_repeated_in_the_same_process_counts_nothing_twice(run, new_team, tmp_path):
    team = new_team(tmp_path / "run")
    serve, interrupted = team.executor.serve, []

    def interrupt_once(step, turn, sub_tasks):
        reports = serve(step, turn, sub_tasks)
        if not interrupted:
            interrupted.append(step)
            raise KeyboardInterrupt
        return reports

    team.executor.serve = interrupt_once
    with pytest.raises(KeyboardInterrupt):
        team.step(1)
    team.step(1)
    name = "executor/step-000001.jsonl"
    assert files(tmp_path / "run")[name] == files(run["root"])[name]


def test_a_damaged_checkpoint_or_trajectory_file_is_named(run, new_team, tmp_path):
    shutil.copytree(run["after 3"], tmp_path / "run")
    path = tmp_path / "run/planner/step-000003.jsonl"
    whole = path.read_text(encoding="utf-8")
    remove(*BOTH)(tmp_path / "run")
    team = new_team(tmp_path / "run")
    team.resume()
    for damage in (whole[:-50], whole.replace('"mask"', '"musk"', 1), "5\n", '"mask"\n', "[]\n"):
        path.write_text(damage, encoding="utf-8")
        with pytest.raises(LogError, match=r"step-000003\.jsonl"):
            team.step(3)
    (tmp_path / "run/planner/checkpoint-000002/optimizer.pt").write_bytes(b"half")
    with pytest.raises(ModelError, match="checkpoint-000002"):
        new_team(tmp_path / "run").resume()


# ------------------------------------------------------------------------------------------------------------ the files


def test_every_file_of_a_run_is_one_of_the_documented_ones(run):
    names = files(run["root"])
    expected = {f"{role}/step-{step:06d}.jsonl" for role in ("planner", "executor", "outcomes") for step in range(1, 5)}
    parts = ("adapter_config.json", "adapter_model.safetensors", "learner.json", "optimizer.pt")
    expected |= {"planner/metrics.jsonl", "executor/metrics.jsonl"}
    for role in ("planner", "executor"):  # the last two are kept
        expected |= {f"{role}/checkpoint-{step:06d}/{part}" for step in (3, 4) for part in parts}
    mail = {name for name in names if name.startswith("mail/")}
    assert {n for n in names if "README" not in n} - mail == expected
    assert all(name.endswith((".requests.jsonl", ".reports.jsonl")) for name in mail)


def test_the_mail_says_who_asked_what_and_what_came_back(run):
    for step, (planned, executed, _) in enumerate(run["results"], 1):
        asked = {(t.question_id, t.rollout, call): c for t in planned for call, c in enumerate(t.tool_calls)}
        did = {(t.question_id, t.rollout, t.call): t for t in executed}
        sent = {}
        for path in sorted(run["root"].glob(f"mail/step-{step:06d}/*.requests.jsonl")):
            reports = log.read(path.with_name(path.name.replace("requests", "reports")))
            for request, report in zip(log.read(path), reports, strict=True):
                key = request["question_id"], request["rollout"], request["call"]
                sent[key] = True
                assert asked[key]["arguments"]["task"] == request["task"] == did[key].messages[1]["content"]
                assert (asked[key]["output"], asked[key]["ok"]) == (report["text"], report["ok"])
        assert sent.keys() == asked.keys() == did.keys()


def test_every_step_has_one_line_of_metrics_in_each_role(run):
    for role in ("planner", "executor"):
        rows = log.read_metrics(RunLog(run["root"]).metrics(role))
        assert [row["step"] for row in rows] == [1, 2, 3, 4] and {row["role"] for row in rows} == {role}
        assert rows == [measured[role] for *_, measured in run["results"]]
        assert len({tuple(row) for row in rows}) == 1  # the same names in every line
        for row, (planned, executed, _) in zip(rows, run["results"], strict=True):
            batch = planned if role == "planner" else executed
            assert row["trajectories"] == len(batch) and row["staleness"] == 0
            assert row["reward"] == pytest.approx(sum(t.reward for t in batch) / len(batch))
            assert row["sample_seconds"] > 0 and row["sample_tokens_per_second"] > 0
    assert any(row["query_specificity"] is not None for row in rows)  # the executor's server knows the keys


def test_the_planners_sampling_time_does_not_count_its_waiting(run, new_team, tmp_path):
    team, spent = new_team(tmp_path / "run"), {}

    def timed(server, name):
        method = getattr(server, name)

        def call(*arguments):
            started = time.perf_counter()
            result = method(*arguments)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(server, name, call)

    timed(team.planner, "rollout")
    timed(team.executor, "serve")
    _, _, measured = team.step(1)
    assert measured["planner"]["sample_seconds"] < spent["rollout"] - spent["serve"]
    assert 0 < measured["executor"]["sample_seconds"] <= spent["serve"]


def test_the_glossary_has_every_metric_and_no_other(run):
    glossary = Path(__file__).parents[1] / "docs" / "metrics.md"
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    for role in ("planner", "executor"):
        documented = {name for name, who in rows if who in ("both", role)}
        assert documented == set(run["results"][0][2][role])


def test_metrics_that_were_removed_are_measured_again_without_their_updates(run, new_team, tmp_path):
    shutil.copytree(run["after 3"], tmp_path / "run")
    remove("executor/metrics.jsonl")(tmp_path / "run")
    team = new_team(tmp_path / "run")
    assert team.resume() == 3
    team.step(4)
    for found, row in zip(log.read(RunLog(tmp_path / "run").metrics("executor")), run["results"], strict=True):
        expected = row[2]["executor"]
        assert found.keys() == expected.keys()
        lost = {name for name in found if found[name] != expected[name] and "second" not in name}
        assert all(found[name] is None for name in lost) and ("trained" in lost) == (found["step"] < 4)


def test_the_outcomes_are_one_scalar_per_rollout_and_reach_the_executors_rewards(run):
    for step, (planned, executed, _) in enumerate(run["results"], 1):
        rows = log.read(RunLog(run["root"]).outcomes(step))
        assert rows == [
            {"question_id": t.question_id, "rollout": t.rollout, "correct": t.reward_parts["correct"]} for t in planned
        ]
        correct = {(row["question_id"], row["rollout"]): row["correct"] for row in rows}
        assert all(t.reward_parts["planner_correct"] == correct[t.question_id, t.rollout] for t in executed)


def test_the_published_trajectories_are_those_that_were_trained_on(run, new_team):
    for step, (planned, executed, _) in enumerate(run["results"], 1):
        for server, trajectories in ((run["team"].planner, planned), (run["team"].executor, executed)):
            assert server.published(step) == trajectories
        for t in planned + executed:
            assert (t.run, t.step, t.policy_version) == ("run", step, step - 1)
            assert len(t.token_ids) == len(t.mask) == len(t.logprobs)


def test_datasets_reads_the_trajectories_of_a_run(run, tmp_path):
    import datasets

    datasets.disable_progress_bars()
    path = RunLog(run["root"]).trajectories("planner", 1)
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert [r["token_ids"] for r in rows] == [t.token_ids for t in run["results"][0][0]]


def test_no_gold_answer_is_in_any_file_of_a_run_nor_shown_to_the_expert(new_team, tmp_path):
    questions = [dataclasses.replace(q, answer="GOLD-7F3A") for q in FEW]
    shown = []

    class Spy:
        def rate(self, trajectories):
            shown.extend(json.dumps(t.to_json()) for t in trajectories)
            return [Rating(0.5, {}) for _ in trajectories]

    new_team(tmp_path / "run", questions, expert=Spy()).step(1)
    assert shown and not [text for text in shown if "GOLD" in text]
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"GOLD" in p.read_bytes()]


# ----------------------------------------------------------------------------------------------- rewards and advantages


class Fixed:
    """An expert that reads its rating off the report."""

    def rate(self, trajectories):
        return [Rating(float(t.result), {}) for t in trajectories]


@pytest.fixture
def executor(load, tmp_path):
    config = Config(rollouts=3, d_max=4, threads=1)
    return ExecutorServer(config, load(), RunLog(tmp_path / "run"), None, Fixed())


def did(question, rollout, call, expert):
    return Trajectory("executor", question, rollout, call, stop_reason="result", result=str(expert))


def outcomes(*questions, correct=(0.0, 0.0, 0.0)):
    return [{"question_id": q, "rollout": k, "correct": c} for q in questions for k, c in enumerate(correct)]


DONE = [  # of three rollouts the first delegated twice, the second never, the third six times
    *(did("a", 0, call, expert) for call, expert in enumerate((0.0, 1.0))),
    *(did("a", 2, call, expert) for call, expert in enumerate((0.2, 0.4, 0.6, 0.8, 0.5, 0.3))),
]


def settled(executor, done, rows, step=1):
    executor.done = [Trajectory(**vars(t)) for t in done]
    return executor.settle(step, rows)


def test_each_rollout_that_delegated_counts_as_d_max_executor_trajectories(executor):
    found = settled(executor, DONE, outcomes("a"))
    copies = {k: [t.copies for t in found if t.rollout == k] for k in range(3)}
    assert [sum(c) for c in copies.values()] == [4, 0, 4]
    assert min(copies[0]) >= 1 and sorted(copies[2]) == [0, 0, 1, 1, 1, 1]  # nothing lost below D, two dropped above


def test_the_executors_advantages_are_those_of_the_aligned_batch_written_out(executor):
    found = settled(executor, DONE, outcomes("a", correct=(1.0, 0.0, 0.0)))
    by_rollout = [[t for t in found if t.rollout == k] for k in range(3)]
    literal = duplicate(by_rollout, [[t.copies for t in ts] for ts in by_rollout])
    expected = group_advantages([t.reward for t in literal])
    assert torch.allclose(torch.tensor([t.advantage for t in literal]), expected, atol=1e-6)
    assert len(literal) == 8 and expected.sum().abs() < 1e-5
    assert all(t.advantage == 0 for t in found if t.copies == 0)


def test_the_reward_of_an_executor_by_hand(executor):
    found = settled(executor, DONE, outcomes("a", correct=(1.0, 0.0, 0.0)))
    assert [t.reward for t in found[:3]] == pytest.approx([0.1 + 0.4, 0.1 + 0.4 + 0.5, 0.1 + 0.5 * 0.2])
    assert found[1].reward_parts == {"format": 1.0, "planner_correct": 1.0, "expert": 1.0}
    broken = did("a", 0, 0, 1.0)
    broken.stop_reason = "format"
    [t] = settled(executor, [broken], outcomes("a", correct=(1.0, 0.0, 0.0)))
    assert t.reward == 0.0 and t.reward_parts["format"] == 0.0


def test_each_question_is_its_own_group(executor):
    one = settled(executor, DONE, outcomes("a"))
    other = [did("b", k, 0, 1.0) for k in range(3)]
    both = settled(executor, [*other, *DONE], outcomes("a", "b"))
    assert [t.advantage for t in both if t.question_id == "a"] == [t.advantage for t in one]
    assert all(t.advantage == 0 for t in both if t.question_id == "b")  # all the same reward


def test_a_question_without_any_delegation_is_skipped_by_the_executor(executor):
    assert settled(executor, [], outcomes("a")) == []
    found = settled(executor, DONE, outcomes("nobody asked", "a"))
    assert len(found) == len(DONE) and {t.question_id for t in found} == {"a"}
    assert executor.learner.update([])["trained"] == 0


def test_the_alignment_is_drawn_anew_in_each_step_and_repeated_for_the_same(executor):
    def copies(step):
        return [t.copies for t in settled(executor, DONE, outcomes("a"), step)]

    assert copies(1) == copies(1)
    assert len({tuple(copies(step)) for step in range(8)}) > 1


def planner_with(load, tmp_path, monkeypatch, trajectories):
    monkeypatch.setattr(agents, "plan", lambda *_args: trajectories)
    monkeypatch.setattr(settle, "gaia_score", lambda prediction, gold: prediction == gold)
    config = Config(questions=1, rollouts=len(trajectories), threads=1)
    question = tasks.Question("q", "?", 1, "right", "lookup", (), (), ())
    return PlannerServer(config, load(), RunLog(tmp_path / "run"), [question])


def planned(rollout, result, turns=1):
    t = Trajectory("planner", "q", rollout, stop_reason="result" if result else "format", result=result)
    for _ in range(turns):
        t.read("user", "?", [1] * 5)
        t.wrote("!", [2] * 7, [-1.0] * 7)
    return t


def test_a_long_rollout_weighs_no_more_than_a_short_one_in_the_planners_baseline(load, tmp_path, monkeypatch):
    """One turn with reward 0 and three turns with reward 1: the baseline is 0.5 and not 0.75."""
    server = planner_with(load, tmp_path, monkeypatch, [planned(0, ""), planned(1, "right", turns=3)])
    found = server.rollout(1, None)
    assert [t.reward for t in found] == [0.0, 1.0]
    assert [t.advantage for t in found] == [-1.0, 1.0]


def test_the_planners_reward_by_hand(load, tmp_path, monkeypatch):
    server = planner_with(load, tmp_path, monkeypatch, [planned(0, "right"), planned(1, "wrong"), planned(2, "")])
    found = server.rollout(1, None)
    assert [t.reward for t in found] == pytest.approx([1.0, 0.1, 0.0])
    assert [t.reward_parts for t in found] == [
        {"format": 1.0, "correct": 1.0},
        {"format": 1.0, "correct": 0.0},
        {"format": 0.0, "correct": 0.0},
    ]


def test_planner_and_executor_have_separate_baselines(load, tmp_path, monkeypatch, executor):
    """Rewards of 0 and 1 here, of 0.5 and 0.6 there: each pair is -1 and +1, and neither sees the other's mean."""
    server = planner_with(load, tmp_path, monkeypatch, [planned(0, ""), planned(1, "right")])
    assert [t.advantage for t in server.rollout(1, None)] == [-1.0, 1.0]
    found = settled(executor, [did("a", 0, 0, 0.8), did("a", 1, 0, 1.0)], outcomes("a"))
    assert [t.reward for t in found] == pytest.approx([0.5, 0.6])
    assert [t.advantage for t in found] == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_each_group_of_the_planner_is_one_question(run):
    for planned_here, _, _ in run["results"]:
        for start in (0, 4):
            group = planned_here[start : start + 4]
            assert len({t.question_id for t in group}) == 1 and [t.rollout for t in group] == [0, 1, 2, 3]
            expected = group_advantages([t.reward for t in group]).tolist()
            assert [t.advantage for t in group] == expected


# ----------------------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    "wrong",
    [
        {"rollouts": 1},
        {"d_max": 0},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"questions": 0},
        {"steps": -1},
        {"rank": 0},
        {"threads": 0},
        {"objective": Objective(lr=0.0)},
        {"objective": Objective(lr=float("nan"))},
    ],
)
def test_a_config_that_cannot_work_is_refused_with_the_value_in_the_sentence(wrong):
    [value] = wrong.values()
    value = value.lr if isinstance(value, Objective) else value
    with pytest.raises(ValueError, match=f"{value}"):
        Config(**wrong)


def test_the_learning_rate_falls_to_a_tenth_from_the_middle_of_the_run_on():
    config = Config(steps=80, decay=0.5, objective=Objective(lr=1e-3))
    assert [config.lr(step) for step in (1, 40, 60, 80)] == pytest.approx([1e-3, 1e-3, 0.55e-3, 1e-4])
    assert Config(steps=0).lr(1) > 0 and Config(steps=1).lr(1) > 0


def test_the_questions_of_a_step_are_always_the_same_and_differ_from_step_to_step(run):
    planner = run["team"].planner
    chosen = [tuple(q.task_id for q in planner.chosen(step)) for step in range(20)]
    assert chosen == [tuple(q.task_id for q in planner.chosen(step)) for step in range(20)]
    assert len(set(chosen)) > 5 and all(len(set(c)) == 2 for c in chosen)


def test_a_team_fixes_the_number_of_threads(run):
    assert torch.get_num_threads() == SHORT.threads


def test_run_paths_are_plain(run):
    assert Path(run["root"]).name == "run"
    assert all(re.fullmatch(r"[A-Za-z0-9._/-]+", name) for name in files(run["root"]))
