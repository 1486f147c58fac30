"""The pages an executor may search and the questions a planner is asked, read from JSON lines.

The repository's own are the Atlas (``data/atlas``, described in ``data/README.md``)::

    pages = tasks.load_pages()
    questions = tasks.load_questions("validation")

Only ``Question.question`` is meant for an agent. The answer and everything that helps to grade it are left out of
``print(question)``, so a question that lands in a prompt as a whole by mistake does not give itself away.

Files are read with ``json`` and not with ``datasets``: importing that takes more than a second and it keeps a cache on
disk, for files of a few hundred kilobytes. They load there all the same: ``load_dataset("json", data_files=...)``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from minimgrpo.atlas import Step
from minimgrpo.tools import Page

_PACKAGE = Path(__file__).parent
DATA = _PACKAGE / "data" if (_PACKAGE / "data").is_dir() else _PACKAGE.parent / "data"
"""The data folder: inside the package when installed from a wheel, else the repository's."""


class DataError(ValueError):
    """A data file that is missing, empty, unreadable or without a column it needs."""


@dataclass(frozen=True)
class Question:
    """One question of a benchmark file. Everything below ``level`` is the grader's and never shown to an agent."""

    task_id: str
    question: str
    level: int
    answer: str = field(repr=False)
    kind: str = field(repr=False)
    entities: tuple[str, ...] = field(repr=False)
    """What the question is about."""
    keys: tuple[str, ...] = field(repr=False)
    """What a search query must name to be specific."""
    steps: tuple[Step, ...] = field(repr=False, compare=False)
    """The delegations of a team that answers it correctly."""


def load_pages(path: str | Path | None = None) -> list[Page]:
    """The pages of ``path`` (columns ``id``, ``title``, ``text``), by default the Atlas."""
    path = Path(path or DATA / "atlas" / "pages.jsonl")
    return [Page(row["id"], row["title"], row["text"]) for _, row in _rows(path, ("id", "title", "text"))]


def load_questions(split: str = "train", path: str | Path | None = None) -> list[Question]:
    """The questions of ``path`` (GAIA's columns), by default the Atlas's "train", "validation" or "test"."""
    path = Path(path or DATA / "atlas" / f"{split}.jsonl")
    out = []
    for number, row in _rows(path, ("task_id", "Question", "Final answer"), ("Level", "Annotator Metadata")):
        try:
            meta = row["Annotator Metadata"]
            question = Question(
                task_id=row["task_id"],
                question=row["Question"],
                level=int(row["Level"]),
                answer=row["Final answer"],
                kind=meta["kind"],
                entities=tuple(meta["entities"]),
                keys=tuple(meta["keys"]),
                steps=tuple(Step(**step) for step in meta["steps"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}, line {number} is not an Atlas question: {error!r}.") from error
        out.append(question)
    return out


def _rows(path: Path, texts: tuple[str, ...], others: tuple[str, ...] = ()) -> list[tuple[int, dict]]:
    """Line numbers and rows. Each has the columns ``texts`` (strings; the first is its key) and ``others``."""
    if not path.is_file():
        raise DataError(f"{path} does not exist: check its name (the Atlas is built by data/atlas/build.py).")
    rows: list[tuple[int, dict]] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise DataError(f"{where} is not readable as JSON: {error}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is not a JSON object: {line[:40]!r}.")
        if missing := [column for column in (*texts, *others) if column not in row]:
            raise DataError(f"{where} lacks {', '.join(missing)}; it has {', '.join(sorted(row)) or 'nothing'}.")
        if wrong := [column for column in texts if not isinstance(row[column], str)]:
            raise DataError(f"{where}: {wrong[0]} must be text, not {row[wrong[0]]!r}.")
        if row[texts[0]] in seen:
            raise DataError(f"{where}: {texts[0]} {row[texts[0]]!r} stands there for the second time.")
        seen.add(row[texts[0]])
        rows.append((number, row))
    if not rows:
        raise DataError(f"{path} has no rows.")
    return rows
