"""Benchmark files: rows as they were published -> tasks, and how each benchmark is graded.

    benchmarks.load("gaia", "validation", "data/GAIA")      .tasks, .pages, .grader, .files

| name                       | file (``data``)                                         | graded by                    |
|----------------------------|---------------------------------------------------------|------------------------------|
| atlas                      | comes with the repository                               | the GAIA scorer              |
| gaia                       | the dataset's folder, or a metadata.parquet or .jsonl   | the GAIA scorer              |
| xbench, browsecomp         | CSV with encrypted columns                              | exact match, else the judge  |
| webwalker, webwalker-closed| JSON lines                                              | exact match, else the judge  |
| hotpotqa, 2wiki, musique   | JSON, JSON lines or parquet                             | normalised exact match; F1   |

"webwalker" is the open setting (free search), "webwalker-closed" starts from the page that the row names. The rows of
hotpotqa, 2wiki and musique bring paragraphs of their own; together they are the pages to search if no corpus is named.

A file with no rows, without a column it needs, with a task twice, or whose key does not fit is a DataError: a benchmark
that is half read gives a number that means nothing. Without a judge the judged benchmarks are graded by exact match
alone, which is too strict, and the grader's name says so.

Only ``Task.question`` and the names of its attachments are meant for an agent. Gold answers are left out of ``print``;
annotators' notes and paths are not read at all.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from minimgrpo import readers, tasks
from minimgrpo.scorer import exact_match, f1_score, gaia_score
from minimgrpo.tasks import DataError
from minimgrpo.tools import Page

GAIA_SENTINEL = "0-0-0-0-0"  # a row that stands in GAIA's file and is no task


@dataclass(frozen=True)
class Task:
    """One task. ``question`` is what the planner reads; ``answers`` are all that count as right, none if hidden."""

    task_id: str
    question: str
    level: str
    answers: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Benchmark:
    """Tasks, the pages that come with them, and what grades them: "gaia", "exact", "squad" or "hotpotqa"."""

    name: str
    tasks: list[Task]
    grader: str
    pages: list[Page] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)
    """Attachments: the name an agent may use -> where it lies."""


def load(name: str, split: str = "validation", data: str | Path | None = None) -> Benchmark:
    """Read a benchmark. Raises DataError: unknown name, missing or unreadable file, wrong columns, wrong key."""
    if name == "atlas":
        questions = tasks.load_questions(split, data)
        found = [Task(q.task_id, q.question, str(q.level), (q.answer,)) for q in questions]
        return Benchmark(name, found, "gaia", tasks.load_pages())
    if name not in READERS:
        raise DataError(f"There is no benchmark {name!r}: choose {', '.join(NAMES)}.")
    if data is None:
        raise DataError(f"{name} does not come with this repository: name its file or folder with --data.")
    path = Path(data)
    benchmark = READERS[name](name, split, path)
    if not benchmark.tasks:
        raise DataError(f"{path} has no rows.")
    seen: set[str] = set()
    for task in benchmark.tasks:
        if task.task_id in seen:
            raise DataError(f"{path}: the task {task.task_id!r} stands there for the second time.")
        if not task.question.strip():
            raise DataError(f"{path}: the task {task.task_id!r} has no question.")
        seen.add(task.task_id)
    return benchmark


def grade(grader: str, prediction: str, answers: tuple[str, ...]) -> dict:
    """{"correct": bool} or, for "squad" and "hotpotqa", {"correct", "f1"}: the best over the accepted answers.

    >>> grade("hotpotqa", "the river Nile", ("Nile",))
    {'correct': False, 'f1': 0.6666666666666666}
    """
    if grader in ("squad", "hotpotqa"):
        return {
            "correct": any(exact_match(prediction, answer) for answer in answers),
            "f1": max(f1_score(prediction, answer, hotpot=grader == "hotpotqa") for answer in answers),
        }
    check = {"gaia": gaia_score, "exact": exact_match}[grader]
    return {"correct": any(check(prediction, answer) for answer in answers)}


# --------------------------------------------------------------------------------------------------------------- files


def rows(path: Path, *columns: str) -> Iterator[tuple[str, dict]]:
    """(where, row) of a .jsonl, .json, .csv or .parquet file; every row has ``columns``, whatever else it has.

    ``where`` names the file and the row for an error message. A CSV may begin with a byte-order mark.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist: check its name.")
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet  # comes with datasets; half a second to import

            found = parquet.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            csv.field_size_limit(2**31 - 1)
            found = list(csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")))
        else:
            text = path.read_bytes().decode("utf-8-sig")
            whole = path.suffix == ".json" and text.lstrip().startswith("[")
            found = json.loads(text) if whole else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, OSError, csv.Error) as error:  # pyarrow's own errors are among these
        raise DataError(f"{path} is not readable as {path.suffix[1:] or 'JSON lines'}: {error}.") from None
    if not found:
        raise DataError(f"{path} has no rows.")
    for number, row in enumerate(found, 1):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where} is not an object with columns.")
        if missing := [column for column in columns if row.get(column) is None]:
            raise DataError(f"{where} lacks {', '.join(missing)}; it has {', '.join(map(str, row)) or 'nothing'}.")
        yield where, row


