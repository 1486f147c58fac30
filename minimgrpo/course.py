"""The assignments as a student gets them: ``python -m minimgrpo.course make DIR``.

Each assignment becomes a folder with the same tasks twice, to be solved in one of the two:

    DIR/assignment1/assignment1.ipynb         a notebook; its tests are cells (also what nbgrader hands out)
    DIR/assignment1/assignment1.py            the same as a file, with
    DIR/assignment1/test_assignment1.py       its tests: pytest -m assignment1

All of it is made from ``data/course/assignment1.py``: cells in one Python file, no solutions. The course's own
repository has the complete files, from which those are made, in ``notebooks/assignments/tasks`` (see FORMAT.md there);
no wheel and no sdist contains them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from minimgrpo import display
from minimgrpo.checks import CELL, cells
from minimgrpo.tasks import DATA

COURSE = DATA / "course"
HEAD = re.compile(r"# %% (\[markdown\]|setup|example|task|test)(?: (\w+))?(?: (\d+))?")
STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")  # what nbgrader puts there, too
IMPORT = "from minimgrpo.checks import check, same"


class CourseError(ValueError):
    """An assignment's file that does not follow FORMAT.md, or a folder that cannot be written."""


@dataclass(frozen=True)
class Cell:
    """One cell: ``kind`` as in its head line, the ``name`` of the task or test, a test's ``points``, and the text."""

    kind: str
    name: str
    points: int
    text: str


def parse(text: str) -> list[Cell]:
    """Read an assignment's file. Raises CourseError where it does not follow the format.

    >>> parse("# %% [markdown]\\n# ## A title\\n# %% test ratio 2\\ndef test_ratio():\\n    pass\\n")[1].points
    2
    """
    found = []
    for line, cell in cells(text):
        head, _, body = cell.partition("\n")
        match = HEAD.fullmatch(head.strip())
        if not match:
            raise CourseError(
                f"line {line} must begin a cell, like '# %% task NAME' or '# %% test NAME POINTS': {head}"
            )
        kind, name, points = match[1], match[2] or "", int(match[3] or 0)
        body = body.strip("\n")
        if kind == "[markdown]":
            body = "\n".join(row.removeprefix("#").removeprefix(" ") for row in body.split("\n"))
        if kind in ("task", "test") and not re.search(
            rf"^(def|class) {'test_' * (kind == 'test')}{name}\b", body, re.M
        ):
            raise CourseError(f"the {kind} at line {line} must define {'test_' * (kind == 'test')}{name}")
        if kind == "test" and not points:
            raise CourseError(f"the test at line {line} has no points: '# %% test {name} POINTS'")
        found.append(Cell(kind, name, points, body))
    return found


def strip(text: str) -> str:
    """Take out what a student must not see, as nbgrader does: solutions become a stub, hidden tests vanish.

    >>> print(strip("def f():\\n    ### BEGIN SOLUTION\\n    return 1\\n    ### END SOLUTION\\n"), end="")
    def f():
        # YOUR CODE HERE
        raise NotImplementedError()
    """
    kept, region = [], ""
    for line in text.splitlines():
        mark = line.strip()
        if mark in ("### BEGIN SOLUTION", "### BEGIN HIDDEN TESTS"):
            if region:
                raise CourseError(f"{mark!r} inside {region!r}")
            region = mark.removeprefix("### BEGIN ")
            if region == "SOLUTION":
                indent = line[: len(line) - len(line.lstrip())]
                kept += [indent + row for row in STUB]
        elif mark in ("### END SOLUTION", "### END HIDDEN TESTS"):
            if mark.removeprefix("### END ") != region:
                raise CourseError(f"{mark!r} without its beginning")
            region = ""
        elif not region:
            kept.append(line)
    if region:
        raise CourseError(f"'### BEGIN {region}' without its end")
    return "\n".join(kept).rstrip("\n") + "\n"


