"""The course: what is derived from the one source, graders that tell right from wrong, and the student copy."""

import importlib.util
import inspect
import re
import runpy
from pathlib import Path

import pytest

from minimgrpo import course
from minimgrpo.checks import check

ASSIGNMENTS = Path(__file__).parent.parent / "notebooks" / "assignments"
NAMES = sorted(path.stem for path in (ASSIGNMENTS / "tasks").glob("assignment*.py"))
MARKS = {name: getattr(pytest.mark, name) for name in NAMES}
pytestmark = pytest.mark.skipif(not NAMES, reason="the assignments' sources are in the repository, not in the sdist")


def source(name: str) -> str:
    return (ASSIGNMENTS / "tasks" / f"{name}.py").read_text(encoding="utf-8")


def run(code: str, path: str) -> dict:
    names = {"__name__": Path(path).stem}
    exec(compile(code, path, "exec"), names)
    return names


def wrong_solutions(name: str) -> dict:
    """{task__misconception: function or class} of an assignment."""
    path = ASSIGNMENTS / "wrong" / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ASSIGNMENTS))
        spec = importlib.util.spec_from_file_location(f"wrong_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    return {k: v for k, v in own.items() if "__" in k.strip("_")}


def failures(names: dict, task: str) -> dict[str, str]:
    """Run the tests of ``task`` -> {test: message} of those that fail."""
    failed = {}
    for test in [n for n in names if re.fullmatch(rf"test_{task}(__\w+)?", n)]:
        try:
            check(names[test])
        except Exception as error:
            failed[test] = f"{type(error).__name__}: {error}"
    return failed


WRONG = [
    pytest.param(name, wrong, marks=MARKS[name], id=f"{name}-{wrong}")
    for name in NAMES
    for wrong in wrong_solutions(name)
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in NAMES])
def test_the_reference_passes_every_test(name):
    names = run(source(name), f"{name}.py")
    tasks = [cell.name for cell in course.parse(source(name)) if cell.kind == "task"]
    assert 3 <= len(tasks) <= 6
    for task in tasks:
        assert failures(names, task) == {}


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_a_wrong_solution_fails_and_hears_why(name, wrong):
    names, task = run(source(name), f"{name}.py"), wrong.partition("__")[0]
    solution = wrong_solutions(name)[wrong]
    hint = inspect.getdoc(solution).splitlines()[0]
    assert task in names
    names[task] = solution
    failed = failures(names, task)
    assert failed, f"{wrong} passes every test"
    assert any(hint in message for message in failed.values()), f"no message says {hint!r}: {failed}"


def test_everything_derived_is_up_to_date():
    derived = runpy.run_path(str(ASSIGNMENTS / "build.py"))["derived"]()
    for path, content in derived.items():
        assert path.read_text(encoding="utf-8") == content, f"run notebooks/assignments/build.py: {path.name} differs"
    there = {*(ASSIGNMENTS / "source").glob("*/*"), *course.COURSE.glob("assignment*.py")}
    assert there == set(derived)
