"""Make everything that is derived from ``tasks/``: ``python notebooks/assignments/build.py``.

tasks/assignment1.py -> source/assignment1/assignment1.ipynb      nbgrader's source version, with the solutions
                     -> data/course/assignment1.py (repository)   without them; ``python -m minimgrpo.course make``
"""

from __future__ import annotations

import json
from pathlib import Path

from minimgrpo import course

HERE = Path(__file__).resolve().parent


def derived() -> dict[Path, str]:
    """Every derived file and what it must hold."""
    files = {}
    for path in sorted((HERE / "tasks").glob("assignment*.py")):
        text = path.read_text(encoding="utf-8")
        content = json.dumps(course.notebook(text), indent=1, ensure_ascii=False) + "\n"
        files[HERE / "source" / path.stem / f"{path.stem}.ipynb"] = content
        files[course.COURSE / path.name] = course.strip(text)
    return files


if __name__ == "__main__":
    for path, content in derived().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(HERE.parent.parent))
