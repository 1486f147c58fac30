"""The trajectory log: plain files that stand in for the wires between decoupled servers.

Every file has one writer and is published once: written to a temporary name, flushed to disk, renamed into place; after
that it never changes. So no locks are needed, it works on a network disk, and a reader sees a whole file or none.

    RUN/config.json                                    what the run was started with
    RUN/mail/step-000012/turn-1.requests.jsonl         the planner's sub-tasks of one turn
    RUN/mail/step-000012/turn-1.reports.jsonl          the executor's reports, in the same order
    RUN/outcomes/step-000012.jsonl                     one scalar per rollout: was the planner right?
    RUN/planner/step-000012.jsonl, RUN/executor/...    the trajectories, one a line
    RUN/<role>/checkpoint-000012/                      adapter (PEFT's format), optimizer, what the step measured

``datasets.load_dataset("json", data_files="RUN/planner/step-*.jsonl")`` reads the trajectories.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class LogError(ValueError):
    """A file of the run is missing, damaged or in the way; the message says which and what to do."""


class RunLog:
    """The files of one run under ``root``."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def trajectories(self, role: str, step: int) -> Path:
        return self.root / role / f"step-{step:06d}.jsonl"

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
    publish_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), sync)


def publish_text(path: Path, text: str, sync: bool = True) -> None:
    """Publish a text file in one rename.

    ``sync=False`` does not wait for the disk: whole or absent for every reader and after any kill, but a power cut may
    lose it. Mail is published so, since a step that lacks its trajectories is rolled out again anyway.
    """
    if path.exists():
        return
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


def read(path: Path) -> list[dict]:
    """The rows of a published file. Raises LogError when it is missing or a line is damaged, naming the line."""
    mend = "put back a copy of it, or start a new run"
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