def _gold(*values) -> tuple[str, ...]:
    """The answers that are there: a blank or a "?" is one that the benchmark's authors keep to themselves."""
    return tuple(str(value) for value in values if value is not None and str(value).strip() not in ("", "?"))


def _level(where: str, value) -> str:
    """GAIA's level is a number in one of its files and a text in the other."""
    try:
        return str(int(value))
    except (ValueError, TypeError):
        raise DataError(f"{where}: Level must be a whole number, not {value!r}.") from None


# ---------------------------------------------------------------------------------------------------------------- GAIA


def _gaia(name: str, split: str, path: Path) -> Benchmark:
    """The dataset's folder, a split's folder, or one metadata file. Attachments lie beside the metadata file."""
    if path.is_dir():
        folders = (path / "2023" / split, path / split, path)
        candidates = [folder / f"metadata.{kind}" for folder in folders for kind in ("parquet", "jsonl")]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise DataError(f"{path} has neither metadata.parquet nor metadata.jsonl (nor has 2023/{split} in it).")
        path = found
    out, files = [], {}
    for where, row in rows(path, "task_id", "Question", "Level"):
        if row["task_id"] == GAIA_SENTINEL:
            continue
        question, attached = str(row["Question"]), str(row.get("file_name") or "")
        if attached:
            files[attached] = path.parent / attached
            if Path(attached).name != attached or not files[attached].is_file():
                raise DataError(f"{where}: the attachment {attached} is not in {path.parent}: download it as well.")
            question += f"\n\nAttached file: {attached}"
        gold = _gold(row.get("Final answer"))
        out.append(Task(str(row["task_id"]), question, _level(where, row["Level"]), gold))
    if problem := readers.lacking(files):
        raise DataError(problem)
    return Benchmark(name, out, "gaia", files=files)


# --------------------------------------------------------------------------------------------------- encrypted columns


def xor_text(encoded: str, key: bytes) -> str:
    """base64 -> bytes, each XORed with the key repeated -> text. Raises ValueError when key or text do not fit.

    Random bytes are hardly ever UTF-8 without control characters, so a wrong key shows.

    >>> xor_text("Iw4=", b"ka")
    'Ho'
    """
    if not key:
        raise ValueError("the key is empty")
    data = base64.b64decode(encoded, validate=True)
    text = bytes(a ^ b for a, b in zip(data, cycle(key), strict=False)).decode("utf-8")
    if any((ord(c) < 32 and c not in "\t\r\n") or ord(c) == 127 for c in text):
        raise ValueError("control characters in the text")
    return text


def xbench_text(encoded: str, canary: str) -> str:
    """XBench: the key is the canary itself."""
    return xor_text(encoded, canary.encode("utf-8"))


def browsecomp_text(encoded: str, canary: str) -> str:
    """BrowseComp: the key is the canary's SHA-256 (32 bytes)."""
    return xor_text(encoded, hashlib.sha256(canary.encode("utf-8")).digest())


def _decrypted(where: str, decrypt, row: dict, *columns: str) -> list[str]:
    try:
        return [decrypt(row[column], row["canary"]) for column in columns]
    except (ValueError, binascii.Error):  # UnicodeDecodeError is a ValueError
        raise DataError(f"{where} cannot be decrypted: its canary is not its key, or it is damaged.") from None


