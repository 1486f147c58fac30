# %% [markdown]
# # Assignment 5. A log that survives being killed
#
# M-GRPO's planner and executor train on separate machines. Here they share a folder of files, and nothing else. Either
# may be killed at any moment, by a person, a scheduler or a power failure, and is started again with the same command.
# Then nothing may be lost, and nothing trained twice. Three rules are enough, and no locks:
#
# * every file has **one writer**;
# * a file is **published once**: written under another name, then renamed into place. A reader sees the whole file or
#   none;
# * what is learned from is **what is published**, never what is only in memory.
#
# You write the functions that keep these rules. Six of them, 20 points.
#
# **How it works.** Fill in the places marked `YOUR CODE HERE`. Below each function are its checks: run them as often
# as you like. Grading runs the same checks with more cases. A function is checked by itself: where one builds on
# another it uses the library's, so a mistake early on costs nothing later.
#
# **How a kill is tested.** `watch(folder)` copies the folder after every call of your code that touches a file. Each
# copy is what a kill at that moment would leave behind. For a power failure it also keeps what would be on the disk:
# only what went through `os.fsync`. (Call it as `os.fsync(...)`, so that it can be seen.)

# %% setup
import itertools
import json
import os
from pathlib import Path
from unittest import mock

from minimgrpo.crash import plain_locale, restore, watch
from minimgrpo.log import publish as library_publish_once
from minimgrpo.log import read as library_read
from minimgrpo.log import replace as library_publish

ROWS = [{"step": 1, "text": "Curaçao – 山 " * 900}, {"step": 2}, {"text": "one\u2028two\r\nthree"}]


