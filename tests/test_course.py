"""The course: what is derived from the one source, graders that tell right from wrong, and the student copy."""

import functools
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

from minimgrpo import course

ASSIGNMENTS = Path(__file__).parent.parent / "notebooks" / "assignments"
NAMES = sorted(path.stem for path in (ASSIGNMENTS / "tasks").glob("assignment*.py"))
pytest_plugins = ["pytester"]
MARKS = {name: getattr(pytest.mark, name) for name in NAMES}
pytestmark = pytest.mark.skipif(not NAMES, reason="the assignments' sources are in the repository, not in the sdist")


def source(name: str) -> str:
    return (ASSIGNMENTS / "tasks" / f"{name}.py").read_text(encoding="utf-8")


def tool(name: str):
    """The script ``name``.py of the assignments as a module."""
    spec = importlib.util.spec_from_file_location(f"assignments_{name}", ASSIGNMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def wrong_solutions(name: str) -> dict:
    """{task__misconception: function or class} of an assignment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ASSIGNMENTS))
        module = tool(f"wrong/{name}")
    own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    return {k: v for k, v in own.items() if "__" in k.strip("_")}


WRONG = [
    pytest.param(name, wrong, marks=MARKS[name], id=f"{name}-{wrong}")
    for name in NAMES
    for wrong in wrong_solutions(name)
]


@pytest.fixture(scope="module")
def grade():
    return tool("grade")


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in NAMES])
def test_the_reference_passes_every_test(grade, name):
    assert grade.failures(name, {}) == {}


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_a_wrong_solution_fails_and_hears_why(grade, name, wrong):
    solution = wrong_solutions(name)[wrong]
    hint, task = inspect.getdoc(solution).splitlines()[0], wrong.partition("__")[0]
    failed = grade.failures(name, {task: solution}, only=task)
    assert failed, f"{wrong} passes every test"
    assert any(hint in message for message in failed.values()), f"no message says {hint!r}: {failed}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in NAMES])
def test_every_task_has_tests_hidden_tests_and_wrong_solutions(name):
    parsed = course.parse(source(name))
    tasks = [cell.name for cell in parsed if cell.kind == "task"]
    assert 3 <= len(tasks) <= 6
    announced = re.findall(
        r"^## .*\((\d+) points\)$", "\n".join(c.text for c in parsed if c.kind == "[markdown]"), re.M
    )
    assert sum(cell.points for cell in parsed) == sum(map(int, announced)) == 20
    for task in tasks:
        tests = [cell.text for cell in parsed if cell.kind == "test" and re.fullmatch(rf"{task}(__\w+)?", cell.name)]
        assert any("### BEGIN HIDDEN TESTS" in text for text in tests)
        assert sum(wrong.partition("__")[0] == task for wrong in wrong_solutions(name)) >= 3
    assert {wrong.partition("__")[0] for wrong in wrong_solutions(name)} == set(tasks)


def test_everything_derived_is_up_to_date():
    derived = tool("build").derived()
    for path, content in derived.items():
        assert path.read_text(encoding="utf-8") == content, f"run notebooks/assignments/build.py: {path.name} differs"
    there = {*(ASSIGNMENTS / "source").glob("*/*"), *course.COURSE.glob("assignment*.py")}
    assert there == set(derived)


# ---- the student copy ------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    course.make(tmp_path / "my copy")
    return tmp_path / "my copy"


def lines(text: str, secret: bool) -> set[str]:
    """The telling lines of a source: those of the solutions and hidden tests, or the others."""
    found, inside = set(), False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("### "):
            inside = line.startswith("### BEGIN")
        elif inside == secret and len(line) > 25:
            found.add(line)
    return found


def shown(path: Path) -> set[str]:
    """The lines of a file, or of a notebook's cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return {line.strip() for line in text.splitlines()}


def test_the_student_copy_holds_no_solution(copy):
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) == 3 + 3 * len(NAMES)
    everything = set().union(*(shown(path) for path in files))
    public = set().union(*(lines(source(name), secret=False) for name in NAMES))
    assert "def test_group_advantages():" in everything
    assert not [line for line in everything if line.startswith(("### BEGIN", "### END"))]
    for name in NAMES:
        secret = lines(source(name), secret=True) - public
        assert len(secret) > 20
        assert not secret & everything


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in NAMES])
def test_pytest_grades_a_copy(copy, name, pytester):
    tests = [cell for cell in course.parse(source(name)) if cell.kind == "test"]
    pytester.runpytest_inprocess(str(copy), "-m", name).assert_outcomes(failed=len(tests))
    solved = course.stub(source(name))
    (copy / name / f"{name}.py").write_text(solved, encoding="utf-8")
    pytester.runpytest_inprocess(str(copy), "-m", name).assert_outcomes(passed=len(tests))


