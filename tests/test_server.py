"""Two servers, one log: the same run to the bit as in one process, however often either of them is killed.

Run as a script, in a fresh process, this file is a storm of kills whose servers are forked with everything imported: a
server that starts in milliseconds can be killed dozens of times. (The executor runs no Python programs there, so that
forking is harmless.)
"""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FEW, SHORT, read_checksums
from rich.console import Console

import minimgrpo
from minimgrpo import display, log, metrics, server, storm, tasks, train
from minimgrpo.log import LogError, RunLog
from minimgrpo.policy import ModelError, Policy
from minimgrpo.protocol import ROLES
from minimgrpo.servers import ExecutorServer, PlannerServer, Team
from minimgrpo.tools import Tools

SHORT = replace(SHORT, seed=5)  # in which the executor has something to learn from, whatever the staleness
PAGES = tasks.load_pages()[:40]


def load(model, roles, config=SHORT):
    policy = Policy.load(str(model), seed=config.seed, roles=roles)
    policy.chat.stop_ids = {policy.chat.tokenizer.eos_token_id, *range(20, 90)}
    return policy


def new_team(model, root, config=SHORT):
    return Team(config, load(model, ROLES, config), root, FEW, Tools(PAGES))


def new_server(role, policy, root, config=SHORT):
    if role == "planner":
        return PlannerServer(config, policy, RunLog(root), FEW)
    return ExecutorServer(config, policy, RunLog(root), Tools(PAGES), keys=metrics.keys(FEW))


def quiet_line():
    return display.Line(Console(file=io.StringIO()))


def together(model, root, config=SHORT):
    """Both servers as in two processes, each with a base of its own; here they are two threads."""
    pair = [new_server(role, load(model, (role,), config), root, config) for role in ROLES]
    failures = []

    def work(each):
        torch.set_num_threads(config.threads)  # each Python thread has a setting of its own
        try:
            server.serve(each, quiet_line(), patience=600)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return pair


def steps(team, first=1, last=SHORT.steps):
    return [team.step(step) for step in range(first, last + 1)]


@pytest.fixture(scope="module")
def model(folders, checksums):
    return folders["llama"]


@pytest.fixture(scope="module")
def calm(model, tmp_path_factory):
    """``calm(staleness)``: the run in one process that nobody disturbs."""
    done = {}

    def calm(staleness=0):
        if staleness not in done:
            root = tmp_path_factory.mktemp("calm") / "run"
            steps(new_team(model, root, replace(SHORT, staleness=staleness)))
            done[staleness] = root
        return done[staleness]

    return calm


def one_sentence(capsys):
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.endswith("\n") and "Traceback" not in text, text
    return text


# ------------------------------------------------------------------------------------------ the same run, two processes


@pytest.mark.parametrize("staleness", [0, 2])
def test_two_servers_write_the_files_that_one_process_writes(model, calm, tmp_path, staleness):
    together(model, tmp_path / "run", replace(SHORT, staleness=staleness))
    got = storm.contents(tmp_path / "run")
    assert got == storm.contents(calm(staleness))
    assert any("reports" in name and content for name, content in got.items())  # they did talk


def test_a_run_may_go_on_the_other_way(model, calm, tmp_path):
    """The first step in one process, the second in two, the others in one."""
    config, root = replace(SHORT, staleness=2), tmp_path / "run"
    steps(new_team(model, root, config), 1, 1)
    planner, executor = pair = [new_server(role, load(model, (role,), config), root, config) for role in ROLES]

    def answered(path):
        executor.answer(2)
        return path

    for each in pair:
        each.resume()
    planner.play(2, answered)
    executor.play(2, log.first)
    for each in pair:
        each.learn(config.updates(each.role, 2))
    team = new_team(model, root, config)
    assert team.resume() == 2
    steps(team, 3)
    assert storm.contents(root) == storm.contents(calm(2))


def test_only_text_and_scalars_cross(calm):
    crossed = RunLog(calm()).traffic()
    paths = [*calm().glob("mail/*/*"), *calm().glob("outcomes/*")]
    assert sum(crossed.values()) == sum(path.stat().st_size for path in paths)
    assert min(crossed.values()) > 0
    values = [value for path in paths for row in log.read(path) for value in row.values()]
    assert values and {type(value) for value in values} <= {str, int, float, bool}
    assert f"{sum(crossed.values()):,} bytes crossed" in server.traffic_text(RunLog(calm()))