def _xbench(name: str, _split: str, path: Path) -> Benchmark:
    out = []
    for where, row in rows(path, "id", "prompt", "answer", "canary"):
        question, answer = _decrypted(where, xbench_text, row, "prompt", "answer")
        out.append(Task(f"xbench-{row['id']}", question, "all", _gold(answer)))
    return Benchmark(name, out, "exact")


def _browsecomp(name: str, _split: str, path: Path) -> Benchmark:
    out = []
    for number, (where, row) in enumerate(rows(path, "problem", "answer", "canary"), 1):
        question, answer = _decrypted(where, browsecomp_text, row, "problem", "answer")
        out.append(Task(f"browsecomp-{number:04d}", question, "all", _gold(answer)))
    return Benchmark(name, out, "exact")


# -------------------------------------------------------------------------------------------------------- WebWalkerQA


def _webwalker(name: str, _split: str, path: Path) -> Benchmark:
    out = []
    for number, (where, row) in enumerate(rows(path), 1):
        row = {key.lower(): value for key, value in row.items()}  # both spellings were published
        if missing := [column for column in ("question", "answer", "root_url") if not row.get(column)]:
            raise DataError(f"{where} lacks {', '.join(missing)}; it has {', '.join(row) or 'nothing'}.")
        info = {key.lower(): value for key, value in (row.get("info") or {}).items()}
        question = str(row["question"])
        if name == "webwalker-closed":
            question += f"\n\nStart from the page {row['root_url']}"
        level = str(info.get("difficulty_level") or "all").lower()
        out.append(Task(f"webwalker-{number:04d}", question, level, _gold(row["answer"])))
    return Benchmark(name, out, "exact")


# ------------------------------------------------------------------------------------------- questions with paragraphs


def _hotpotqa(name: str, _split: str, path: Path) -> Benchmark:
    """HotpotQA and 2WikiMultihopQA: the original JSON (lists of pairs), or parquet (a dict of two lists)."""
    out, pages = [], _Pages()
    for where, row in rows(path, "question", "answer"):
        task_id, level = row.get("_id") or row.get("id"), row.get("level") if name == "hotpotqa" else row.get("type")
        if not task_id:
            raise DataError(f"{where} lacks _id (or id); it has {', '.join(row)}.")
        context = row.get("context") or []
        try:
            if isinstance(context, dict):
                texts = context["sentences"] if "sentences" in context else context["content"]
                context = zip(context["title"], texts, strict=True)
            for title, sentences in context:
                pages.add(str(title), " ".join(sentence.strip() for sentence in sentences))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{where}: its context is not a list of titles and sentences ({error!r}).") from None
        out.append(Task(str(task_id), str(row["question"]), str(level or "all"), _gold(row["answer"])))
    return Benchmark(name, out, "hotpotqa" if name == "hotpotqa" else "squad", pages.pages)


def _musique(name: str, _split: str, path: Path) -> Benchmark:
    out, pages = [], _Pages()
    for where, row in rows(path, "id", "question", "answer"):
        if row.get("answerable") is False:
            raise DataError(f"{where} cannot be answered from its paragraphs: use the file of answerable questions.")
        for paragraph in row.get("paragraphs") or []:
            try:
                pages.add(str(paragraph["title"]), str(paragraph["paragraph_text"]))
            except (KeyError, TypeError) as error:
                raise DataError(f"{where}: a paragraph without title and paragraph_text ({error!r}).") from None
        hops, gold = str(row["id"]).partition("__")[0], _gold(row["answer"], *(row.get("answer_aliases") or ()))
        out.append(Task(str(row["id"]), str(row["question"]), hops, gold))
    return Benchmark(name, out, "squad", pages.pages)


class _Pages:
    """Paragraphs as pages: the same one stands in many rows and is kept once."""

    def __init__(self):
        self.pages: list[Page] = []
        self._seen: set[tuple[str, str]] = set()

    def add(self, title: str, text: str) -> None:
        if (title, text) not in self._seen:
            self._seen.add((title, text))
            self.pages.append(Page(str(len(self.pages) + 1), title, text))


READERS = {
    "gaia": _gaia,
    "xbench": _xbench,
    "browsecomp": _browsecomp,
    "webwalker": _webwalker,
    "webwalker-closed": _webwalker,
    "hotpotqa": _hotpotqa,
    "2wiki": _hotpotqa,
    "musique": _musique,
}
NAMES = ("atlas", *READERS)
