"""The trajectory log: plain files that stand in for the wires between decoupled servers.

Every file has one writer and is published once: written to a temporary name, flushed to disk, renamed into place; after
that it never changes. So no locks are needed, it works on a network disk, and a reader sees a whole file or none.
(A name that ends in ``.tmp`` was being written when its writer was killed: nobody reads it.)

    RUN/config.json                                    what the run was started with
    RUN/mail/step-000012/turn-1.requests.jsonl         the planner's sub-tasks of one turn
    RUN/mail/step-000012/turn-1.reports.jsonl          the executor's reports, in the same order
    RUN/outcomes/step-000012.jsonl                     one scalar per rollout: was the planner right?
    RUN/planner/step-000012.jsonl, RUN/executor/...    the trajectories, one a line
    RUN/<role>/metrics.jsonl                           what the role's steps measured, one step a line (docs/metrics.md)
    RUN/<role>/checkpoint-000012/                      adapter (PEFT's format), optimizer, the number of updates
    RUN/evaluation/before-sampled.jsonl, ...           the demo's attempts at the test questions, one rollout a line

Only ``metrics.jsonl`` grows. The server of its role replaces it whole, by a rename as well, after a step's update and
before that step's checkpoint. So a checkpoint never lacks its line, and a step that is learned again after a kill
replaces its own line: every step has exactly one. Wall-clock figures (names with "second") are in this file of the
log alone; everything else in the log repeats bit for bit.

``datasets.load_dataset("json", data_files="RUN/planner/step-*.jsonl")`` reads the trajectories.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
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

    def checkpoint(self, role: str, step: int) -> Path:
        """The state after ``step`` updates of ``role``."""
        return self.root / role / f"checkpoint-{step:06d}"

    def last_checkpoint(self, role: str) -> int | None:
        """The number of updates in the newest published checkpoint, None when there is none."""
        found = [int(p.name.partition("-")[2]) for p in (self.root / role).glob("checkpoint-??????")]
        return max(found, default=None)


def publish(path: Path, rows: Iterable[dict], sync: bool = True) -> None:
    """Write one JSON line per row and publish the file; a published file is left as it is."""
    publish_text(path, _lines(rows), sync)


def replace(path: Path, rows: Iterable[dict]) -> None:
    """Publish a file in the place of the one that its writer published before: a reader sees either, and it whole."""
    _write(path, _lines(rows), sync=True)


def publish_text(path: Path, text: str, sync: bool = True) -> None:
    """Publish a text file in one rename.

    ``sync=False`` does not wait for the disk: whole or absent for every reader and after any kill, but a power cut may
    lose it. Mail is published so, since a step that lacks its trajectories is rolled out again anyway.
    """
    if not path.exists():
        _write(path, text, sync)


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write(path: Path, text: str, sync: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if sync:
        _sync_folder(path.parent)


def publish_folder(path: Path, write) -> None:
    """Publish a folder: ``write(temporary_folder)`` fills it, then one rename."""
    if path.exists():
        return
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    os.rename(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The rename itself must reach the disk too (where the system can sync a folder)."""
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
    return _decoded(path, Trajectory.from_json, MEND)


def read_rollouts(path: Path) -> list[Rollout]:
    """A published evaluation's rollouts. Raises LogError as ``read`` does, and for a line that is no rollout."""

    def decode(row: dict) -> Rollout:
        return Rollout(Trajectory.from_json(row["planner"]), [Trajectory.from_json(call) for call in row["calls"]])

    return _decoded(path, decode, "remove it and resume the demo, to evaluate again")


def read_metrics(path: Path) -> list[dict]:
    """The lines of a ``metrics.jsonl``, [] before the first step. Raises LogError when it is damaged."""

    def decode(row: dict) -> dict:
        return {"step": row["step"], "role": row["role"]} | row

    mend = "remove it and resume the run, to measure its steps again (without their updates)"
    return _decoded(path, decode, mend) if path.exists() else []


def _decoded(path: Path, decode, mend: str) -> list:
    try:
        return [decode(row) for row in read(path, mend)]
    except LogError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # what JSON of another shape makes decode raise
        raise LogError(f"{path} is damaged ({error}): {mend}") from None
