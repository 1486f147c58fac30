"""The notebooks as they are committed, without running them; and the course's exercises with right and wrong answers.

`notebooks/run.py` executes them. Here: is what is committed the outcome of one clean run, small and free of what only
the machine that ran it knows? And does each exercise's check accept a solution and refuse plausible wrong ones?
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
COURSE = [path for path in NOTEBOOKS if re.match("0[1-7]-", path.name)]
MACHINE = re.compile(r"/(?:work|tmp|root|home|content|Users)/|\bipykernel_\d+|0x[0-9a-f]{9,}")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def texts(output: dict) -> list[str]:
    """Everything of an output that is text; pictures are left out."""
    data = {kind: text for kind, text in output.get("data", {}).items() if kind.startswith("text/")}
    return ["".join(text) for text in [output.get("text", ""), *data.values()]]


def test_the_course_is_there():
    assert [path.name[:2] for path in COURSE][:4] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_as_one_clean_run_left_it(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert path.stat().st_size < 250_000
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"cell-[\w-]+", name) for name in ids)
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 3 and any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output["output_type"] in ("stream", "execute_result", "display_data")  # no error
        assert output.get("name", "stdout") == "stdout"
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})  # a progress bar


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_short_cells_that_know_no_machine(path):
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "code":
            assert len(source(cell).splitlines()) <= 20, cell["id"]
            ast.parse(source(cell))  # no shell lines or magics: plain Python
        shown = [source(cell), *(text for output in cell.get("outputs", []) for text in texts(output))]
        for text in shown:
            assert not MACHINE.search(text), (cell["id"], MACHINE.search(text).group())


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_every_course_notebook_begins_with_the_same_installation(path):
    first = code_cells(path)[0]
    assert source(first) == source(code_cells(COURSE[0])[0])
    assert "pip" in source(first) and not first["outputs"]


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_what_a_course_notebook_is_made_of(path):
    """Questions before the results, asserts that plain code and library agree, exercises with a check each."""
    text = "\n".join(source(cell) for cell in read(path)["cells"] if cell["cell_type"] == "markdown")
    assert len(re.findall(r"\bpredict\b", text, re.IGNORECASE)) >= 3
    assert "\n## Exercise" in text
    code = "\n".join(source(cell) for cell in code_cells(path))
    assert re.search(r"^ *assert ", code, re.MULTILINE) and re.search(
        r"^import minimgrpo|^from minimgrpo", code, re.MULTILINE
    )


def run_installation(folder: Path, missing: set[str], monkeypatch) -> list[list[str]]:
    """Run the first cell in ``folder`` as if the packages ``missing`` were not there -> the commands it started."""
    commands = []

    def find_spec(name):
        found = types.SimpleNamespace(origin=f"{name}.py")
        return types.SimpleNamespace(origin=None) if name in missing else found  # a folder of that name, no package

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.chdir(folder)
    exec(source(code_cells(COURSE[0])[0]), {})
    return commands


def test_the_installation_does_nothing_where_everything_is_there(tmp_path, monkeypatch):
    assert run_installation(tmp_path, set(), monkeypatch) == []


@pytest.mark.parametrize("missing", ["minimgrpo", "bm25s"])
@pytest.mark.parametrize(
    "folder", ["", "clone", "clone/notebooks"]
)  # beside the clone (Colab), in it, in its notebooks
def test_the_installation_finds_the_clone(tmp_path, monkeypatch, missing, folder):
    (tmp_path / "clone" / "minimgrpo").mkdir(parents=True)
    (tmp_path / "clone" / "notebooks").mkdir()
    (tmp_path / "clone" / "minimgrpo" / "grpo.py").touch()
    (command,) = run_installation(tmp_path / folder, {missing}, monkeypatch)
    assert command == [sys.executable, "-m", "pip", "install", "-q", str(tmp_path / "clone")]


def test_the_installation_says_what_to_do_without_a_clone(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="clone"):
        run_installation(tmp_path, {"minimgrpo"}, monkeypatch)


# ------------------------------------------------------------------------------------------------------- the exercises

# number of notebook and exercise -> a solution, and wrong ones with a part of what the check says to each
EXERCISES = {
    "01-1": (
        """
