"""The trajectory log: plain files that stand in for the wires between decoupled servers.

Every file has one writer and is published once: written to a temporary name, flushed to disk, renamed into place; after
that it never changes. So it works without locks, on a network disk too, and a reader sees a whole file or none. (Each
server holds ``RUN/<role>/lock`` all the same, so that nobody starts a second one of its role by mistake. A name that
ends in ``.tmp`` was being written when its writer was killed: nobody reads it.)

    RUN/config.json                                    what the run was started with; whoever starts first publishes it
    RUN/mail/step-000012/turn-1.requests.jsonl         the planner's sub-tasks of one turn
    RUN/mail/step-000012/turn-1.reports.jsonl          the executor's reports, in the same order
    RUN/outcomes/step-000012.jsonl                     one scalar per rollout: was the planner right?
    RUN/planner/step-000012.jsonl, RUN/executor/...    the trajectories, one a line
    RUN/executor/turns/step-000012.turn-1.jsonl        the executor's of one turn, not rewarded yet; removed afterwards
    RUN/<role>/metrics.jsonl                           what the role's steps measured, one step a line (docs/metrics.md)
    RUN/<role>/checkpoint-000012/                      adapter (PEFT's format), optimizer, checksums; the last two
    RUN/evaluation/before-sampled.jsonl, ...           the demo's attempts at the test questions, one rollout a line

Only ``metrics.jsonl`` grows. The server of its role replaces it whole, by a rename as well, after a step's update and
before that step's checkpoint. So a checkpoint never lacks its line, and a step that is learned again after a kill
replaces its own line: every step has exactly one. Wall-clock figures (names with "second") are in this file of the
log alone; everything else in the log repeats bit for bit.

Only the mail and the outcomes cross from one server to the other: text and one scalar per rollout (``traffic``).
``datasets.load_dataset("json", data_files="RUN/planner/step-*.jsonl")`` reads the trajectories.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from minimgrpo.protocol import ROLES
from minimgrpo.trajectory import Rollout, Trajectory

MEND = "put back a copy of it, or start a new run"


class LogError(ValueError):
    """A file of the run is missing, damaged or in the way; the message says which and what to do."""


class RunLog:
    """The files of one run under ``root``."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def trajectories(self, role: str, step: int) -> Path:
        return self.root / role / f"step-{step:06d}.jsonl"

    def steps(self) -> list[int]:
        """The steps of which both roles' trajectories are published, in order."""
        found = [{int(p.stem[5:]) for p in (self.root / role).glob(f"step-{'[0-9]' * 6}.jsonl")} for role in ROLES]
        return sorted(set.intersection(*found))

    def metrics(self, role: str) -> Path:
        return self.root / role / "metrics.jsonl"

    def evaluation(self, when: str, way: str) -> Path:
        """``when`` is "before" or "after" the training, ``way`` "sampled" or "greedy"."""
        return self.root / "evaluation" / f"{when}-{way}.jsonl"

    def outcomes(self, step: int) -> Path:
        return self.root / "outcomes" / f"step-{step:06d}.jsonl"

    def mail(self, step: int, turn: int, kind: str) -> Path:
        """``kind`` is "requests" or "reports"."""
        return self.root / "mail" / f"step-{step:06d}" / f"turn-{turn}.{kind}.jsonl"

    def turn(self, step: int, turn: int) -> Path:
        """What the executor did in a turn of a step that is not settled yet."""
        return self.root / "executor" / "turns" / f"step-{step:06d}.turn-{turn}.jsonl"

    def checkpoint(self, role: str, step: int) -> Path:
        """The state after ``step`` updates of ``role``."""
        return self.root / role / f"checkpoint-{step:06d}"

    def checkpoints(self, role: str) -> list[int]:
        """The published checkpoints, newest first, each by its number of updates."""
        found = (self.root / role).glob("checkpoint-" + 6 * "[0-9]")
        return sorted((int(path.name.partition("-")[2]) for path in found), reverse=True)

    def last_checkpoint(self, role: str) -> int | None:
        """The number of updates in the newest published checkpoint, None when there is none."""
        return max(self.checkpoints(role), default=None)

    def traffic(self) -> dict[str, int]:
        """The bytes that have crossed between planner and executor: "requests", "reports", "outcomes"."""
        patterns = {kind: f"mail/step-*/turn-*.{kind}.jsonl" for kind in ("requests", "reports")}
        patterns["outcomes"] = "outcomes/step-*.jsonl"
        return {kind: sum(p.stat().st_size for p in self.root.glob(pattern)) for kind, pattern in patterns.items()}


