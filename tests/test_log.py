"""The trajectory log: whole files or none, every character survives, and damage is named."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minimgrpo
from minimgrpo import log
from minimgrpo.log import LogError, RunLog
from minimgrpo.trajectory import Trajectory

ROWS = [{"a": 1}, {"text": 'Curaçao – 山 🌍 \u2028\u2029\x85\x0b\x00 \r\n " \\ <|im_end|>'}, {"b": [None, 0.1, 1e-7]}]


def trajectory(role="executor", question="q1", calls=()):
    t = Trajectory(role, question, 0, run="run", step=1, stop_reason="result", result="Curaçao \u2028")
    t.read("system", "You are.", [1, 2, 3])
    t.wrote("Curaçao", [4, 5], [-0.25, -1.5])
    t.tool_calls = list(calls)
    t.reward_parts = {"format": 1.0}
    return t


def call(name, **arguments):
    return {"name": name, "arguments": arguments, "output": "é", "ok": True}


# ----------------------------------------------------------------------------------------------------- writing, reading


def test_what_is_published_is_read_back_whatever_its_characters(tmp_path):
    log.publish(tmp_path / "a" / "rows.jsonl", ROWS)
    assert log.read(tmp_path / "a" / "rows.jsonl") == ROWS
    assert "Curaçao" in (tmp_path / "a" / "rows.jsonl").read_text(encoding="utf-8")  # readable, not \\u00e7


def test_no_rows_are_a_file_too(tmp_path):
    log.publish(tmp_path / "rows.jsonl", [])
    assert log.read(tmp_path / "rows.jsonl") == []


def test_a_published_file_never_changes(tmp_path):
    log.publish(tmp_path / "rows.jsonl", ROWS)
    log.publish(tmp_path / "rows.jsonl", ROWS)  # as a server does that was killed
    with pytest.raises(LogError, match=r"rows\.jsonl was published by an earlier attempt"):
        log.publish(tmp_path / "rows.jsonl", [{"other": 1}])
    log.publish_text(tmp_path / "rows.jsonl", "other")
    assert log.read(tmp_path / "rows.jsonl") == ROWS


def test_nothing_but_the_file_is_left_behind(tmp_path):
    log.publish(tmp_path / "rows.jsonl", ROWS)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_trajectory_survives_the_log(tmp_path):
    t = trajectory(calls=[call("search", query="é")])
    log.publish(tmp_path / "t.jsonl", [t.to_json()])
    assert [Trajectory.from_json(row) for row in log.read(tmp_path / "t.jsonl")] == [t]


def test_a_trajectory_with_a_field_missing_or_lists_that_disagree_is_refused():
    row = trajectory().to_json()
    with pytest.raises(ValueError, match="without mask"):
        Trajectory.from_json({k: v for k, v in row.items() if k != "mask"})
    with pytest.raises(ValueError, match="differ in length"):
        Trajectory.from_json(row | {"mask": [0]})
    with pytest.raises(ValueError, match="2 token ids but 1 log-probs"):
        trajectory().wrote("x", [1, 2], [-1.0])


def test_non_ascii_text_survives_where_the_locale_is_plain_c(tmp_path):
    code = (
        "import locale, pathlib, sys; from minimgrpo import log; path = pathlib.Path(sys.argv[1])\n"
        "log.publish(path, [{'t': 'Cura\\u00e7ao'}]); print(ascii(log.read(path)), locale.getpreferredencoding(False))"
    )
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "t.jsonl")]
    run = subprocess.run(command, capture_output=True, text=True, env=plain, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "Cura\\xe7ao" in run.stdout and "utf" not in run.stdout.lower()


def test_every_text_file_is_opened_with_an_encoding():
    for path in sorted(Path(minimgrpo.__file__).parent.rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            opens = re.search(r"\b(read_text|write_text)\(|(?<![.\w])(?<!def )open\(", line)
            if opens and not re.search('"[rw]b"', line):
                assert "encoding=" in line, f"{path.name}:{number}: {line.strip()}"


# ------------------------------------------------------------------------------------------------------------ accidents


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace", "json.dumps"])
def test_a_failure_in_the_middle_leaves_no_half_file_under_the_final_name(tmp_path, monkeypatch, broken):
    path = tmp_path / "rows.jsonl"

    def fail(*_args, **_kwargs):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(OSError, match="the disk is full"):
            log.publish(path, ROWS)
    assert not path.exists()
    log.publish(path, ROWS)
    assert log.read(path) == ROWS


def test_a_temporary_file_left_by_a_kill_does_no_harm(tmp_path):
    (tmp_path / "rows.jsonl.tmp").write_text('{"half', encoding="utf-8")
    log.publish(tmp_path / "rows.jsonl", ROWS)
    assert log.read(tmp_path / "rows.jsonl") == ROWS


def test_a_folder_is_published_whole_or_not_at_all(tmp_path):
    path = tmp_path / "checkpoint-000001"

    def half(folder):
        (folder / "one").write_text("1", encoding="utf-8")
        raise OSError("the disk is full")

    def whole(folder):
        (folder / "two").write_text("2", encoding="utf-8")

    with pytest.raises(OSError, match="the disk is full"):
        log.publish_folder(path, half)
    assert not path.exists() and RunLog(tmp_path.parent).last_checkpoint(tmp_path.name) is None
    log.publish_folder(path, whole)
    assert [p.name for p in path.iterdir()] == ["two"]  # nothing of the failed attempt
    log.publish_folder(path, half)  # published already: not written again
    assert RunLog(tmp_path.parent).last_checkpoint(tmp_path.name) == 1


def test_a_folder_is_flushed_file_by_file_before_its_rename(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "rename", lambda *names: (order.append("rename"), rename(*names)))

    def write(folder):
        for name in ("one", "two"):
            (folder / name).write_text(name, encoding="utf-8")

    log.publish_folder(tmp_path / "checkpoint-000001", write)
    assert order == ["fsync", "fsync", "fsync", "rename", "fsync"]  # the files, the folder, and what it is in


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b'{"a": 1}\nnot json\n{"a": 2}\n', "line 2"),
        (b'{"a": 1}\n\n', "line 2"),
        (b'{"a": 1}\n{"a": ', "torn"),
        (b'{"a": 1}\n{"a": 2}', "torn"),
        (b'{"a": "\xff"}\n', "not UTF-8"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, content, complaint):
    (tmp_path / "step-000001.jsonl").write_bytes(content)
    with pytest.raises(LogError, match=complaint) as error:
        log.read(tmp_path / "step-000001.jsonl")
    assert str(tmp_path / "step-000001.jsonl") in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LogError, match=r"step-000001.jsonl is missing"):
        log.read(tmp_path / "step-000001.jsonl")


# ---------------------------------------------------------------------------------------------------------------- names


def test_the_files_of_a_run_are_where_the_documentation_says(tmp_path):
    run = RunLog(tmp_path)
    names = [
        run.trajectories("planner", 12),
        run.outcomes(12),
        run.mail(12, 1, "requests"),
        run.mail(12, 1, "reports"),
        run.checkpoint("executor", 12),
    ]
    assert [p.relative_to(tmp_path).as_posix() for p in names] == [
        "planner/step-000012.jsonl",
        "outcomes/step-000012.jsonl",
        "mail/step-000012/turn-1.requests.jsonl",
        "mail/step-000012/turn-1.reports.jsonl",
        "executor/checkpoint-000012",
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._/-]+", p.relative_to(tmp_path).as_posix()) for p in names)


def test_the_last_checkpoint_is_the_newest_published_one(tmp_path):
    run = RunLog(tmp_path)
    assert run.last_checkpoint("planner") is None
    for name in ("checkpoint-000002", "checkpoint-000010", "checkpoint-000011.tmp"):
        (tmp_path / "planner" / name).mkdir(parents=True)
    assert run.last_checkpoint("planner") == 10


# ------------------------------------------------------------------------------------------------------------- datasets


def load_dataset(files, tmp_path):
    import datasets

    datasets.disable_progress_bars()
    names = [str(file) for file in files]
    return datasets.load_dataset("json", data_files=names, split="train", cache_dir=str(tmp_path / "cache"))


def test_datasets_reads_a_trajectory_file(tmp_path):
    calls = [call("search", query="é"), call("visit", id="1", page=2), call("python", code="1")]
    written = [trajectory(calls=calls), trajectory(question="q2"), trajectory(question="q3", calls=calls[:1])]
    log.publish(tmp_path / "step-000001.jsonl", (t.to_json() for t in written))
    rows = load_dataset([tmp_path / "step-000001.jsonl"], tmp_path)
    assert len(rows) == 3
    for row, t in zip(rows, written, strict=True):
        assert (row["token_ids"], row["mask"], row["logprobs"]) == (t.token_ids, t.mask, t.logprobs)
        assert (row["result"], row["messages"]) == (t.result, t.messages)
        assert Trajectory.from_json(row) == t


def test_datasets_reads_the_files_of_several_steps(tmp_path):
    calls = [call("search", query="x"), call("python", code="1"), call("visit", id="3", page=2)]
    for step, used in enumerate(calls, 1):
        rows = [trajectory(calls=[used]), trajectory()]
        log.publish(tmp_path / f"step-{step}.jsonl", [t.to_json() for t in rows])
    rows = load_dataset(sorted(tmp_path.glob("step-*.jsonl")), tmp_path)
    assert [Trajectory.from_json(row).tool_calls for row in rows] == [[calls[0]], [], [calls[1]], [], [calls[2]], []]


def test_a_line_of_the_log_is_one_json_object(tmp_path):
    log.publish(tmp_path / "t.jsonl", [trajectory().to_json()] * 3)
    lines = (tmp_path / "t.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b"" and all(isinstance(json.loads(line), dict) for line in lines[:-1])