def advantages(groups):
    out = []
    for g in groups:
        mean = sum(g) / len(g)
        std = (sum((r - mean) ** 2 for r in g) / len(g)) ** 0.5
        out.append([0.0] * len(g) if max(g) == min(g) else [(r - mean) / std for r in g])
    return out
""",
        {
            "its own mean": """
def advantages(groups):
    every = [r for g in groups for r in g]
    mean = sum(every) / len(every)
    std = (sum((r - mean) ** 2 for r in every) / len(every)) ** 0.5 or 1.0
    return [[(r - mean) / std for r in g] for g in groups]
""",
            "population std": """
def advantages(groups):
    from statistics import mean, stdev
    return [[(r - mean(g)) / (stdev(g) or 1.0) for r in g] for g in groups]
""",
            "exactly 0": """
def advantages(groups):
    out = []
    for g in groups:
        mean = sum(g) / len(g)
        std = (sum((r - mean) ** 2 for r in g) / len(g)) ** 0.5
        out.append([(r - mean) / (std or 1.0) for r in g])
    return out
""",
            "an epsilon": """
def advantages(groups):
    out = []
    for g in groups:
        mean = sum(g) / len(g)
        std = (sum((r - mean) ** 2 for r in g) / len(g)) ** 0.5
        out.append([0.0 if max(g) == min(g) else (r - mean) / (std + 1e-6) for r in g])
    return out
""",
        },
    ),
    "01-2": (
        "def is_cut(r, a): return r > 1.28 if a > 0 else r < 0.8",
        {
            "r = 0.5, A = 0.7": "def is_cut(r, a): return r > 1.28 or r < 0.8",  # both sides, whatever the sign
            "r = 0.5, A = -0.7": "def is_cut(r, a): return a > 0 and r > 1.28",  # only above
            "r = 1.25, A = 0.7": "def is_cut(r, a): return r > 1.2 if a > 0 else r < 0.8",
            "r = 0.5, A = 0.7: ": "def is_cut(r, a): return r < 0.8 if a > 0 else r > 1.28",  # inverted
        },
    ),
    "01-3": (
        "def lone_winner(K): return (K - 1) ** 0.5",
        {
            "K = 2": "def lone_winner(K): return 0.9 * (1 - 1 / K)",  # not divided by the std
            "how far": "def lone_winner(K): return (K - 1) / K**0.5",  # sample std
        },
    ),
    "02-1": (
        """
def assemble(pieces):
    ids = [i for _, piece in pieces for i in piece]
    return ids, [int(who == "agent") for who, piece in pieces for _ in piece]
""",
        {
            "stop token (2)": """
def assemble(pieces):
    ids = [i for _, piece in pieces for i in piece]
    return ids, [int(who == "agent" and i != 2) for who, piece in pieces for i in piece]
""",
            "the prompt": """
def assemble(pieces):
    ids = [i for _, piece in pieces for i in piece]
    return ids, [int(who != "tool") for who, piece in pieces for _ in piece]
""",
            "compare your mask": """
def assemble(pieces):
    ids = [i for _, piece in pieces for i in piece]
    return ids, [0, *[int(who == "agent") for who, piece in pieces for _ in piece]][:-1]
""",
            "one after the other": "def assemble(pieces): return sorted(i for _, p in pieces for i in p), [0]",
        },
    ),
    "02-2": (
        """
def read_answer(message):
    import re
    message = re.sub("<think>.*?</think>", "", message, flags=re.S)
    if "FINAL ANSWER:" in message:
        return message.rsplit("FINAL ANSWER:", 1)[1].strip().split("\\n")[0].strip()
""",
        {
            "'3', not '4'": """
