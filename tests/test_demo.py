"""The commands as a person uses them: a whole quick demo, Ctrl-C and --resume, and every kind of bad input."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from minimgrpo import demo, log, report, settle, tasks, train
from minimgrpo.log import RunLog
from minimgrpo.servers import Config

SMALL = ["--threads", "1", "--questions", "3", "--rollouts", "2", "--length", "8"]
FILES = (
    "config.json",
    "summary.json",
    "curves.png",
    "report.html",
    "planner/step-000003.jsonl",
    "executor/step-000003.jsonl",
)


@pytest.fixture(scope="module")
def flags(folders):
    return ["--quick", "--model", str(folders["llama"]), *SMALL]


@pytest.fixture
def fast(monkeypatch):
    """Fewer questions, no figure, and pay: random models are never right, so pay for what differs and adapters move."""

    def pay(trajectories, _questions):
        for t in trajectories:
            t.reward = sum(t.token_ids) % 7 / 7
            t.reward_parts = {"format": 0.0, "correct": 0.0}

    monkeypatch.setattr(settle, "reward_planner", pay)
    monkeypatch.setattr(demo, "QUICK_QUESTIONS", 4)
    monkeypatch.setattr(report, "draw_curves", lambda path, *_: path.write_bytes(b"a figure"))


def adapter(run, role="planner", step=3):
    return load_file(run / role / f"checkpoint-{step:06d}" / "adapter_model.safetensors")


def one_sentence(capsys):
    """What stderr got, which must be one line and no traceback."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.endswith("\n") and "Traceback" not in text, text
    return text


# --------------------------------------------------------------------------------------------------- a normal run