# --------------------------------------------------------------------------------------------------------- the kills


class Forked:
    """A server as a forked process, with what ``storm`` asks of one."""

    def __init__(self, work):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def wait(self, options=0):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def poll(self):
        return self.wait(os.WNOHANG)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def storm_of_forks(model: str, folder: Path, kills: int, seed: int, staleness: int) -> None:
    """One storm; prints the kills of each role. What is imported and loaded is shared by all the forks."""
    torch.set_num_threads(1)
    config = replace(SHORT, staleness=staleness)
    read_checksums(pytest.MonkeyPatch())
    policies, calm, stormy = {role: load(model, (role,)) for role in ROLES}, folder / "calm/run", folder / "stormy/run"
    team = new_team(model, calm, config)
    assert Forked(lambda: steps(team)).wait() == 0  # not here: autograd must not have run before a fork
    longest = os.times().children_user / config.steps  # seconds of CPU: on a busy machine the kills come all the faster

    def start(role):
        def work():
            with log.owned(stormy, role):  # a lock that outlived its process would refuse this
                server.serve(new_server(role, policies[role], stormy, config), quiet_line(), patience=600)

        return Forked(work)

    done = storm.storm(start, kills, random.Random(seed), longest)
    expected, got = storm.contents(calm), storm.contents(stormy)
    assert got == expected, [name for name in expected | got if expected.get(name) != got.get(name)]
    print(json.dumps(done))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the servers of this storm are forked")