def read_answer(message):
    if "FINAL ANSWER:" in message:
        return message.split("FINAL ANSWER:")[1].strip().split("\\n")[0].strip()
""",
            "Done.', not '4'": """
def read_answer(message):
    if "FINAL ANSWER:" in message:
        return message.rsplit("FINAL ANSWER:", 1)[1].strip()
""",
            "'9</think>', not '4'": """
def read_answer(message):
    if "FINAL ANSWER:" in message:
        return message.rsplit("FINAL ANSWER:", 1)[1].strip().split("\\n")[0].strip()
""",
            "not None": "def read_answer(message): return message.split(':')[-1].strip()",
        },
    ),
    "02-3": (
        """
def sampled_logprob(logits, token, temperature, k):
    kept = sorted(logits, reverse=True)[:k]
    if logits[token] < kept[-1]:
        return -math.inf
    return logits[token] / temperature - math.log(sum(math.exp(x / temperature) for x in kept))
""",
        {
            "temperature first": """
def sampled_logprob(logits, token, temperature, k):
    kept = sorted(logits, reverse=True)[:k]
    return logits[token] - math.log(sum(math.exp(x) for x in kept)) if logits[token] >= kept[-1] else -math.inf
""",
            "only the kept": """
def sampled_logprob(logits, token, temperature, k):
    return logits[token] / temperature - math.log(sum(math.exp(x / temperature) for x in logits))
""",
            "cannot be drawn": """
def sampled_logprob(logits, token, temperature, k):
    kept = sorted(logits, reverse=True)[:k]
    return logits[token] / temperature - math.log(sum(math.exp(x / temperature) for x in kept))
""",
        },
    ),
    "03-1": (
        "def say(counts): return [(d > 0) / sum(c > 0 for c in counts) for d in counts]",
        {
            "before the alignment": "def say(counts): return [d / sum(counts) for d in counts]",
            "who did not call": "def say(counts): return [1 / len(counts) for d in counts]",
        },
    ),
    "03-2": (
        """
def aligned_advantages(rewards, copies):
    counted = [r for r, c in zip(rewards, copies) if c]
    if max(counted) == min(counted):
        return [0.0] * len(rewards)
    mean = sum(r * c for r, c in zip(rewards, copies)) / sum(copies)
    std = (sum(c * (r - mean) ** 2 for r, c in zip(rewards, copies)) / sum(copies)) ** 0.5
    return [(r - mean) / std if c else 0.0 for r, c in zip(rewards, copies)]
""",
        {
            "into the mean": """
def aligned_advantages(rewards, copies):
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / std for r in rewards]
""",
            "was dropped": """
def aligned_advantages(rewards, copies):
    mean = sum(r * c for r, c in zip(rewards, copies)) / sum(copies)
    std = (sum(c * (r - mean) ** 2 for r, c in zip(rewards, copies)) / sum(copies)) ** 0.5
    return [(r - mean) / std for r in rewards]
""",
            "is flat": """
def aligned_advantages(rewards, copies):
    mean = sum(r * c for r, c in zip(rewards, copies)) / sum(copies)
    std = (sum(c * (r - mean) ** 2 for r, c in zip(rewards, copies)) / sum(copies)) ** 0.5 or 1.0
    return [(r - mean) / std if c else 0.0 for r, c in zip(rewards, copies)]
""",
        },
    ),
    "03-3": (
        "def fair_weights(counts, d_max): return [[d_max / d] * d if d else [] for d in counts]",
        {
            "add up to D": "def fair_weights(counts, d_max): return [[1.0] * d for d in counts]",
            "has d_k weights": "def fair_weights(counts, d_max): return [[d_max] for d in counts]",
            "alike": "def fair_weights(counts, d_max): return [[d_max, *[0] * (d - 1)] if d else [] for d in counts]",
        },
    ),
    "04-1": (
        """
