"""Planner and executor as two real processes with the model that ships (test_server has them as threads)."""

import os
import signal

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
def test_train_decoupled_stopped_and_continued(tmp_path, capsys, monkeypatch):
    """The model that ships (it does delegate), real processes, a name with spaces; Ctrl-C after the first step."""
    flags = ["--steps", "3", "--questions", "2", "--rollouts", "4", "--threads", "1", "--staleness", "1"]
    root, started = tmp_path / "zwei" / "mein Lauf äé", []
    start, update = server.start, display.Progress.update

    def interrupted(progress, facts):
        update(progress, facts)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server, "start", lambda *args: started.append(start(*args)) or started[-1])
    with monkeypatch.context() as patch:
        patch.setattr(display.Progress, "update", interrupted)
        assert train.main([str(root), "--decoupled", *flags]) == 130
    captured = capsys.readouterr()
    assert captured.err == "" and f"minimgrpo.train '{root}' --decoupled --resume" in captured.out
    assert len(started) == 2 and not any(alive(child.pid) for child in started)

    assert train.main([str(root), "--decoupled", "--resume"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "3/3" in captured.out
    assert "bytes crossed between planner and executor, text and scalars only" in captured.out

    one = tmp_path / "eins" / "mein Lauf äé"
    assert train.main([str(one), *flags]) == 0
    assert storm.contents(root) == storm.contents(one)
    assert RunLog(one).traffic()["reports"] > 0
    assert server.main(["executor", str(one)]) == 0
    assert "all 3 steps are done" in capsys.readouterr().out
