"""``train --decoupled`` with real processes, and what it does when one of them fails."""

import os
import signal
import subprocess
import sys
import time

import pytest

from minimgrpo import display, server, storm, train
from minimgrpo.log import RunLog


def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_run_stopped_in_one_process_and_continued_in_two_is_the_same(tmp_path, capsys, monkeypatch):
    """The model that ships (it does delegate), in a directory with spaces and other letters."""
    flags = ["--steps", "2", "--questions", "1", "--rollouts", "4", "--threads", "1", "--staleness", "1"]
    root, update = tmp_path / "zwei" / "mein Lauf äé", display.Progress.update

    def interrupted(progress, facts):
        update(progress, facts)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(display.Progress, "update", interrupted)
        assert train.main([str(root), *flags]) == 130
    assert train.main([str(root), "--decoupled", "--resume"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "2/2" in captured.out and "planner: process" in captured.out
    assert "bytes crossed between planner and executor, text and scalars only" in captured.out

    one = tmp_path / "eins" / "mein Lauf äé"
    assert train.main([str(one), *flags]) == 0
    assert storm.contents(root) == storm.contents(one)
    assert RunLog(one).traffic()["reports"] > 0
    assert server.main(["executor", str(one)]) == 0
    assert "all 2 steps are done" in capsys.readouterr().out


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Children that are small scripts: ``children(code)`` is what the executor does, the planner sleeps."""
    started = []

    def children(code):
        def start(role, *_):
            script = "import os, sys, time; " + (code if role == "executor" else "time.sleep(600)")
            complaints = open(tmp_path / role, "w+b")  # noqa: SIM115
            started.append(subprocess.Popen([sys.executable, "-c", script], stderr=complaints))
            started[-1].complaints = complaints
            return started[-1]

        monkeypatch.setattr(server, "start", start)
        return started

    return children


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.stderr.write('there is no such model\\n'); sys.exit(2)", "there is no such model"),
        ("os.kill(os.getpid(), 9)", "the executor was killed (signal 9): what was published is kept"),
    ],
)
def test_a_server_that_fails_ends_both_and_is_quoted_once(tmp_path, capsys, children, code, expected):
    started = children(code)
    assert train.main([str(tmp_path / "run"), "--decoupled"]) == 2
    text = capsys.readouterr().err
    assert expected in text and text.count("\n") == 1
    assert len(started) == 2 and not any(alive(child.pid) for child in started)


def test_ctrl_c_ends_both_and_says_how_to_go_on(tmp_path, capsys, children, monkeypatch):
    root, started = tmp_path / "run", children("time.sleep(600)")
    train.publish_config(root, train.Config())
    monkeypatch.setattr(time, "sleep", lambda _seconds: signal.raise_signal(signal.SIGINT))
    assert train.main([str(root), "--decoupled", "--resume"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "" and f"minimgrpo.train {root} --decoupled --resume" in captured.out
    assert len(started) == 2 and not any(alive(child.pid) for child in started)


def test_a_child_ends_with_its_parent(tmp_path, folders):
    child = server.start("executor", tmp_path / "run", ["--model", str(folders["llama"])])
    child.stdin.close()  # as when the parent is killed
    assert child.wait(timeout=120) == 130
