"""notebooks/run.py: a notebook that raises, writes to stderr or takes too long fails, and nothing else does."""

import importlib.util
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
pytest.importorskip("nbclient", reason="needs the extra notebooks")

PATH = Path(__file__).parent.parent / "notebooks" / "run.py"
spec = importlib.util.spec_from_file_location("run_notebooks", PATH)
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def write(folder: Path, name: str, *sources: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbformat.write(notebook, folder / f"{name}.ipynb")


def test_each_kind_of_failure_is_told_and_only_what_passed_is_written(tmp_path, capsys):
    (tmp_path / "data.txt").write_text("beside it", encoding="utf-8")
    write(tmp_path, "01-fine", "import pathlib", "open('left.txt', 'w').close()", "print(open('data.txt').read())")
    write(tmp_path, "02-raises", "import os", "assert not os.path.exists('left.txt')", "1 / 0", "print('after')")
    write(
        tmp_path, "03-stderr", "import os, sys", "os.system('echo by a child >&2');", "print('by us', file=sys.stderr)"
    )
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run.main(["--folder", str(tmp_path), "--write"]) == 1
    said = capsys.readouterr().out
    verdicts = [line.split() for line in said.splitlines() if line[:2].isdigit()]
    names = ["01-fine", "02-raises", "03-stderr"]
    assert [(v[0], v[-1]) for v in verdicts] == list(zip(names, ("ok", "FAILED", "FAILED"), strict=True))
    assert "ZeroDivisionError" in said and "AssertionError" not in said  # each ran in a copy of its own
    assert "by a child" in said and "by us" in said  # what a process of the notebook writes counts as well
    assert said.splitlines()[-1] == "1 of 3 notebooks ran: 02-raises, 03-stderr"
    changed = [path.name for path in tmp_path.iterdir() if before.get(path.name) != path.read_bytes()]
    assert changed == ["01-fine.ipynb"]
    assert nbformat.read(tmp_path / "01-fine.ipynb", 4).cells[2].outputs[0].text == "beside it\n"


def test_the_limit_is_the_whole_notebooks_not_a_cells(tmp_path, capsys):
    """No cell is slow. The limit is 180 s / 60; without one the notebook takes more than a minute."""
    write(tmp_path, "05-slow", "import time", *100 * ["time.sleep(0.7)"])
    assert run.main(["--folder", str(tmp_path), "--slower", str(1 / 60)]) == 1
    said = capsys.readouterr().out
    assert "it takes longer than 3 s" in said
    assert float(said.split()[1]) < 60


def test_limits_of_the_course(tmp_path, monkeypatch):
    limits = {}
    monkeypatch.setattr(run, "execute", lambda path, limit: (limits.setdefault(path.stem, limit), 0.0, []))
    write(tmp_path, "07-co-training")
    write(tmp_path, "15-latent")
    assert run.main(["--folder", str(tmp_path)]) == 0
    assert limits == {"07-co-training": 180, "15-latent": 240}
    limits.clear()
    assert run.main(["07", "--folder", str(tmp_path), "--slower", "2"]) == 0
    assert limits == {"07-co-training": 360}


@pytest.mark.parametrize("arguments", [["99"], ["--slower", "0"]])
def test_what_cannot_be_asked_for(tmp_path, arguments, capsys):
    write(tmp_path, "01-fine", "1")
    with pytest.raises(SystemExit):
        run.main([*arguments, "--folder", str(tmp_path)])
    capsys.readouterr()


def test_a_folder_without_notebooks_is_no_success(tmp_path):
    assert run.main(["--folder", str(tmp_path)]) == 1
