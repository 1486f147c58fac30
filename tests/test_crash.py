"""The watched disk: what a kill or a power failure at any moment leaves; the copies are what a real kill leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minimgrpo import log
from minimgrpo.crash import plain_locale, restore, watch

ROWS = [{"text": "Curaçao" * 2000}, {"n": 1}]


def whole(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_what_the_log_publishes_is_there_whole_or_not_at_all(tmp_path):
    with watch(tmp_path) as seen:
        log.publish(tmp_path / "rows.jsonl", ROWS)
    assert [m.after for m in seen.moments] == ["the start", "open", "write", "os.fsync", "replace"]
    assert all(files.get("rows.jsonl", whole(ROWS)) == whole(ROWS) for files in seen.states())
    assert not seen.loose


def test_a_file_written_in_place_is_seen_half_written(tmp_path):
    with watch(tmp_path) as seen, open(tmp_path / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in ROWS:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    found = [m.killed.get("rows.jsonl") for m in seen.moments]
    assert found == [None, b"", whole(ROWS[:1]), whole(ROWS)]


def test_what_was_not_fsynced_is_lost_when_the_power_fails_and_so_is_a_new_name(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    with watch(tmp_path) as seen:
        (tmp_path / "a.tmp").write_bytes(b"new")
        os.replace(tmp_path / "a.tmp", tmp_path / "a")
    assert seen.moments[-1].killed == {"old": b"old", "a": b"new"}
    assert seen.moments[-1].unplugged == {"old": b"old", "a": b""}
    assert "a" in seen.loose and "old" not in seen.loose
    with watch(tmp_path) as seen, open(tmp_path / "b", "wb") as file:
        file.write(b"12")
        os.fsync(file.fileno())  # before the flush: nothing of it is with the operating system yet
    assert seen.moments[-1].unplugged["b"] == b""


def test_profiles_and_fsync_are_put_back_and_errors_come_through(tmp_path):
    fsync, profile = os.fsync, sys.getprofile()
    with pytest.raises(OSError, match="full"), watch(tmp_path):
        raise OSError("the disk is full")
    assert os.fsync is fsync and sys.getprofile() is profile
    with watch(tmp_path), pytest.raises(OSError):
        os.fsync(10_000)  # no such file: refused here too


def test_a_moment_is_laid_out_again_with_its_folders(tmp_path):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    with watch(tmp_path / "here") as seen:
        (tmp_path / "here" / "sub" / "a").write_bytes(b"1")
    folder = restore(tmp_path / "there", seen.states()[-1])
    assert (folder / "sub" / "a").read_bytes() == b"1"
    with pytest.raises(FileExistsError):
        restore(tmp_path / "there", {})


def test_a_text_file_without_an_encoding_is_ascii_in_a_plain_locale(tmp_path):
    path = tmp_path / "a"
    with plain_locale():
        for write in (lambda: print("ç", file=path.open("w")), lambda: path.write_text("ç")):
            with pytest.raises(UnicodeEncodeError):
                write()
        path.write_text("ç", encoding="utf-8")
        path.write_bytes(path.read_bytes())
        with pytest.raises(UnicodeDecodeError):
            path.read_text()
    assert path.read_text(encoding="utf-8") == "ç"


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_the_copies_are_what_a_real_kill_leaves(tmp_path):
    code = (
        "import os, signal, sys, pathlib; folder = pathlib.Path(sys.argv[1]); moment = int(sys.argv[2])\n"
        "calls = 0\n"
        "def die(frame, event, function):\n"
        "    global calls\n"
        "    if event == 'c_return' and function.__name__ in ('open', 'write', 'replace', '__exit__'):\n"
        "        calls += 1\n"
        "        if calls == moment: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.setprofile(die)\n"
        "with open(folder / 'a.tmp', 'w', encoding='utf-8') as file:\n"
        "    file.write('x' * 20000); file.write('y')\n"
        "os.replace(folder / 'a.tmp', folder / 'a')\n"
    )
    (tmp_path / "here").mkdir()
    with watch(tmp_path / "here") as seen:
        with open(tmp_path / "here" / "a.tmp", "w", encoding="utf-8") as file:
            file.write("x" * 20000)
            file.write("y")
        os.replace(tmp_path / "here" / "a.tmp", tmp_path / "here" / "a")
    left = []
    for moment in (1, 2, 3, 4, 5):
        (tmp_path / str(moment)).mkdir()
        run = subprocess.run([sys.executable, "-c", code, str(tmp_path / str(moment)), str(moment)], timeout=60)
        assert run.returncode == -signal.SIGKILL
        left.append({p.name: p.read_bytes() for p in Path(tmp_path / str(moment)).iterdir()})
    assert [m.killed for m in seen.moments[1:]] == [state for n, state in enumerate(left) if state not in left[:n]]