def as_bytes(rows):
    """What the file of some rows holds: one line of JSON a row, as UTF-8."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def sync_folder(folder):
    """Make the names in a folder safe against a power failure (where the system can sync a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def new_folder():
    """An empty folder for a check."""
    folder = Path(f"folder-{len(list(Path.cwd().iterdir()))}")
    folder.mkdir()
    return folder


def outcome_of(function, *arguments):
    """What the call returns, or the error it raises as text."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# %% [markdown]
# ## 1. Publish a file (5 points)
#
# Whoever opens `rows.jsonl` while it is being written reads half of it. So write another file first, and rename it
# when it is whole: on one disk, `os.replace` is atomic. In this order:
#
# 1. write all lines to `rows.jsonl.tmp` in the same folder (a rename to another disk would be a copy), as UTF-8,
#    whatever the machine's own encoding is. A `.tmp` that an earlier kill left there is overwritten;
# 2. `flush` the file, then `os.fsync` it: until then its text may be in Python's or in the system's memory. A rename
#    can reach the disk before the text does: after a power failure the file is there, and empty;
# 3. `os.replace` it into place;
# 4. `sync_folder` (given above), since the new name is a change of the folder.
#
# A line is `json.dumps(row, ensure_ascii=False)` and a `"\n"`: a person can read "Curaçao" in it.


# %% task publish
def publish(path: Path, rows: list) -> None:
    """Write one line of JSON for each row and publish the file under ``path``.

    path: in a folder that exists.   rows: dicts. No rows make an empty file.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test publish 2
def test_publish():
    def expect_whole(rows, found, why):
        whole = as_bytes(rows)
        if found != whole:
            if found == whole[:-1]:
                why = "every line ends with a newline, the last one too: without it a reader cannot tell a torn line"
            elif b"\\u" in found:
                why = "json.dumps(row, ensure_ascii=False): a person should be able to read the file"
            raise AssertionError(f"{why}\n  expected: {whole[-60:]!r}\n  got:      {found[-60:]!r}")

    def watched(folder, rows):
        with watch(folder) as seen:
            publish(folder / "rows.jsonl", rows)
        assert (folder / "rows.jsonl").exists(), "there is no file under its final name"
        expect_whole(rows, (folder / "rows.jsonl").read_bytes(), "the file must hold one line of JSON for each row")
        for moment in seen.moments:
            found, size = moment.killed.get("rows.jsonl"), len(as_bytes(rows))
            why = "write another file first, and os.replace it when it is whole"
            whole = found is None or len(found) == size
            assert whole, (
                f"a kill after {moment.after}() leaves {len(found)} of {size} bytes under the final name: {why}"
            )
        return seen

    folder = new_folder()
    (folder / "other.jsonl").write_bytes(b"{}\n")
    seen = watched(folder, ROWS)
    names = {name for moment in seen.moments for name in moment.killed} - {"rows.jsonl", "other.jsonl"}
    why = "write rows.jsonl.tmp in the same folder: a rename across disks is a copy, and readers ignore this name"
    assert names == {"rows.jsonl.tmp"}, f"{why}; seen there: {sorted(names) or 'no other file'}"
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["other.jsonl", "rows.jsonl"], f"only the published file should be left, not {left}"


# %% test publish__power 2
def test_publish__power():
    def watched(rows):
        folder = new_folder()
        with watch(folder) as seen:
            publish(folder / "rows.jsonl", rows)
        assert (folder / "rows.jsonl").exists(), "there is no file under its final name"
        size = (folder / "rows.jsonl").stat().st_size
        for moment in seen.moments:
            found = moment.unplugged.get("rows.jsonl")
            why = "flush the file and os.fsync it before os.replace"
            safe = found is None or len(found) == size
            assert safe, f"a power failure after {moment.after}() leaves {len(found)} of {size} bytes: {why}"
        loose = "rows.jsonl" in seen.loose and os.name == "posix"
        assert not loose, (
            "publish has returned, but a power failure can still undo the new name: sync_folder at the end"
        )

    watched(ROWS)


# %% test publish__text 1
def test_publish__text():
    path = new_folder() / "rows.jsonl"
    try:
        with plain_locale():
            publish(path, ROWS)
    except UnicodeEncodeError as error:
        why = "open the file with encoding='utf-8': this check plays a machine whose own encoding is ASCII"
        raise AssertionError(f"{why}\n  {error}") from None
    text = path.read_bytes().decode("utf-8", errors="replace")
    assert [json.loads(line) for line in text.split("\n")[:-1]] == ROWS, (
        "the text that was written is not the rows' text"
    )


# %% [markdown]
# ## 2. Publish it once (2 points)
#
# A server that was killed does its step again. Mostly it comes to the same rows: then the published file stays as it
# is, untouched, for somebody may be reading it. If it comes to other rows, something is wrong (another machine,
# another seed, a second writer of this file), and going on would train on rows that nobody else has seen. That must be
# loud.


# %% task publish_once
def publish_once(path: Path, rows: list) -> None:
    """Publish ``rows`` under ``path`` unless they are published there already.

    Use library_publish(path, rows) to publish (it replaces what is there) and as_bytes(rows) to compare.
    Raises ValueError, with the file's name in the message, if the file is there and holds anything else.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test publish_once 2
@mock.patch("os.fsync", lambda file: None)  # these folders need not outlive a power failure
def test_publish_once():
    folder = new_folder()
    path = folder / "rows.jsonl"
    publish_once(path, ROWS)
    assert path.exists() and path.read_bytes() == as_bytes(ROWS), "what is not there yet must be published"
    with watch(folder) as seen:
        got = outcome_of(publish_once, path, ROWS)
    assert got is None, f"the same rows again are no error: {got}"
    assert len(seen.moments) == 1, "the same rows again: leave the published file alone, do not write it anew"

    def expect_refused(rows, words):
        got = outcome_of(publish_once, path, rows)
        refused = isinstance(got, str) and got.startswith(("ValueError", "LogError"))
        assert refused, f"{words} must be refused with a ValueError, not {got!r}"
        assert path.name in got, f"the error should name the file: {got}"
        assert path.read_bytes() == as_bytes(ROWS), f"{words} must not change the published file"

    expect_refused([*ROWS[:2], {"text": "other"}], "other rows, as many as before,")
    expect_refused(ROWS[:2], "fewer rows")
    expect_refused([*ROWS, {"n": 4}], "more rows")


# %% [markdown]
# ## 3. Read whole lines (3 points)
#
# A published file is whole. If it is not (a bad copy, a bad disk), the reader must say so: to skip what it cannot read
# would lose rows in silence. One trap: Python's `str.splitlines` also cuts at `U+2028` and a few more characters,
# which JSON allows inside a text. A line ends at `"\n"` and nowhere else.


# %% task read
def read(path: Path) -> list:
    """The rows of a published file, in order; [] for an empty one.

    Raises FileNotFoundError if it is not there, and ValueError, with the file's name and "line N" (from 1) in the
    message, for the first line that is not JSON or that lacks its newline. Text that is not UTF-8 is a ValueError too.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test read 3
def test_read():
    path = new_folder() / "rows.jsonl"

    def reads(data):
        path.write_bytes(data)
        with plain_locale():
            return outcome_of(read, path)

    got = reads(as_bytes(ROWS[1:2]))
    assert got == ROWS[1:2], f"one row was written: {ROWS[1:2]}, not {got}"
    got = reads(as_bytes(ROWS[:2]))
    assert got == ROWS[:2], f"read the file as UTF-8, whatever the machine's encoding is: not {str(got)[:200]}"
    got = reads(as_bytes(ROWS))
    assert got == ROWS, f"a line ends at \\n only (str.splitlines cuts at U+2028 too): not {str(got)[-200:]}"
    got = reads(b"")
    assert got == [], f"an empty file has no rows: [], not {got}"

    def expect_refused(data, number, words):
        got = reads(data)
        refused = isinstance(got, str) and not got.startswith("FileNotFound") and "Error" in got
        assert refused, f"{words} is damage, to be told with a ValueError, not skipped: got {str(got)[:200]}"
        named = path.name in got and f"line {number}" in got
        assert named, f"the error should name the file and line {number}: {got[:200]}"

    expect_refused(b'{"a": 1}\n{"b": \n{"c": 3}\n', 2, "a line that is not JSON")
    expect_refused(b'{"a": 1}\n{"b"', 2, "a torn last line")
    expect_refused(b'{"a": 1}\n{"b": 2}', 2, "a last line without its newline (it may be torn: 12 of 120)")
    path.unlink()
    path.with_name("rows.jsonl.tmp").write_bytes(b"{}\n")
    got = outcome_of(read, path)
    told = isinstance(got, str) and got.startswith("FileNotFoundError")
    assert told, f"a file that is not published is a FileNotFoundError (nobody reads a .tmp), not {got}"


# %% [markdown]
# ## 4. A file that grows (3 points)
#
# `metrics.jsonl` gets one more line with every step. Appending to it would be simple, and a kill in the middle of the
# write would leave half a line for ever. So the whole file is published anew each time, in the place of the old one: a
# reader sees the old lines or the new ones. And a step that is done again after a kill **replaces** its own line: one
# line a step.


# %% task add_line
def add_line(path: Path, row: dict) -> None:
    """Publish ``path`` again, with ``row`` as the line of its step.

    row: has a "step". A line of the same step is replaced where it stands; otherwise the row comes last. All other
    lines stay. If the file is not there, it begins with this row.
    Use library_read(path) -> rows and library_publish(path, rows), which replaces what is there in one rename.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test add_line 3
def test_add_line():
    folder = new_folder()
    path = folder / "metrics.jsonl"

    def add(row, rows):
        """Add ``row``; the file must hold ``rows`` then, and at every moment these or what it held before."""
        old = path.read_bytes() if path.exists() else None
        inode = path.stat().st_ino if path.exists() else None
        with watch(folder) as seen:
            add_line(path, row)
        assert path.exists(), "there is no file"
        got = path.read_bytes()
        if got != as_bytes(rows):
            steps = [json.loads(line)["step"] for line in got.decode().split("\n")[:-1]]
            wanted = [row["step"] for row in rows]
            why = "one line a step: a step that is done again replaces its own line" if len(steps) > len(rows) else ""
            why = why or ("the lines of the other steps must stay" if len(steps) < len(rows) else "wrong lines")
            raise AssertionError(
                f"{why}\n  expected the steps {wanted}: {rows}\n  got      the steps {steps}: {got.decode()}"
            )
        for moment in seen.moments:
            why = f"a kill after {moment.after}() leaves no file at all: os.replace needs no removal before it"
            assert old is None or path.name in moment.killed, why
        why = "the file was changed in place: a kill in the middle of the write leaves half a line. Publish it whole"
        assert inode != path.stat().st_ino, why
        for moment in seen.moments:
            for kind, files in (("kill", moment.killed), ("power failure", moment.unplugged)):
                found = files.get(path.name)
                why = f"a {kind} after {moment.after}() leaves neither the old lines nor the new: publish it whole"
                assert found in (old, got), f"{why}\n  {len(found)} of {len(got)} bytes"

    big = {"step": 1, "reward": 0.5, "note": "é" * 9000}
    path.write_bytes(as_bytes([big]))
    add({"step": 2, "reward": 0.25}, [big, {"step": 2, "reward": 0.25}])
    add({"step": 2, "reward": 0.75}, [big, {"step": 2, "reward": 0.75}])
    path.unlink()
    add(big, [big])


# %% [markdown]
# ## 5. Which steps are there? (2 points)
#
# Each role writes files of its own: `RUN/planner/step-000012.jsonl` and `RUN/executor/step-000012.jsonl`. A step is
# there when **both** are published. The folders hold other things as well: `step-000013.jsonl.tmp`, which was being
# written when its writer was killed; `checkpoint-000012`; `step-000012.turn-1.jsonl`.


# %% task steps
def steps(root: Path) -> list:
    """The numbers of the steps that both roles have published, ascending. A folder may be missing: then there is none.

    root: the run; its files are root/"planner"/"step-NNNNNN.jsonl" and root/"executor"/"step-NNNNNN.jsonl".
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% test steps 2
def test_steps():
    def run(planner, executor):
        root = new_folder()
        for role, names in (("planner", planner), ("executor", executor)):
            (root / role).mkdir()
            for name in names:
                (root / role / name).write_bytes(b"{}\n")
        return root

    def file(n):
        return f"step-{n:06d}.jsonl"

    got = outcome_of(steps, run(map(file, (1, 2, 3)), map(file, (1, 2))))
    assert got != [1, 2, 3], "step 3 is published by one role only: a step is there when both are"
    assert got == [1, 2], f"both roles have published the steps 1 and 2: [1, 2], not {got}"
    got = outcome_of(steps, run([file(1), file(2)], [file(1), file(2) + ".tmp"]))
    assert got == [1], f"a .tmp is not published: [1], not {got}"
    got = outcome_of(
        steps, run([file(4), file(9), "checkpoint-000004"], [file(9), file(4), "step-000004.turn-1.jsonl"])
    )
    assert got == [4, 9], f"the steps that are there, in order, and nothing made of other files: [4, 9], not {got}"


# %% [markdown]
# ## 6. Train, and go on after a kill (5 points)
#
# The loop at last. A step is *played* (the rollouts), its rows are published, the state *learns* from them, and the
# new state is published as a checkpoint. `run` is called again after a kill, with the same arguments, and goes on:
#
# * from the newest published checkpoint: a step that has one is **not learned again**;
# * a step whose rows are published is **not played again**: its rows are read. (Played again it would come to other
#   rows: sampling on a GPU never repeats exactly.)
# * so every published row is learned from **exactly once**, and nothing else is learned from.


# %% task run
def run(root: Path, steps: int, play, learn, state: dict) -> dict:
    """Play and learn the steps 1, 2, ..., ``steps``, or what is missing of them. Returns the state after the last one.

    root: a folder that exists.   play(step, state) -> rows (dicts).   learn(state, rows) -> the new state (a dict that
    JSON can hold); it does not change ``state``.   state: what step 1 begins with.
    Publishes root/"step-NNNNNN.jsonl" (the rows of a step) and root/"checkpoint-NNNNNN.jsonl" (one row: the state after
    this step), NNNNNN from 000001. Use library_publish_once(path, rows) and library_read(path) -> rows.
    """
    # YOUR CODE HERE
    raise NotImplementedError()


# %% setup
class World:
    """What is played and learned, and by whom: no two rows have the same id, also when a step is played again."""

    ids = itertools.count(1)

    def __init__(self, rows):
        self.rows, self.played, self.learned = rows, [], []

    def play(self, step, state):
        self.played.append(step)
        return [{"id": next(self.ids), "step": step, "after": state["step"]} for _ in range(self.rows)]

    def learn(self, state, rows):
        self.learned.append(state["step"] + 1)
        return {"step": state["step"] + 1, "trained": state["trained"] + [row["id"] for row in rows]}

    def run(self, run, root, steps):
        return run(root, steps, self.play, self.learn, {"step": 0, "trained": []})


def check_run(root, steps, state):
    """Assert that a finished run learned from every published row exactly once, and from nothing else."""
    files = sorted(path.name for path in root.glob("*.jsonl"))
    wanted = [f"{kind}-{n:06d}.jsonl" for kind in ("checkpoint", "step") for n in range(1, steps + 1)]
    assert files == wanted, (
        f"every step publishes its rows and its checkpoint\n  expected: {wanted}\n  got:      {files}"
    )
    rows = [row for n in range(1, steps + 1) for row in library_read(root / f"step-{n:06d}.jsonl")]
    assert isinstance(state, dict) and "trained" in state, f"run returns the state after the last step, not {state!r}"
    trained = state["trained"]
    twice = sorted({row for row in trained if trained.count(row) > 1})
    assert not twice, f"rows were trained twice: the ids {twice} of {trained}"
    lost = [row for row in rows if row["id"] not in trained]
    assert not lost, f"published rows were never trained, of the steps {sorted({row['step'] for row in lost})}"
    unknown = [row for row in trained if row not in [r["id"] for r in rows]]
    assert not unknown, f"it was trained on rows that are not published: the ids {unknown}"
    stale = [row["step"] for row in rows if row["after"] != row["step"] - 1]
    assert not stale, f"the steps {stale} were played with another state than the one that the step before left"
    [last] = library_read(root / f"checkpoint-{steps:06d}.jsonl")
    assert last == state, f"the last checkpoint is not the state that run returns\n  {last}\n  {state}"


# %% test run 2
@mock.patch("os.fsync", lambda file: None)  # these folders need not outlive a power failure
def test_run():
    root, world = new_folder(), World(rows=2)
    state = world.run(run, root, 3)
    assert world.played == [1, 2, 3], f"the steps 1, 2, 3 are played, each once, not {world.played}"
    check_run(root, 3, state)
    again = World(rows=2)
    got = again.run(run, root, 3)
    done = "the run is finished: called again it plays nothing, learns nothing, and returns the same state"
    assert got == state and not again.played and not again.learned, f"{done}; it returns {got}"
    more = World(rows=2)
    state = more.run(run, root, 5)
    assert more.played == [4, 5], f"three steps are done: with steps=5 it plays 4 and 5, not {more.played}"
    check_run(root, 5, state)


# %% test run__killed 3
@mock.patch("os.fsync", lambda file: None)  # these folders need not outlive a power failure
def test_run__killed():
    def kill_everywhere(steps, rows):
        first = new_folder()
        with watch(first) as seen:
            World(rows).run(run, first, steps)
        for files in seen.states():
            root, world = restore(new_folder() / "run", files), World(rows)
            there = {name: f"{len(data)} bytes" for name, data in files.items()}
            where = f"\n  (started again after a kill or a power failure that left {there})"
            try:
                state = world.run(run, root, steps)
                published = [int(name[5:11]) for name in files if name.startswith("step-") and name.endswith(".jsonl")]
                again = sorted(set(world.played) & set(published))
                assert not again, f"the steps {again} are published and were played again: read their rows"
                saved = [int(name[11:17]) for name in files if name.startswith("check") and name.endswith(".jsonl")]
                again = [step for step in world.learned if step <= max(saved, default=0)]
                assert not again, f"the steps {again} have a checkpoint and were learned again: begin behind it"
                check_run(root, steps, state)
                for name, data in files.items():
                    changed = name.endswith(".jsonl") and (root / name).read_bytes() != data
                    assert not changed, f"{name} was published and has been changed"
            except AssertionError as error:
                raise AssertionError(f"{error}{where}") from None
            except Exception as error:
                raise AssertionError(f"it cannot go on, {type(error).__name__}: {error}{where}") from None

    kill_everywhere(steps=2, rows=2)