def test_pytest_shows_the_message_and_none_of_the_machinery(copy, pytester):
    solved = course.stub(source("assignment1"))
    wrong = solved.replace("d = ref_logprobs.detach() - logprobs", "d = logprobs - ref_logprobs")
    (copy / "assignment1" / "assignment1.py").write_text(wrong.replace("def clip_fraction(", "def other("), "utf-8")
    result = pytester.runpytest_inprocess(str(copy), "-m", "assignment1")
    result.stdout.fnmatch_lines(
        [
            "*test_assignment1.py:*: in test_kl_k3",
            "    same(*",
            "E   AssertionError: the sign of d is reversed: d = ref_logprobs - logprobs",
            "*test_assignment1.py:*: in test_clip_fraction",
            "E   AssertionError: assignment1.py does not define clip_fraction",
        ]
    )
    result.stdout.no_fnmatch_line("*checks.py:*")


def test_pytest_runs_on_when_a_file_is_not_utf8(copy, pytester):
    (copy / "assignment1" / "assignment1.py").write_bytes(course.stub(source("assignment1")).encode("utf-16"))
    (copy / "assignment2" / "assignment2.py").write_text(course.stub(source("assignment2")), encoding="utf-8")
    counts = [sum(c.kind == "test" for c in course.parse(source(f"assignment{n}"))) for n in (1, 2)]
    result = pytester.runpytest_inprocess(str(copy), "-m", "assignment1 or assignment2")
    result.assert_outcomes(failed=counts[0], passed=counts[1])
    result.stdout.fnmatch_lines(["*assignment1.py is not UTF-8 text: save it as UTF-8*"])


def test_grading_a_file_that_is_not_utf8_goes_on_with_the_next(grade, tmp_path, capsys):
    ada, ben = tmp_path / "ada.py", tmp_path / "ben.py"
    ada.write_bytes(course.stub(source("assignment1")).encode("utf-16"))
    ben.write_text(course.stub(source("assignment1")), encoding="utf-8")
    assert grade.main(["assignment1", str(ada), str(ben)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"  0 of 20  {ada}",
        "    ada.py is not UTF-8 text: save it as UTF-8",
        f" 20 of 20  {ben}",
    ]


def test_grading_a_notebook_is_refused(grade, copy, capsys):
    files = [str(copy / "assignment1" / f"assignment1.{end}") for end in ("py", "ipynb")]
    assert grade.main(["assignment1", *files]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "notebooks are graded by nbgrader; name .py files" in err


def test_grading_says_not_solved_and_a_cause_once(grade, copy, tmp_path, capsys):
    tests = [cell for cell in course.parse(source("assignment1")) if cell.kind == "test"]
    stub = copy / "assignment1" / "assignment1.py"
    assert grade.main(["assignment1", str(stub)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"  0 of 20  {stub}", *(f"    {cell.name} (-{cell.points}): not solved" for cell in tests)]
    left = tmp_path / "left.py"
    left.write_text("import sys\nsys.exit('bye')\n\ndef ratio():\n    pass\n", encoding="utf-8")
    assert grade.main(["assignment1", str(left)]) == 0
    first, cause, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("  0 of 20") and "cell at line 1 stopped" in cause and "SystemExit" in cause
    for cell, line in zip(tests, rest, strict=True):
        name = cell.name.partition("__")[0]
        assert line == f"    {cell.name} (-{cell.points}): left.py does not define {name}"


def test_grading_files_without_nbgrader(grade, tmp_path, capsys):
    solved = course.stub(source("assignment1"))
    perfect, ben = tmp_path / "ada.py", tmp_path / "ben.py"
    perfect.write_text(solved, encoding="utf-8")
    ben.write_text(
        solved.replace("d = ref_logprobs.detach() - logprobs", "d = logprobs - ref_logprobs"), encoding="utf-8"
    )
    assert grade.main(["assignment1", str(perfect), str(ben)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(" 20 of 20") and lines[1].startswith(" 18 of 20")
    assert lines[2] == "    kl_k3 (-2): the sign of d is reversed: d = ref_logprobs - logprobs"
    assert grade.main(["assignment9", str(ben)]) == 2
    assert "assignment9" in capsys.readouterr().err


def test_make_says_what_is_wrong(tmp_path, capsys):
    assert course.main(["make", str(tmp_path / "new")]) == 0
    assert "assignments are in" in capsys.readouterr().out
    assert course.main(["make", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert course.main(["make", str(tmp_path / "file")]) == 2
    assert course.main(["make", str(tmp_path / "file" / "below")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    (tmp_path / "empty").mkdir()
    assert course.main(["make", str(tmp_path / "empty")]) == 0
    for arguments in ([], ["make"], ["break", "DIR"], ["make", "a", "b"]):
        with pytest.raises(SystemExit, match="2"):
            course.main(arguments)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n", "must begin a cell"),
        ("# %% task f 2\ndef g():\n    pass\n", "must define f"),
        ("# %% test f\ndef test_f():\n    pass\n", "no points"),
        ("# %% homework f\n", "must begin a cell"),
    ],
)
def test_a_source_that_breaks_the_format_is_refused(text, problem):
    with pytest.raises(course.CourseError, match=problem):
        course.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "### BEGIN SOLUTION\nx = 1\n",
        "### BEGIN SOLUTION\n### BEGIN HIDDEN TESTS\n",
        "### BEGIN SOLUTION\n### END HIDDEN TESTS\n",
        "### END SOLUTION\n",
    ],
)
def test_an_unclosed_region_is_refused(text):
    with pytest.raises(course.CourseError):
        course.strip(text)
