"""nbgrader's whole cycle: generate, release, fetch, submit, collect, autograde, feedback; and the built packages.

Needs the extra ``course``: ``pytest -m course``.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimgrpo import course

ASSIGNMENTS = Path(__file__).parent.parent / "notebooks" / "assignments"
NAMES = sorted(path.stem for path in (ASSIGNMENTS / "tasks").glob("assignment*.py"))
pytestmark = [
    pytest.mark.course,
    pytest.mark.skipif(not NAMES, reason="the assignments' sources are in the repository, not in the sdist"),
]


def parsed(name: str) -> list[course.Cell]:
    return course.parse((ASSIGNMENTS / "tasks" / f"{name}.py").read_text(encoding="utf-8"))


def full(name: str) -> dict[str, int]:
    """{grade id: points} of an assignment."""
    return {f"test_{cell.name}": cell.points for cell in parsed(name) if cell.kind == "test"}


class Course:
    """nbgrader in a folder of its own: the instructor's course, the exchange, and the students' homes."""

    def __init__(self, root: Path):
        from nbgrader.apps.api import NbGraderAPI
        from traitlets.config import Config, PyFileConfigLoader

        self.root = root
        for folder in ("exchange", "cache"):
            (root / folder).mkdir()
        (root / "exchange").chmod(0o777)
        shutil.copytree(ASSIGNMENTS / "source", root / "course" / "source")
        shutil.copy(ASSIGNMENTS / "nbgrader_config.py", root / "course")
        config = PyFileConfigLoader("nbgrader_config.py", path=str(root / "course")).load_config()
        assert config.CourseDirectory.root == str((root / "course").resolve())
        config.merge(Config({"Exchange": {"root": str(root / "exchange"), "cache": str(root / "cache")}}))
        config.ExchangeCollect.check_owner = False  # all students here are one user
        config.ExecutePreprocessor.timeout = 300  # importing torch may take long beside other work
        self.api = NbGraderAPI(config=config)

    def done(self, result: dict) -> None:
        assert result["success"], result.get("error") or result.get("log")

    def hand_out(self, name: str) -> None:
        if not (self.root / "course" / "release" / name).exists():
            self.done(self.api.generate_assignment(name))
            self.done(self.api.release_assignment(name))

    def exchange(self, step: str, name: str, student: str) -> Path:
        """A student fetches or submits -> the folder with the student's notebook."""
        from nbgrader.apps.api import temp_attrs

        home = self.root / "home" / student
        home.mkdir(parents=True, exist_ok=True)
        with temp_attrs(self.api.coursedir, assignment_id=name, student_id=student):
            app = getattr(self.api.exchange, step)(
                coursedir=self.api.coursedir, authenticator=self.api.authenticator, parent=self.api
            )
            app.assignment_dir = str(home)
            app.start()
        return home / name

    def submit(self, name: str, student: str, change: dict[str, str] | None = None) -> None:
        """Fetch, fill in the reference, or what ``change`` says for a cell (by its grade id), and submit."""
        path = self.exchange("FetchAssignment", name, student) / f"{name}.ipynb"
        content = json.loads(path.read_text(encoding="utf-8"))
        answers = {cell.name: cell.text for cell in parsed(name) if cell.kind == "task"} | (change or {})
        for cell in content["cells"]:
            grade_id = cell["metadata"].get("nbgrader", {}).get("grade_id")
            cell["source"] = answers.get(grade_id, cell["source"])
        path.write_text(json.dumps(content), encoding="utf-8")
        self.exchange("Submit", name, student)

    def grade(self, name: str, *students: str) -> dict[str, dict[str, float]]:
        """Collect, autograde, write feedback -> {student: {grade id: points}}."""
        self.done(self.api.collect(name))
        points = {}
        for student in students:
            self.done(self.api.autograde(name, student))
            self.done(self.api.generate_feedback(name, student))
            with self.api.gradebook as book:
                notebook = book.find_submission_notebook(name, name, student)
                points[student] = {grade.name: grade.score for grade in notebook.grades}
        return points


@pytest.fixture(scope="module")
def classroom(tmp_path_factory):
    pytest.importorskip("nbgrader")
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("classroom")
        for variable in ("HOME", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(variable, str(root / "settings"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(course.__file__).parent.parent), *sys.path]))
        yield Course(root)


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_student_gets_every_point(classroom, name):
    classroom.hand_out(name)
    classroom.submit(name, "ada")
    assert classroom.grade(name, "ada") == {"ada": full(name)}


def test_what_nbgrader_releases_is_the_student_copy(classroom):
    classroom.hand_out("assignment1")
    released = json.loads((classroom.root / "course/release/assignment1/assignment1.ipynb").read_text(encoding="utf-8"))
    ours = course.notebook((course.COURSE / "assignment1.py").read_text(encoding="utf-8"))
    assert ["".join(cell["source"]) for cell in released["cells"]] == ["".join(c["source"]) for c in ours["cells"]]
    for theirs, cell in zip(released["cells"], ours["cells"], strict=True):
        marks = {k: v for k, v in theirs["metadata"].get("nbgrader", {}).items() if k not in ("checksum", "cell_type")}
        assert marks == cell["metadata"].get("nbgrader", {})


MISTAKES = {
    "token_loss": """
def token_loss(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.28):
    ratio, weight = (logprobs - old_logprobs).exp().detach(), advantages[:, None]
    return -torch.minimum(ratio * weight, ratio.clamp(1 - clip_low, 1 + clip_high) * weight)""",
    "kl_k3": """
def kl_k3(logprobs, ref_logprobs):
    d = logprobs - ref_logprobs
    return d.exp() - d - 1""",
    "clip_fraction": """
def clip_fraction(ratios, advantages, mask, clip_low=0.2, clip_high=0.28):
    # YOUR CODE HERE
    raise NotImplementedError()""",
    "test_kl_k3": "pass  # a student cannot change a test",
}