def publish(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON line per row and publish the file. A published file is left as it is.

    A server that was killed makes its step again with the same random numbers, and so comes to the same files. Raises
    LogError when the file stands there and says something else.
    """
    text = _lines(rows)
    if not path.exists():
        publish_text(path, text)
    elif path.read_bytes() != text.encode():
        raise LogError(
            f"{path} was published by an earlier attempt at this step, and this attempt differs: continue the run as "
            "it was started (machine, libraries, threads), or start a new run"
        )


def publish_text(path: Path, text: str) -> None:
    """Publish a text file in one rename; a published file is left as it is."""
    if not path.exists():
        _put(path, text)


def replace(path: Path, rows: Iterable[dict]) -> None:
    """Publish a file in the place of the one that its writer published before: a reader sees either, and it whole."""
    _put(path, _lines(rows))


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _put(path: Path, text: str) -> None:
    _make_folder(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    _write(temporary, text)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def publish_first(path: Path, text: str) -> None:
    """Publish a text file that has several writers: the first one's stays."""
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    _write(temporary, text)
    try:
        os.link(temporary, path)  # unlike a rename it fails where a file is
    except FileExistsError:
        pass
    except OSError:  # a disk without hard links
        if not path.exists():
            os.replace(temporary, path)
    temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def publish_folder(path: Path, write) -> None:
    """Publish a folder: ``write(temporary_folder)`` fills it, then one rename."""
    if path.exists():
        return
    _make_folder(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    _sync_folder(temporary)
    os.rename(temporary, path)
    _sync_folder(path.parent)


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _make_folder(folder: Path) -> None:
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """New names in a folder must reach the disk too (where the system can sync a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def read(path: Path, mend: str = MEND) -> list[dict]:
    """The rows of a published file. Raises LogError when it is missing or a line is damaged, naming the line.

    ``mend`` is what the error tells a person to do about it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LogError(f"{path} is missing: {mend}") from None
    except UnicodeDecodeError:
        raise LogError(f"{path} is damaged (not UTF-8 text): {mend}") from None
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], 1):  # splitlines() would cut at U+2028 and its like too
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise LogError(f"{path} is damaged in line {number} (not JSON): {mend}") from None
    if text and not text.endswith("\n"):
        raise LogError(f"{path} is damaged (its last line is torn): {mend}")
    return rows


def read_config(root: Path) -> dict:
    """What the run in ``root`` was started with. Raises LogError when it is damaged."""
    path = root / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(facts, dict):
            return facts
        problem = "not a JSON object"
    except ValueError as error:  # not JSON, or not UTF-8
        problem = str(error)
    raise LogError(f"{path} is damaged ({problem}): start a new run under another name")


def read_trajectories(path: Path) -> list[Trajectory]:
    """A published step's trajectories. Raises LogError as ``read`` does, and for a line that is no trajectory."""
    return decoded(path, Trajectory.from_json)


def read_rollouts(path: Path) -> list[Rollout]:
    """A published evaluation's rollouts. Raises LogError as ``read`` does, and for a line that is no rollout."""

    def decode(row: dict) -> Rollout:
        return Rollout(Trajectory.from_json(row["planner"]), [Trajectory.from_json(call) for call in row["calls"]])

    return decoded(path, decode, "remove it and resume the demo, to evaluate again")


def read_metrics(path: Path) -> list[dict]:
    """The lines of a ``metrics.jsonl``, [] before the first step. Raises LogError when it is damaged."""

    def decode(row: dict) -> dict:
        return {"step": row["step"], "role": row["role"]} | row

    mend = "remove it and resume the run, to measure its steps again (without their updates)"
    return decoded(path, decode, mend) if path.exists() else []


def decoded(path: Path, decode: Callable[[dict], object], mend: str = MEND) -> list:
    """``decode(row)`` of each row of a published file. Raises LogError as ``read`` does, and where decode fails."""
    try:
        return [decode(row) for row in read(path, mend)]
    except LogError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # what JSON of another shape makes decode raise
        raise LogError(f"{path} is damaged ({error}): {mend}") from None


def first(*paths: Path) -> Path | None:
    """The first of ``paths`` that is published, None when none is."""
    return next((path for path in paths if path.exists()), None)


@contextlib.contextmanager
def owned(root: Path, role: str) -> Iterator[None]:
    """Be the one server of ``role`` in the run while the block runs. Raises LogError when there is another one.

    The lock is the operating system's and ends with its process, however that ends; the file that stays is no lock.
    """
    path = root / role / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            _lock(file)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                print(f"{root} is on a disk without locks: take care to start no second {role}")
            else:
                file.seek(0)
                raise LogError(
                    f"another {role} (process {file.read().strip() or 'unknown'}) is at work on {root}: "
                    "stop that one first, or let it do the work"
                ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock(file) -> None:
    """Lock an open file or raise OSError."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(1 << 20)  # beyond the text: a locked byte cannot be read there
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
