"""Grade files without nbgrader, hidden tests included.

    python notebooks/assignments/grade.py assignment1 ada/assignment1.py ben/assignment1.py

prints each student's points and, for every test that failed, the first line of what the student did wrong. A file is
run cell by cell and each test through ``minimgrpo.checks``: a broken cell, a loop without end, or an exit() costs the
points of its own task. (Code is run as it is, with your rights: use an account or a container made for that.)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from minimgrpo import course, display
from minimgrpo.checks import Submission, check

TASKS = Path(__file__).resolve().parent / "tasks"


def failures(name: str, answers: dict[str, Any], only: str = "") -> dict[str, str]:
    """Run the tests of an assignment on ``answers``, {task: function or class} -> {test: message} of those that fail.

    What is not in ``answers`` is the reference. ``only``: the tests of this task.
    """
    path = TASKS / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, str(path), "exec"), names)
    names |= answers
    failed = {}
    for cell in course.parse(text):
        if cell.kind == "test" and (not only or re.fullmatch(rf"{only}(__\w+)?", cell.name)):
            try:
                check(names[f"test_{cell.name}"])
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                stub = isinstance(error, NotImplementedError) and not str(error)
                failed[cell.name] = "not solved" if stub else f"{kind}{error}"
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(prog="grade.py", description="Grade files without nbgrader, hidden tests included.")
    parser.add_argument("name", metavar="ASSIGNMENT", help="such as assignment1")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the students' files")
    args = parser.parse_args(argv)
    path = TASKS / f"{args.name}.py"
    for needed in (path, *args.files):
        if not needed.is_file():
            return display.complain(f"there is no file {needed}")
    for file in args.files:
        if file.suffix == ".ipynb":
            return display.complain(f"{file} is a notebook: notebooks are graded by nbgrader; name .py files")
    cells = course.parse(path.read_text(encoding="utf-8"))
    for file in args.files:
        submission = Submission(file)
        failed = failures(args.name, {c.name: getattr(submission, c.name) for c in cells if c.kind == "task"})
        points = sum(c.points for c in cells if c.kind == "test" and c.name not in failed)
        print(f"{points:3} of {sum(c.points for c in cells)}  {file}")
        cause = "; ".join(submission.problems)
        if cause:  # said once, not again for every test that it costs
            print(f"    {' '.join(cause.split())}")
        for cell in cells:
            if cell.kind == "test" and cell.name in failed and failed[cell.name] != cause:
                message = failed[cell.name].removesuffix(f"; {cause}").partition("\n")[0]
                print(f"    {cell.name} (-{cell.points}): {message or 'a check failed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