def notebook(text: str) -> dict:
    """The notebook of an assignment's file, in nbgrader's format (schema 3). Works on complete and stripped files."""
    found = []
    for number, cell in enumerate(parse(text)):
        source, grade, solution = cell.text, cell.kind == "test", cell.kind == "task"
        grade_id = {"task": cell.name, "test": f"test_{cell.name}"}.get(cell.kind, f"given-{number:02}")
        if grade:
            source = f"{IMPORT}\n\n\n{source}\n\n\ncheck(test_{cell.name})"
        marks = {"grade": grade, "grade_id": grade_id, "locked": not solution, "schema_version": 3}
        marks |= {"solution": solution, "task": False}
        if grade:
            marks["points"] = cell.points
        entry = {"id": f"cell-{number:02}", "metadata": {"nbgrader": marks}, "source": source.splitlines(keepends=True)}
        if cell.kind == "example":
            entry["metadata"] = {}  # a student may play with it
        if cell.kind == "[markdown]":
            entry["cell_type"] = "markdown"
        else:
            entry |= {"cell_type": "code", "execution_count": None, "outputs": []}
        found.append(dict(sorted(entry.items())))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def stub(text: str) -> str:
    """The file to fill in: everything but the tests and the examples."""
    kept = [cell.strip("\n") for _, cell in cells(text) if not cell.startswith((f"{CELL} test ", f"{CELL} example"))]
    return "\n\n\n".join(kept) + "\n"


def tests(text: str, name: str) -> str:
    """The tests of the file called ``name``.py."""
    parsed = parse(text)
    names = [cell.name for cell in parsed if cell.kind == "task"]
    lines = [
        f'"""The tests of {name}.py: pytest -m {name}."""',
        "\n".join(["from pathlib import Path", "", "import pytest", "", "from minimgrpo.checks import Submission"]),
        "\n".join(cell.text for cell in parsed if cell.kind == "setup"),
        "\n".join(
            [
                f"pytestmark = pytest.mark.{name}",
                f'submission = Submission(Path(__file__).with_name("{name}.py"))',
                *(f"{task} = submission.{task}" for task in names),
            ]
        ),
    ]
    for cell in parsed:
        if cell.kind == "test":
            points = f"{cell.points} point{'s' * (cell.points != 1)}"
            lines.append(f"\n# {points}\n{cell.text}")
    return "\n\n".join(lines) + "\n"


def total(text: str) -> int:
    """All points of an assignment."""
    return sum(cell.points for cell in parse(text))


def make(folder: Path) -> list[str]:
    """Write the student copy into ``folder``, which must not exist or be empty -> the assignments' names.

    Raises CourseError when it cannot be written there.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CourseError(f"{folder} exists and is not an empty folder: choose another name")
        names = sorted(path.stem for path in COURSE.glob("assignment*.py"))
        if not names:
            raise CourseError(f"there are no assignments in {COURSE}: install minimgrpo again")
        marks = []
        for name in names:
            text = (COURSE / f"{name}.py").read_text(encoding="utf-8")
            (folder / name).mkdir(parents=True)
            title = parse(text)[0].text.split("\n")[0].lstrip("# ")
            marks.append(f"    {name}: {title} ({total(text)} points)")
            files = {f"{name}.ipynb": json.dumps(notebook(text), indent=1, ensure_ascii=False) + "\n"}
            files |= {f"{name}.py": stub(text), f"test_{name}.py": tests(text, name)}
            for file, content in files.items():
                (folder / name / file).write_text(content, encoding="utf-8")
        settings = "\n".join(("[pytest]", "addopts = -q --tb=short", "markers =", *marks)) + "\n"
        (folder / "pytest.ini").write_text(settings, encoding="utf-8")
        (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        readme = (COURSE / "README.md").read_text(encoding="utf-8")
        table = [row.strip().replace(": ", " | ", 1) for row in marks]
        readme = readme.replace("{assignments}", "\n".join(f"| {row} |" for row in table))
        (folder / "README.md").write_text(readme, encoding="utf-8")
    except OSError as error:
        raise CourseError(f"{error.strerror or error} ({error.filename})") from None
    return names


CONFTEST = '''\
"""Each test runs as in the notebooks: with a time limit, and in an empty folder of its own."""

from minimgrpo.checks import pytest_pyfunc_call  # noqa: F401
'''


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(prog="minimgrpo.course", description="The assignments of the course.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=display.Parser)
    command = commands.add_parser("make", help="write a student copy: notebooks, files to fill in, and their tests")
    command.add_argument("folder", type=Path, metavar="DIR", help="a folder that is new or empty")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        names = make(args.folder)
    except CourseError as error:
        return display.complain(str(error))
    print(f"{len(names)} assignments are in {args.folder}; README.md there says how to begin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
