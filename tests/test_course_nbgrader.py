"""The whole cycle with nbgrader: generate, release, fetch, submit, collect, autograde, feedback; and the built packages.

Needs the extra ``course``: ``pytest -m course``.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from minimgrpo import course

ASSIGNMENTS = Path(__file__).parent.parent / "notebooks" / "assignments"
NAMES = sorted(path.stem for path in (ASSIGNMENTS / "tasks").glob("assignment*.py"))
pytestmark = [
    pytest.mark.course,
    pytest.mark.skipif(not NAMES, reason="the assignments' sources are in the repository, not in the sdist"),
]


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
        answers = {c.name: c.text for c in course.parse((ASSIGNMENTS / "tasks" / f"{name}.py").read_text("utf-8"))}
        answers |= change or {}
        for cell in content["cells"]:
            marks = cell["metadata"].get("nbgrader", {})
            if marks.get("solution") or marks.get("grade_id") in (change or {}):
                cell["source"] = answers[marks["grade_id"]]
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
    source = (ASSIGNMENTS / "tasks" / f"{name}.py").read_text(encoding="utf-8")
    points = classroom.grade(name, "ada")["ada"]
    assert points == {f"test_{c.name}": c.points for c in course.parse(source) if c.kind == "test"}