def test_the_quick_demo_as_a_command(flags, tmp_path):
    run = tmp_path / "mein Lauf äé"
    command = [sys.executable, "-m", "minimgrpo.demo", *flags, "--out", str(run)]
    environment = {**os.environ, "PYTHONWARNINGS": "default", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert not any(ord(c) < 32 and c != "\n" for c in done.stdout)  # plain text: no control codes
    assert "accuracy, %" in done.stdout and "3/3" in done.stdout and "Gold answer" in done.stdout
    for name in (*FILES, "planner/checkpoint-000003/adapter_model.safetensors"):
        assert (run / name).stat().st_size > 0 or name.startswith("executor"), name
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert {"seed", "steps", "seconds", "model", "before", "after"} <= set(summary)
    assert summary["seed"] == 0 and summary["steps"] == 3 and summary["seconds"] > 0
    for side in (summary["before"], summary["after"]):
        low, high = side["ci95"]
        assert side["n"] == 40 and 0 <= low <= side["accuracy"] <= high <= 1
        assert set(side["levels"]) == {"1", "2", "3"} and set(side["levels"]["1"]) == {"n", "accuracy"}
        assert {group["n"] for group in side["kinds"].values()} == {10}  # all four kinds
        assert {"greedy", "format", "puzzle_delegation", "query_specificity"} <= set(side)


def test_the_demo_says_what_it_takes(capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for flag in (
        "--quick",
        "--seed",
        "--out",
        "--steps",
        "--model",
        "--resume",
        "--d-max",
        "--lr",
        "--turns",
        "--threads",
    ):
        assert flag in text


def test_train_alone_writes_the_run(flags, tmp_path, fast, capsys):
    assert train.main([str(tmp_path / "run"), *flags[1:], "--steps", "2"]) == 0
    for role in ("planner", "executor"):
        rows = log.read_metrics(RunLog(tmp_path / "run").metrics(role))
        assert [row["step"] for row in rows] == [1, 2] and {row["role"] for row in rows} == {role}
    assert "2/2" in capsys.readouterr().out


def test_without_steps_nothing_is_trained(flags, tmp_path, fast):
    assert demo.main([*flags, "--steps", "0", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").exists()


# ---------------------------------------------------------------------------------------------- Ctrl-C and resume


@pytest.fixture
def whole(flags, tmp_path, fast, capsys):
    """A run that nobody stopped."""
    assert demo.main([*flags, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    return tmp_path / "whole"


STOPS = (
    *("before-sampled", "before-greedy", "planner/step-000001", "planner/metrics", "planner/checkpoint-000002"),
    *("executor/metrics", "outcomes/step-000003"),
)


def test_stopped_again_and_again_a_run_comes_to_the_same_adapters(flags, tmp_path, whole, monkeypatch, capsys):
    run, arguments = tmp_path / "run", flags
    places = list(STOPS)
    renames = {"replace": os.replace, "rename": os.rename}

    def stopping(rename):
        """Ctrl-C at the very moment when a file of the next place is about to be published."""

        def stop_or_rename(source, target):
            if places and places[0] in Path(target).as_posix():
                places.pop(0)
                signal.raise_signal(signal.SIGINT)
            rename(source, target)

        return stop_or_rename

    for name, rename in renames.items():
        monkeypatch.setattr(log.os, name, stopping(rename))
    for left in range(len(STOPS) - 1, -1, -1):
        assert demo.main([*arguments, "--out", str(run)]) == 130 and len(places) == left
        captured = capsys.readouterr()
        assert captured.err == "" and "minimgrpo.demo --quick --resume --out" in captured.out
        arguments = ["--quick", "--resume"]
    assert "2 complete steps are saved" in captured.out
    assert demo.main([*arguments, "--out", str(run)]) == 0

    expected, got = adapter(whole), adapter(run)
    assert any(tensor.abs().sum() > 0 for name, tensor in got.items() if "lora_B" in name)  # it did learn
    assert expected.keys() == got.keys() and all((expected[k] == got[k]).all() for k in got)
    for name in ("evaluation/before-greedy.jsonl", "evaluation/after-sampled.jsonl", "outcomes/step-000003.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    for role in ("planner", "executor"):
        both = [log.read(RunLog(root).metrics(role)) for root in (run, whole)]
        for rows in both:
            for row in rows:
                [row.pop(name) for name in [name for name in row if "second" in name]]
        assert both[0] == both[1] and len(both[0]) == 3


def test_a_signal_from_outside_stops_the_command(flags, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-u", "-m", "minimgrpo.demo", *flags, "--steps", "500", "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "1/500" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""
    assert "Stopped." in out and f"--resume --out {run}" in out


def test_a_finished_run_says_so(whole, capsys):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    assert demo.main(["--resume", "--out", str(whole)]) == 0
    assert "finished" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (["--rollouts", "1"], "K >= 2"),
        (["--d-max", "0"], "d_max"),
        (["--temperature", "0"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--lr", "-1"], "learning rate"),
        (["--steps", "many"], "many"),
        (["--stepz", "3"], "--stepz"),
        (["--ratio", "tokens"], "ratio"),
        (["--quantize", "nf3"], "nf3"),
        (["--model", "nosuch"], "nosuch"),
        (["--model", "/nosuch/folder"], "/nosuch/folder"),
    ],
)
def test_nonsense_is_one_sentence_and_writes_nothing(bad, word, flags, tmp_path, capsys):
    run = tmp_path / "run"
    try:
        code = demo.main([*flags, *bad, "--out", str(run)])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2 and word in one_sentence(capsys)
    assert not run.exists()


def test_missing_data(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "DATA", tmp_path)
    assert demo.main([*flags, "--out", str(tmp_path / "run")]) == 2
    assert "pages.jsonl" in one_sentence(capsys) and not (tmp_path / "run").exists()


def test_a_place_that_is_taken_or_cannot_be(flags, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for place in ("full", "full/thesis.txt"):
        assert demo.main([*flags, "--out", str(tmp_path / place)]) == 2
        assert "is no run: choose another name" in one_sentence(capsys)
    assert demo.main([*flags, "--out", str(tmp_path / "full/thesis.txt/run")]) == 2
    assert "Not a directory" in one_sentence(capsys)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    assert demo.main([*flags, "--resume", "--out", str(tmp_path / "none")]) == 2
    assert "there is no run in" in one_sentence(capsys)


def test_a_resumed_run_keeps_its_config(whole, capsys):
    (whole / "summary.json").unlink()
    assert demo.main(["--resume", "--steps", "9", "--lr", "0.1", "--out", str(whole)]) == 2
    text = one_sentence(capsys)
    assert "steps = 3" in text and f"lr = {train.Objective().lr}" in text


DAMAGED = (
    "config.json",
    "planner/step-000002.jsonl",
    "planner/metrics.jsonl",
    "evaluation/before-sampled.jsonl",
)


def test_damage_is_named_and_nothing_else_is_touched(whole, capsys):
    (whole / "summary.json").unlink()
    for name in DAMAGED:
        data = (whole / name).read_bytes()
        (whole / name).write_bytes(data[: len(data) // 2])
        assert demo.main(["--resume", "--out", str(whole)]) == 2
        assert Path(name).parent.name in one_sentence(capsys)
        (whole / name).write_bytes(data)
    assert demo.main(["--resume", "--out", str(whole)]) == 0


def test_a_damaged_checkpoint_is_made_again_from_the_one_before(whole, capsys):
    (whole / "summary.json").unlink()
    names = (
        "planner/checkpoint-000003/adapter_model.safetensors",
        "executor/checkpoint-000003/optimizer.pt",
        "executor/checkpoint-000003/learner.json",
    )
    for name in names:
        data = (whole / name).read_bytes()
        (whole / name).write_bytes(data[: len(data) // 2])
        assert demo.main(["--resume", "--out", str(whole)]) == 0
        role = Path(name).parts[0]
        captured = capsys.readouterr()
        assert f"the {role}'s update 3 is made again" in captured.out and captured.err == ""
        assert (whole / name).read_bytes() == data
        (whole / "summary.json").unlink()


def test_a_full_disk(flags, tmp_path, monkeypatch, fast, capsys):
    run, write, arguments = tmp_path / "run", log._write, flags
    for file in ("config.json", "before-sampled.jsonl", "step-000002.jsonl", "report.html"):

        def full(path, text, file=file):
            if path.name.startswith(file):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, text)

        monkeypatch.setattr(log, "_write", full)
        assert demo.main([*arguments, "--out", str(run)]) == 2
        text = one_sentence(capsys)
        assert "No space left" in text and file in text
        if file != "config.json":  # that one is the first: without it there is nothing to keep
            assert "kept" in text and "--resume" in text
            arguments = ["--quick", "--resume"]
    monkeypatch.setattr(log, "_write", write)
    assert demo.main([*arguments, "--out", str(run)]) == 0


def test_every_flag_is_a_field_with_one_line_of_help():
    for name in train.flat(Config()):
        assert sum(name in train.field_help(owner) for owner in (Config, train.Objective, train.Limits)) == 1, name
