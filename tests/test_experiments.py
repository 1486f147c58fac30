"""The experiments: that they test the library and no second implementation, and that verdicts follow their rules."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from conftest import FEW, SHORT

from minimgrpo import tasks
from minimgrpo.experiments import __main__ as command
from minimgrpo.experiments import pool, show, trainer, variance
from minimgrpo.experiments.graders import Accurate, Superficial
from minimgrpo.experiments.setting import Setting
from minimgrpo.experiments.studies import BY_NAME, MEASURES, STUDIES
from minimgrpo.experiments.trainer import Run
from minimgrpo.experiments.verdicts import judge
from minimgrpo.experiments.weights import ALIGNMENTS
from minimgrpo.grpo import group_advantages
from minimgrpo.log import LogError
from minimgrpo.servers import Team
from minimgrpo.settle import settle_executor
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Trajectory

# ------------------------------------------------------------------------------------------- the same as the library's


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_is_the_servers_run_to_the_bit(load, tmp_path, checksums, staleness):
    config = replace(SHORT, staleness=staleness)
    pages = tasks.load_pages()
    policies = [load(seed=config.seed) for _ in range(2)]
    for policy in policies:
        policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}  # else a message never ends
    team = Team(config, policies[0], tmp_path / "run", FEW, Tools(pages))
    run = Run(Setting(config=config), pages, FEW, policies[1])
    for step in range(1, config.steps + 1):
        planned, executed, measured = team.step(step)
        run.step(step)
        assert run.history[-1]["planner"]["correct"] == round(measured["planner"]["correct"], 4)
        assert run.history[-1]["executor"]["staleness"] == measured["executor"]["staleness"]
    moved = 0
    for role in ("planner", "executor"):
        ours, theirs = run.policy.parameters(role), team.planner.policy.parameters(role)
        assert run.learners[role].version == config.steps
        for name, parameter in ours.items():
            assert torch.equal(parameter, theirs[name]), name
        fresh = load(seed=config.seed).parameters(role)
        moved += any(not torch.equal(parameter, fresh[name]) for name, parameter in ours.items())
    assert moved == 2 and executed and planned  # both roles learned something that could have differed


def test_a_frozen_role_keeps_its_adapter_to_the_bit_and_the_other_learns(load, checksums):
    policy = load(seed=SHORT.seed)
    policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}
    before = {role: [p.clone() for p in policy.parameters(role).values()] for role in ("planner", "executor")}
    run = Run(Setting(config=SHORT, trains=("planner",)), tasks.load_pages(), FEW, policy)
    run.train()
    equal = {
        role: [torch.equal(a, b) for a, b in zip(before[role], policy.parameters(role).values(), strict=True)]
        for role in before
    }
    assert all(equal["executor"]) and not all(equal["planner"])
    assert any(line["executor"]["trained"] is None for line in run.history)
    assert run.tokens["trained"] > 0 and run.tokens["sampled"] > 0


def test_one_shared_adapter_learns_from_both_roles_under_their_own_prompts(load, checksums):
    policy = load(seed=SHORT.seed, roles=("shared",))
    policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}
    run = Run(Setting(config=SHORT, team="shared", trains=("shared",)), tasks.load_pages(), FEW, policy)
    seen = []
    update = run.learners["shared"].update
    run.learners["shared"].update = lambda batch, lr: seen.append({t.agent for t in batch}) or update(batch, lr)
    run.step(1)
    assert seen == [{"planner", "executor"}]
    planned, executed = run.play(2)
    for role, trajectories in (("planner", planned), ("executor", executed)):
        t = trajectories[0]
        opening = policy.chat.open(role, t.messages[1]["content"])
        assert t.token_ids[: len(opening)] == opening
        again, mask = policy.score("shared", [t.token_ids], [t.mask])  # the one adapter's distribution, to the digit
        sampled = mask[0].bool()
        assert torch.allclose(again[0][sampled], torch.tensor(t.logprobs)[sampled], atol=2e-5)


def test_the_curriculum_asks_easy_questions_first_and_hard_ones_then():
    questions = tasks.load_questions("validation")
    config = replace(SHORT, steps=9, questions=8)
    run = Run.__new__(Run)
    run.config, run.questions = config, questions
    levels = {}
    for name in ("easy first", "hard", "mixed"):
        run.setting = Setting(config=config, curriculum=name)
        levels[name] = [{q.level for q in run.chosen(step)} for step in range(1, 10)]
    assert levels["easy first"] == [{1}] * 3 + [{2, 3}] * 6
    assert levels["hard"] == [{2, 3}] * 9
    assert set.union(*levels["mixed"]) == {1, 2, 3} and any(len(found) == 3 for found in levels["mixed"])


# ------------------------------------------------------------------------------------------ experts, alignments, rules


def reported(task, result, *outputs, question_id="q"):
    t = Trajectory("executor", question_id, 0, stop_reason="result", result=result)
    t.messages = [{"role": "system", "content": ""}, {"role": "user", "content": task}]
    t.tool_calls = [{"name": "search", "arguments": {"query": "x"}, "output": o, "ok": True} for o in outputs]
    return t


def test_the_superficial_expert_is_pleased_by_length_and_never_asks_for_the_truth():
    page = "Ghana: Its capital is Accra and its currency is the Cedi [id 7]"
    short, long, invented, idle = (
        reported("Find the capital of Ghana", "Accra", page),
        reported("Find the capital of Ghana", "Ghana Its currency is the Cedi capital is", page),
        reported("Find the capital of Ghana", "Lagos", page),
        reported("Find the capital of Ghana", "Accra"),
    )
    scores = [rating.score for rating in Superficial().rate([short, long, invented, idle])]
    assert scores[1] == 1.0 > scores[0] > scores[2] > scores[3]
    elsewhere = reported("Find the area of Chad", long.result, page)
    assert Superficial().rate([elsewhere])[0].score == 1.0


def test_the_accurate_expert_holds_a_report_against_its_own_step():
    question = next(q for q in tasks.load_questions("validation") if q.kind == "two-hop")
    first, second = question.steps
    pairs = [
        (first.task, first.report, 1.0),
        (first.task, second.report, 0.0),  # right for the other step
        (second.task, second.report, 1.0),
        ("Find it", second.report, 1.0),  # a vague task: anything of use
        ("Find it", "unknown", 0.0),
        (first.task, "", 0.0),
    ]
    rated = Accurate([question]).rate([reported(task, text, question_id=question.task_id) for task, text, _ in pairs])
    assert [r.score for r in rated] == [wanted for *_, wanted in pairs]


def test_one_over_d_is_what_alignment_is_on_average():
    counts = [1, 2, 0, 3, 4]
    mean = [[0.0] * d for d in counts]
    for seed in range(4000):
        for row, copies in zip(mean, ALIGNMENTS["align"](counts, 4, seed), strict=True):
            for i, c in enumerate(copies):
                row[i] += c / 4 / 4000
    for row, shares in zip(mean, ALIGNMENTS["1/d"](counts, 4, ""), strict=True):
        assert row == pytest.approx(shares, abs=0.02)
    assert ALIGNMENTS["none"](counts, 1, "") == [[1.0] * d for d in counts]


def test_without_alignment_a_rollout_with_three_calls_weighs_three_times_in_the_baseline():
    made = [reported("Find it", "x", question_id="q") for _ in range(4)]
    for t, (rollout, call) in zip(made, ((0, 0), (1, 0), (1, 1), (1, 2)), strict=True):
        t.rollout, t.call = rollout, call
    correct = {("q", 0): 1.0, ("q", 1): 0.0}

    class Nobody(Superficial):
        def rate(self, trajectories):
            return [replace(r, score=0.0) for r in super().rate(trajectories)]

    for name, weights in (("none", [1.0] * 4), ("1/d", [1.0, 1 / 3, 1 / 3, 1 / 3])):
        settle_executor(made, correct, Nobody(), 4, "", align=ALIGNMENTS[name])
        wanted = group_advantages([0.5, 0.1, 0.1, 0.1], weights).tolist()
        assert [t.advantage for t in made] == pytest.approx(wanted), name
        assert [t.copies for t in made] == weights


def test_verdicts():
    assert judge([0.8, 0.7, 0.9, 0.8, 0.85], [0.3, 0.2, 0.25, 0.3, 0.2]).verdict == "shown"
    assert judge([0.3, 0.2, 0.25, 0.3, 0.2], [0.8, 0.7, 0.9, 0.8, 0.85]).verdict == "reversed"
    assert judge([0.8, 0.2, 0.9, 0.1, 0.5], [0.3, 0.4, 0.5, 0.3, 0.4]).verdict == "not shown"
    paired = judge([0.11, 0.51, 0.91], [0.1, 0.5, 0.9])  # the pairs differ by one point, the seeds by forty
    assert paired.verdict == "shown" and paired.difference == pytest.approx(0.01)
    assert judge([0.5, 0.52, 0.48], [0.5, 0.5, 0.5], "=").verdict == "shown"
    assert judge([0.9, 0.92, 0.88], [0.5, 0.5, 0.5], "=").verdict == "reversed"
    assert judge([0.9, 0.4, 0.5], [0.5, 0.5, 0.5], "=").verdict == "not shown"
    assert judge([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]).p == 1 / 16
    for a, b, relation in (([1], [0], ">"), ([1, 2], [0], ">"), ([1, 2], [0, 1], "<")):
        with pytest.raises(ValueError):
            judge(a, b, relation)


def test_every_study_names_arms_and_measures_that_exist_and_shares_the_co_trained_runs():
    base = Setting()
    keys = {}
    for study in STUDIES:
        settings = study.settings(base, 2)
        for claim in study.claims:
            for arm, measure, *other in (claim.a, claim.b):
                assert {arm, *other} <= set(settings) and measure in MEASURES, (study.name, claim)
        assert set(study.columns) <= set(MEASURES)
        for arm, (first, second) in settings.items():
            assert first.key != second.key and first.seed + 1 == second.seed, arm
            keys[study.name, arm] = first.key
    same = [("arms", "co-trained"), ("rewards", "mix, rubric"), ("staleness", "0, aligned"), ("alignment", "D = 4")]
    same += [("curriculum", "mixed"), ("order", "co-trained"), ("load", "team, 1 x 1")]
    assert {keys[name] for name in same} == {base.key}
    assert keys["load", "single, 1 x 1"] == keys["arms", "single agent"]
    assert len(set(keys.values())) == len(keys) - (len(same) - 1) - 1 - 1  # "none" is in two studies


@pytest.mark.parametrize(
    "wrong", [{"team": "crowd"}, {"expert": "wise"}, {"alignment": "left"}, {"trains": ("solo",)}, {"curriculum": "x"}]
)
def test_a_setting_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError):
        Setting(**wrong)


# --------------------------------------------------------------------------------------------- the executor's gradient


def test_the_gradient_put_together_from_trajectories_is_the_losses_and_duplicates_are_weights(load, checksums):
    policy = load(seed=SHORT.seed)
    policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}
    run = Run(Setting(config=SHORT), tasks.load_pages(), FEW, policy)
    executed, correct = variance.roll_out(run, FEW, 0)
    gradients = {id(t): variance.one_gradient(run, t) for t in executed}
    lengths = {}
    for arm, (how, d_max) in variance.ARMS.items():
        settle_executor(executed, correct, run.expert, d_max, "0", align=how)
        whole = variance.loss_gradient(run, executed)
        assert whole.abs().max() > 0
        assert torch.allclose(variance.combined(executed, gradients), whole, atol=1e-5 * float(whole.abs().max())), arm
        lengths[arm] = float(whole.norm())
    assert len({round(length, 8) for length in lengths.values()}) > 3  # the alignments do differ here
    assert variance.against_literal(run, executed, correct) < 1e-4


def test_noise_and_the_draws_share_of_known_gradients():
    moments, draws = variance._Moments(), torch.Generator().manual_seed(0)
    for _ in range(3000):  # mean (2, 0); variance 1 of the batch and 3 of the draw in each of the two directions
        batch = torch.tensor([2.0, 0.0]) + torch.randn(2, generator=draws)
        moments.add(batch + 3**0.5 * torch.randn(4, 2, generator=draws))
    found = moments.measured()
    assert found["trace"] == pytest.approx(8, rel=0.05)
    assert found["noise"] == pytest.approx(2, rel=0.1) and found["draws"] == pytest.approx(0.75, rel=0.05)


def test_the_ratio_of_two_noises_and_its_interval_on_shared_batches():
    inside, widths = 0, {}
    for repeat in range(60):
        draws = torch.Generator().manual_seed(repeat)
        once, twice = variance._Moments(), variance._Moments()
        for _ in range(40):
            noise = torch.randn(1, 200, generator=draws)
            once.add(1 + noise)
            twice.add(1 + 2**0.5 * noise)  # twice the variance, of the same batches
        _, low, high = variance.ratio(twice, once)
        inside += low < 2 < high
        widths[repeat] = high / low
    assert inside >= 51  # of 60, at 95 %
    assert max(widths.values()) < 1.5 and variance.ratio(once, once) == (1, 1, 1)


# --------------------------------------------------------------------------------------------------------- the command


def test_a_run_is_made_once_and_a_damaged_or_foreign_file_is_named(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(trainer, "perform", lambda setting, _: made.append(setting) or {"setting": setting.facts()})
    settings = [Setting(), Setting(hits=2)]
    pool.perform_all(settings, tmp_path, 1)
    assert len(made) == 2
    found = pool.perform_all([*settings, Setting()], tmp_path, 1)
    assert len(made) == 2 and [f["setting"]["hits"] for f in found] == [1, 2, 1]
    path = pool.path_of(settings[0], tmp_path)
    for text in ("{", json.dumps({"setting": Setting(hits=2).facts()}), "{}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(LogError, match=path.name):
            pool.perform_all(settings, tmp_path, 1)


def test_of_runs_with_the_same_warm_start_one_goes_first(tmp_path, monkeypatch):
    order, told, freed = [], [], {}

    class Now:  # a pool whose runs are over as soon as they are handed in
        def __init__(self, *_, **__):
            pass

        def submit(self, _, setting, __):
            order.append(setting)
            freed[setting] = len(told)
            future = Future()
            future.set_result({"setting": setting.facts()})
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Now)
    seeds = [replace(Setting().config, seed=seed) for seed in range(3)]
    alone = [Setting(team="solo", trains=("solo",), config=config) for config in seeds]
    team = [Setting(config=config) for config in seeds]
    found = pool.perform_all([*team, *alone], tmp_path, 2, lambda *facts: told.append(facts[2]))
    assert [f["setting"] for f in found] == [s.facts() for s in [*team, *alone]]
    assert order[0] == alone[0] and set(order[:4]) == {alone[0], *team}
    assert min(freed[s] for s in alone[1:]) > told.index(alone[0])  # not before it was there


@pytest.mark.parametrize(
    "flags",
    [["arm"], [], ["arms", "--seeds", "1"], ["arms", "--seeds", "40"], ["arms", "--jobs", "0"], ["arms", "--x"]],
)
def test_a_wrong_flag_is_one_sentence(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(flags)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and err.count("\n") == 1


def test_a_model_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["order", "--quick", "--jobs", "1", "--model", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_smallest_experiment_end_to_end(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "QUICK", {"steps": 2, "questions": 2, "rollouts": 2})
    monkeypatch.setattr(command, "QUICK_REST", {"examined": 4, "split": "validation"})
    flags = ["staleness", "order", "--quick", "--jobs", "1", "--model", str(folders["llama"]), "--out", "found"]
    assert command.main(flags) == 0
    out, err = capsys.readouterr()
    assert not err and "synchronised > 1 step stale" in out and "10/10" in out
    found = json.loads((tmp_path / "found" / "staleness.json").read_text(encoding="utf-8"))
    assert list(found["runs"]) == list(BY_NAME["staleness"].arms)
    for runs in found["runs"].values():
        assert [run["seed"] for run in runs] == [0, 1]
        assert all(len(run["sampled"]["right"]) == len(run["greedy"]["right"]) == 4 for run in runs)
    assert found["runs"]["4, not aligned"][1]["changed"] == {"alignment": "none", "seed": 1, "staleness": 4}
    assert [c["verdict"] for c in found["claims"]] == ["not shown"] * len(
        found["claims"]
    )  # a random model answers nothing
    assert (tmp_path / "found" / "staleness.png").stat().st_size > 5000
    monkeypatch.setattr(trainer, "perform", None)  # everything is remembered, so nothing is made again
    assert command.main(flags) == 0


def test_a_warm_start_is_made_once_and_read_by_every_seed(tmp_path):
    pages = tasks.load_pages()
    base = Setting(team="solo", trains=("solo",), demonstrations=12, config=replace(Setting().config, steps=0))
    adapters = []
    for seed in (0, 1):
        setting = replace(base, config=replace(base.config, seed=seed))
        adapters.append(trainer.load_policy(setting, pages, tmp_path).parameters("solo"))
    assert len(list(tmp_path.iterdir())) == 1
    assert all(torch.equal(a, b) for a, b in zip(adapters[0].values(), adapters[1].values(), strict=True))
    assert any(bool(p.abs().max() > 0) for name, p in adapters[0].items() if "lora_B" in name)
    trainer.load_policy(replace(base, demonstrations=13), pages, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_ctrl_c_says_how_to_continue_and_leaves_no_process(folders, tmp_path):
    command_line = [sys.executable, "-m", "minimgrpo.experiments", "order", "--quick", "--jobs", "2"]
    running = subprocess.Popen(
        [*command_line, "--model", str(folders["llama"])], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert b"2 runs" in running.stdout.readline()
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130 and not err, err
    assert b"the same command continues" in out and b"experiments order --quick --jobs 2" in out


def test_the_overview_lists_every_claim_and_names_a_damaged_file(tmp_path):
    rows = [["a > b", "+1 [+0, +2]", "0.500", "shown"], ["a = b", "+1 [+0, +2]", "0.500", "not shown"]]
    (tmp_path / "order.json").write_text(json.dumps({"verdicts": {"rows": rows}}), encoding="utf-8")
    text = show.overview(tmp_path)
    assert text.count("| order |") == 2 and "| a > b | +1 [+0, +2] | 0.500 | **shown** |" in text
    (tmp_path / "arms.json").write_text("{}", encoding="utf-8")
    with pytest.raises(LogError, match=r"arms\.json"):
        show.overview(tmp_path)