def composite(format_ok, planner_correct, expert, weights):
    if not 0 <= expert <= 1:
        raise ValueError("the expert's rating must be in [0, 1]")
    return weights[0] + weights[1] * planner_correct + weights[2] * expert if format_ok else 0.0
""",
        {
            "a broken format": """
def composite(format_ok, planner_correct, expert, weights):
    return weights[0] * format_ok + weights[1] * planner_correct + weights[2] * expert
""",
            "an expert of 7": """
def composite(format_ok, planner_correct, expert, weights):
    return weights[0] + weights[1] * planner_correct + weights[2] * min(expert, 1) if format_ok else 0.0
""",
            "NaN": """
def composite(format_ok, planner_correct, expert, weights):
    if expert < 0 or expert > 1:
        raise ValueError("the expert's rating must be in [0, 1]")
    return weights[0] + weights[1] * planner_correct + weights[2] * expert if format_ok else 0.0
""",
            "its weight": "def composite(format_ok, planner_correct, expert, weights): return expert",
        },
    ),
    "04-2": (
        "def needed(right, fake, weight, fate): return max(0, weight * (fake - right) / fate)",
        {
            "is worth": "def needed(right, fake, weight, fate): return max(0, weight * (fake - right))",
            "no planner term": "def needed(right, fake, weight, fate): return weight * (fake - right) / fate",
        },
    ),
    "04-3": (
        """
def my_expert(task, output, report):
    def words(text):
        return set(re.findall(r"\\w+", text.lower()))
    said = words(report)
    grounded = bool(said) and said <= words(output)
    return grounded * bool(said - words(task)) / max(1, len(report.split()))
""",
        {
            "prefer 'Peru' to 'Lima'": "def my_expert(task, output, report): return float(report in output)",
            "prefer 'Sol' to 'Dinar'": "def my_expert(task, output, report): return float(report not in task)",
            "between 0 and 1": "def my_expert(task, output, report): return len(report)",
        },
    ),
}


@pytest.fixture(scope="module")
def prepared():
    """``prepared(number)`` -> a copy of the names that the notebook's cells tagged "setup" define."""
    pytest.importorskip("IPython", reason="the extra notebooks: the cells show tables with IPython")
    done = {}

    def prepare(number: str) -> dict:
        if number not in done:
            done[number] = {}
            for cell in code_cells(by_number(number)):
                if "setup" in cell["metadata"].get("tags", []):
                    exec(source(cell), done[number])
        return dict(done[number])

    return prepare


def by_number(number: str) -> Path:
    return next(path for path in COURSE if path.name.startswith(number))


def tagged(number: str, tag: str) -> str:
    (cell,) = [cell for cell in code_cells(by_number(number)) if tag in cell["metadata"].get("tags", [])]
    return source(cell)


def said_by_check(name: str, answer: str | None, prepared, capsys) -> str:
    """What the check cell prints after ``answer`` (None: the stub, as it is committed) has been run."""
    notebook, exercise = name.split("-")
    names = prepared(notebook)
    capsys.readouterr()
    exec(answer or tagged(notebook, f"exercise-{exercise}"), names)
    exec(tagged(notebook, f"check-{exercise}"), names)
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out


def test_every_exercise_of_the_first_four_has_a_solution_here():
    for number in ("01", "02", "03", "04"):
        tags = [tag for cell in code_cells(by_number(number)) for tag in cell["metadata"].get("tags", [])]
        mine = [name[3:] for name in EXERCISES if name.startswith(number)]
        assert [tag for tag in tags if tag != "setup"] == [
            f"{kind}-{i}" for i in mine for kind in ("exercise", "check")
        ]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_check_waits_accepts_and_refuses(name, prepared, capsys):
    solution, wrong = EXERCISES[name]
    assert said_by_check(name, None, prepared, capsys).startswith("Not done yet")
    assert said_by_check(name, solution, prepared, capsys).startswith("Right")
    for part, answer in wrong.items():
        said = said_by_check(name, answer, prepared, capsys)
        assert said.startswith("Not yet") and part in said, said