def test_two_servers_that_are_killed_again_and_again_write_the_same_files(model, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(minimgrpo.__file__).parents[1])}
    command = [sys.executable, __file__, str(model), str(tmp_path), "40", "7", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert sum(kills[role] for role in ROLES) >= 20 and min(kills[role] for role in ROLES) >= 3, kills


# ------------------------------------------------------------------------------------------------------------ accidents


def damage(path):
    """One wrong byte, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "role", "staleness"),
    [
        ("adapter_model.safetensors", "planner", 0),
        ("optimizer.pt", "executor", 0),
        ("learner.json", "planner", 2),
        ("adapter_model.safetensors", "executor", 2),
    ],
)
def test_a_damaged_checkpoint_is_made_again(model, calm, tmp_path, capsys, name, role, staleness):
    config = replace(SHORT, staleness=staleness)
    root = tmp_path / "run"
    shutil.copytree(calm(staleness), root)
    path = root / role / "checkpoint-000004" / name
    path.write_text("{", encoding="utf-8") if name == "learner.json" else damage(path)
    team = new_team(model, root, config)
    first = team.resume() + 1
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"the {role}'s update 4 is made again" in said
    steps(team, first)
    assert storm.contents(root) == storm.contents(calm(staleness))


def test_without_a_whole_checkpoint_the_run_is_refused_except_at_its_start(model, calm, tmp_path, capsys):
    root = tmp_path / "run"
    shutil.copytree(calm(), root)
    for version in (3, 4):
        damage(root / f"planner/checkpoint-{version:06d}/optimizer.pt")
    with pytest.raises(ModelError, match=r"checkpoint-000004 is damaged .* put back a copy"):
        new_team(model, root).resume()
    assert (root / "planner/checkpoint-000004").exists()  # nothing was thrown away

    (tmp_path / "short").mkdir()
    short = replace(SHORT, steps=1)
    steps(new_team(model, tmp_path / "short/run", short), 1, 1)
    expected = storm.contents(tmp_path / "short/run")
    damage(tmp_path / "short/run/executor/checkpoint-000001/optimizer.pt")
    team = new_team(model, tmp_path / "short/run", short)
    assert team.resume() == 0
    team.step(1)
    assert storm.contents(tmp_path / "short/run") == expected


def test_a_trajectory_file_that_is_gone_is_named_not_made_anew_by_a_later_adapter(model, calm, tmp_path):
    shutil.copytree(calm(2), tmp_path / "run")
    for path in ("executor/step-000003.jsonl", "planner/step-000003.jsonl"):
        (tmp_path / "run" / path).unlink()
    for role in ROLES:
        each = new_server(role, load(model, (role,)), tmp_path / "run", replace(SHORT, staleness=2))
        each.resume()
        with pytest.raises(LogError, match=r"step-000003\.jsonl is missing"):
            each.play(3, log.first)


@pytest.mark.parametrize("room", [100, 20_000, 150_000])
def test_a_disk_that_fills_up_costs_nothing_but_the_time(model, calm, tmp_path, room):
    """In the mail, in the trajectories, in a checkpoint: whatever is written when the disk is full."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # no file may grow beyond it
    try:
        with pytest.raises(OSError, match="too large"):
            steps(new_team(model, tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    team = new_team(model, tmp_path / "run")
    steps(team, team.resume() + 1)
    assert storm.contents(tmp_path / "run") == storm.contents(calm())


def test_clocks_and_file_times_do_not_matter(model, calm, tmp_path, monkeypatch):
    root, jumps = tmp_path / "run", random.Random(0)
    steps(new_team(model, root), 1, 2)
    for path in root.rglob("*"):
        os.utime(path, (jumps.uniform(0, 4e9),) * 2)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(0, 4e9))
    together(model, root)
    assert storm.contents(root) == storm.contents(calm())


def test_a_redone_step_that_differs_is_refused(model, tmp_path):
    """As another machine or another number of threads might do it."""
    team = new_team(model, tmp_path / "run")
    team.step(1)
    requests = RunLog(tmp_path / "run").mail(1, 0, "requests")
    requests.write_text(requests.read_text(encoding="utf-8").replace('"task": "', '"task": "not '), encoding="utf-8")
    for role in ROLES:
        shutil.rmtree(tmp_path / "run" / role)
    with pytest.raises(LogError, match=r"turn-0\.requests\.jsonl was published by an earlier attempt"):
        new_team(model, tmp_path / "run").step(1)


def test_a_turn_that_was_done_is_not_done_again(model, calm, tmp_path):
    """What the planner was told counts: a program that reads the clock would say something else the second time."""
    team = new_team(model, tmp_path / "run")
    settle = team.executor.settle

    def killed(*_):
        raise KeyboardInterrupt

    team.executor.settle = killed
    with pytest.raises(KeyboardInterrupt):
        team.step(1)
    team.executor.serve, team.executor.settle = killed, settle
    _, executed, _ = team.step(1)
    assert [t.to_json() for t in executed] == log.read(RunLog(calm()).trajectories("executor", 1))


# ----------------------------------------------------------------------------------------------------------- staleness


@pytest.mark.parametrize("staleness", [0, 1, 3, 9])
def test_the_executor_serves_with_the_version_that_staleness_says(model, calm, staleness):
    root, ratios = calm(staleness), {0: [], 1: []}
    for step in range(1, SHORT.steps + 1):
        versions = {
            role: {t["policy_version"] for t in log.read(RunLog(root).trajectories(role, step))} for role in ROLES
        }
        assert versions == {"planner": {step - 1}, "executor": {max(0, step - 1 - staleness)}}
        for role, late in (("planner", 0), ("executor", staleness)):
            measured = log.read_metrics(RunLog(root).metrics(role))[step - 1]
            assert measured["step"] == step and measured["staleness"] == min(late, step - 1)
            if measured["trained"]:  # else there were no ratios
                ratios[measured["staleness"] > 0].append(measured["ratio_max"])
    assert ratios[False] == pytest.approx([1] * len(ratios[False]), abs=1e-4)
    assert not staleness or max(ratios[True]) > 1.001  # the importance ratio has something to do


def test_stale_and_synchronised_runs_differ(calm):
    adapters = [calm(n) / "executor/checkpoint-000004/adapter_model.safetensors" for n in (0, 1, 3)]
    assert len({path.read_bytes() for path in adapters}) == 3


def test_a_stale_run_that_is_stopped_after_any_step_continues_exactly(model, calm, tmp_path):
    config = replace(SHORT, staleness=2)
    for stop in (1, 3):
        root = tmp_path / str(stop) / "run"
        steps(new_team(model, root, config), 1, stop)
        team = new_team(model, root, config)
        assert team.resume() == stop
        steps(team, stop + 1)
        assert storm.contents(root) == storm.contents(calm(2))


# ------------------------------------------------------------------------------------------- waiting, and being refused


def waiting(root, screen, patience):
    each = type("AServer", (), {"role": "planner", "log": RunLog(root), "config": SHORT})
    return server.Waiting(each, display.Line(screen), patience)


def test_a_server_without_its_peer_says_so_and_gives_up(tmp_path):
    text = io.StringIO()
    wait = waiting(tmp_path, Console(file=text, width=200), 1.2)
    with pytest.raises(LogError, match=r"executor has published nothing for 1.2 s .* minimgrpo\.server executor"):
        wait(tmp_path / "mail/step-000001/turn-0.reports.jsonl")
    assert text.getvalue().count("\n") == 1  # said once, not at every look
    assert "waiting for the executor (mail/step-000001/turn-0.reports.jsonl)" in text.getvalue()


def test_waiting_sleeps_and_ends_soon_after_the_file_is_there(tmp_path, monkeypatch):
    looks, naps, sleep = [], [], time.sleep
    monkeypatch.setattr(log, "first", lambda *paths: looks.append(1) or (paths[1] if len(looks) > 200 else None))
    monkeypatch.setattr(time, "sleep", lambda seconds: naps.append(seconds) or sleep(seconds / 10))
    found = waiting(tmp_path, Console(file=io.StringIO()), 60)(tmp_path / "a", tmp_path / "b")
    assert found == tmp_path / "b"
    assert len(naps) == 200 and naps[0] < 0.002 and max(naps) <= 0.05 and naps == sorted(naps)


def test_in_a_terminal_the_line_is_rewritten(tmp_path):
    text = io.StringIO()
    with display.Line(Console(file=text, force_terminal=True, width=80)) as line:
        for seconds in range(5):
            line.state(f"waiting, {seconds} s")
        line.keep("step 1 done")
    assert text.getvalue().count("step 1 done") == 1 and "waiting, 4 s" in text.getvalue()
    assert text.getvalue().count("\n") <= 2


def test_a_second_server_of_a_role_is_refused(tmp_path, capsys):
    root = tmp_path / "mein Lauf äé"
    train.publish_config(root, SHORT)
    with log.owned(root, "planner"):
        assert server.main(["planner", str(root)]) == 2
        text = one_sentence(capsys)
        assert "another planner" in text and f"process {os.getpid()}" in text and "mein Lauf äé" in text
        with log.owned(root, "executor"):
            pass
    with log.owned(root, "planner"):
        pass


def test_the_flags_of_the_second_server_must_be_those_of_the_first(tmp_path, capsys, monkeypatch):
    root = tmp_path / "run"
    train.publish_config(root, SHORT)
    assert server.main(["executor", str(root), "--steps", "9", "--staleness", "1"]) == 2
    text = one_sentence(capsys)
    assert "was started with steps = 4, staleness = 0" in text

    def load_slowly(role, _root, _config):  # and the peer starts another run meanwhile
        train.publish_config(tmp_path / "late", SHORT)

    monkeypatch.setattr(server, "load", load_slowly)
    assert server.main(["executor", str(tmp_path / "late"), "--steps", "9"]) == 2
    assert "was started with" in one_sentence(capsys)
    assert train.stored_config(tmp_path / "late") == SHORT


@pytest.mark.parametrize("links", [True, False])
def test_the_first_config_stays(tmp_path, monkeypatch, links):
    def no_links(*_):
        raise PermissionError("this disk has no hard links")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for config in (SHORT, replace(SHORT, steps=9)):
        train.publish_config(tmp_path / "run", config)
    assert train.stored_config(tmp_path / "run") == SHORT
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (["judge", "RUN"], "judge"),
        (["planner", "RUN", "--patience", "nan"], "patience"),
        (["planner", "RUN", "--staleness", "-1"], "staleness"),
        (["planner", "RUN", "--model", "/nosuch/folder"], "/nosuch/folder"),
        (["planner", "RUN", "--resume"], "there is no run in"),
    ],
)
def test_nonsense_is_one_sentence_and_writes_nothing(bad, word, tmp_path, capsys):
    try:
        code = server.main([str(tmp_path / "run") if part == "RUN" else part for part in bad])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2 and word in one_sentence(capsys)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_things_in_it_is_no_run(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    assert server.main(["planner", str(tmp_path)]) == 2
    assert "exists" in one_sentence(capsys) and [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders are made read-only otherwise here")
def test_a_read_only_run_is_one_sentence(capsys):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder) / "run"
        train.publish_config(root, SHORT)
        root.chmod(0o555)
        root_user = os.geteuid() == 0
        if root_user:
            os.seteuid(65534)  # root may write everywhere
        try:
            assert server.main(["planner", str(root)]) == 2
        finally:
            if root_user:
                os.seteuid(0)
        text = one_sentence(capsys)
        assert "Permission denied" in text and str(root) in text
        root.chmod(0o755)


if __name__ == "__main__":
    storm_of_forks(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