def test_known_mistakes_cost_exactly_their_points(classroom):
    classroom.hand_out("assignment1")
    classroom.submit("assignment1", "ben", MISTAKES)
    lost = {"test_token_loss__gradient": 0, "test_kl_k3": 0, "test_clip_fraction": 0}
    assert classroom.grade("assignment1", "ben") == {"ben": full("assignment1") | lost}
    feedback = (classroom.root / "course/feedback/ben/assignment1/assignment1.html").read_text(encoding="utf-8")
    assert "no gradient reaches logprobs" in feedback
    assert "the sign of d is reversed" in feedback


def unruly(name: str) -> dict[str, str]:
    """Right answers of assignment 1, but each behaves badly in its own way."""
    right = {cell.name: cell.text for cell in parsed(name) if cell.kind == "task"}
    noise = """
    import os, sys, warnings
    print("noise", file=sys.stderr)
    os.write(2, b"noise")
    warnings.warn("noise")
    open("assignment1.ipynb", "w").close()
    os.makedirs("../left/behind", exist_ok=True)
    #"""
    stub = "### BEGIN SOLUTION"
    return {
        "group_advantages": right["group_advantages"].replace(stub, noise)
        + "\nprint('noise', file=__import__('sys').stderr)",
        "token_loss": right["token_loss"].replace(stub, "while True:\n        pass\n    #"),  # hangs
        "masked_mean": right["masked_mean"].replace("def ", "defn "),
        "micro_batch_losses": right["micro_batch_losses"].replace(stub, "raise SystemExit\n    #"),
        "kl_k3": "while True:\n    pass\n\n\n" + right["kl_k3"],  # the cell itself hangs
        "clip_fraction": right["clip_fraction"] + "\ncheck = same = None\ntorch.set_default_dtype(torch.float16)",
    }


def test_unruly_code_costs_only_its_own_points(classroom, monkeypatch):
    monkeypatch.setenv("MINIMGRPO_CHECK_SECONDS", "5")  # two tests hang
    name = "assignment1"
    classroom.hand_out(name)
    classroom.submit(name, "cleo", unruly(name))
    # one cell runs into nbgrader's own limit: room for importing torch (slow beside other work), not much more
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import minimgrpo.checks"], check=True)
    classroom.api.config.ExecutePreprocessor.timeout = int(10 + 4 * (time.monotonic() - started))
    lost = ("token_loss", "masked_mean", "micro_batch_losses", "kl_k3")
    points = classroom.grade(name, "cleo")["cleo"]
    expected = {
        grade_id: 0 if grade_id.startswith(tuple(f"test_{task}" for task in lost)) else points
        for grade_id, points in full(name).items()
    }
    assert points == expected
    assert sum(points.values()) == 7
    left = {path.name for path in (classroom.root / "course/autograded/cleo").rglob("*")}
    assert left == {name, f"{name}.ipynb", "timestamp.txt", "submission_secret.txt"}


# ---- the packages ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """{name: text} of every text file in the sdist and the wheel, and the unpacked wheel."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("packages")
    root = ASSIGNMENTS.parent.parent
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=root, check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    shutil.unpack_archive(sdist, folder / "sdist")
    shutil.unpack_archive(wheel, folder / "wheel", format="zip")
    texts = {}
    for path in [*(folder / "sdist").rglob("*"), *(folder / "wheel").rglob("*")]:
        if path.suffix in (".py", ".md", ".ipynb", ".json", ".toml", ".txt"):
            texts[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
    return texts, folder / "wheel"


def regions(text: str) -> list[str]:
    """The solutions and hidden tests of three lines or more, each line without its indentation."""
    found, inside = [], []
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("### BEGIN"):
            inside = []
        elif line.startswith("### END"):
            found.append("\n".join(inside))
        elif line:
            inside.append(line)
    return [region for region in found if region.count("\n") >= 2]


def test_no_package_holds_a_solution(packages):
    texts, _ = packages
    assert any(name.startswith("sdist/") and name.endswith("tests/test_course.py") for name in texts)
    for name in NAMES:
        for where in ("sdist/", "wheel/"):
            assert any(path.startswith(where) and path.endswith(f"data/course/{name}.py") for path in texts)
    assert not [path for path in texts if "assignments/" in path]
    plain = {}
    for path, text in texts.items():
        lines = text.splitlines()
        if path.endswith(".ipynb"):
            lines = [x for cell in json.loads(text)["cells"] for x in "".join(cell["source"]).splitlines()]
        plain[path] = "\n".join(line.strip() for line in lines if line.strip())
    for name in NAMES:
        secrets = regions((ASSIGNMENTS / "tasks" / f"{name}.py").read_text(encoding="utf-8"))
        assert len(secrets) >= 5
        for secret in secrets:
            assert not [path for path, text in plain.items() if secret in text], secret
        wrong = (ASSIGNMENTS / "wrong" / f"{name}.py").read_text(encoding="utf-8")
        for line in wrong.splitlines():
            if line.startswith("def ") and "__" in line:
                assert not [path for path, text in plain.items() if line in text], line


def test_an_installed_wheel_makes_the_student_copy(packages, tmp_path):
    _, wheel = packages
    env = os.environ | {"PYTHONPATH": str(wheel)}
    command = [sys.executable, "-m", "minimgrpo.course", "make", "copy"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    course.make(tmp_path / "from the repository")
    for path in (tmp_path / "from the repository").rglob("*"):
        if path.is_file():
            same = tmp_path / "copy" / path.relative_to(tmp_path / "from the repository")
            assert same.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
