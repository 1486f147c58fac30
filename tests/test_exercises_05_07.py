"""The exercises of notebooks 05 to 07: a check waits for an answer, accepts a solution, refuses plausible mistakes."""

import ast
import json
import math
import random
import types
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from minimgrpo import metrics
from minimgrpo.scorer import gaia_score, pass_at_k, wilson
from minimgrpo.trajectory import Trajectory

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


class Book:
    """A committed notebook's code, cell by cell."""

    def __init__(self, name: str):
        (path,) = NOTEBOOKS.glob(f"{name}-*.ipynb")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        self.code = [cell for cell in cells if cell["cell_type"] == "code"]

    def tagged(self, tag: str) -> str:
        (found,) = (c for c in self.code if tag in c["metadata"].get("tags", []))
        return "".join(found["source"])

    def function(self, name: str) -> str:
        """The source of a function that the notebook defines."""
        for cell in self.code:
            source = "".join(cell["source"])
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return ast.get_source_segment(source, node)
        raise AssertionError(f"no function {name}")


def verdict(book: Book, number: int, answer: str, names: dict, capsys) -> str:
    """What the check of exercise ``number`` prints when the student's cell is followed by ``answer``."""
    names = dict(names)
    exec(book.tagged(f"exercise-{number}"), names)
    exec(answer, names)
    capsys.readouterr()
    exec(book.tagged(f"check-{number}"), names)
    return capsys.readouterr().out


def check(
    name: str, number: int, names: dict, right: str, wrong: list[str], capsys, uses: tuple[str, ...] = ()
) -> None:
    book = Book(name)
    for function in uses:
        exec(book.function(function), names)
    assert verdict(book, number, "", names, capsys).startswith("Not done yet")
    assert verdict(book, number, right, names, capsys).startswith("Right")
    for answer in wrong:
        assert verdict(book, number, answer, names, capsys).startswith("Not yet"), answer


# ------------------------------------------------------------------------------------------------------------------ 05


def test_where_to_go_on(capsys):
    right = """
def what_next(published, steps=4):
    done = max((int(name[-6:]) for name in published if "checkpoint" in name), default=0)
    if done == steps:
        return "done", steps
    return ("learn" if f"step-{done + 1:06d}.jsonl" in published else "play"), done + 1
"""
    newest = 'max((int(name[-6:]) for name in published if "checkpoint" in name), default=0)'
    wrong = [
        right.replace(newest, 'sum("checkpoint" in name for name in published)'),  # old ones are removed
        right.replace(newest, 'max((int(name[5:11]) for name in published if "step" in name), default=0)'),
        right.replace('"learn" if', '"play" if'),
        right.replace("done == steps", "done > steps"),
    ]
    assert all(answer != right for answer in wrong)
    check("05", 1, {}, right, wrong, capsys)


def test_staleness(capsys):
    right = """
def plays_with(step, steps, staleness):
    return max(0, step - 1 - staleness)
def learns_with(step, steps, staleness):
    return step - 1
"""
    wrong = [
        right.replace("max(0, step - 1 - staleness)", "step - 1 - staleness"),
        right.replace("max(0, step - 1 - staleness)", "max(0, step - staleness)"),
        right.replace("return step - 1\n", "return max(0, step - 1 - staleness)\n"),
        right.replace("return step - 1\n", "return step\n"),
    ]
    check("05", 2, {}, right, wrong, capsys, uses=("schedule",))


def test_whole_lines(capsys):
    right = """
def whole_lines(text):
    *whole, rest = text.split("\\n")
    return [json.loads(line) for line in whole], int(rest != "")
"""
    takes_what_has_no_end = """
def whole_lines(text):
    rows, torn = [], 0
    for line in text.split("\\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            torn += bool(line)
    return rows, torn
"""
    wrong = [takes_what_has_no_end, right.replace('int(rest != "")', "1"), right.replace('int(rest != "")', "0")]
    check("05", 3, {"json": json}, right, wrong, capsys)
    splits = "def whole_lines(text): return [json.loads(line) for line in text.splitlines()], 0"
    with pytest.raises(ValueError):  # it cuts a text in two
        verdict(Book("05"), 3, splits, {"json": json}, capsys)


# ------------------------------------------------------------------------------------------------------------------ 06

EVALUATION = {
    "math": math,
    "combinations": combinations,
    "gaia_score": gaia_score,
    "wilson": wilson,
    "pass_at_k": pass_at_k,
}


def test_all_right(capsys):
    right = "def all_right(n, c, k): return math.comb(c, k) / math.comb(n, k)"
    wrong = [
        "def all_right(n, c, k): return (c / n) ** k",
        "def all_right(n, c, k): return pass_at_k(n, c, k)",
        "def all_right(n, c, k): return 1 - math.comb(n - c, k) / math.comb(n, k)",
        "def all_right(n, c, k): return float(c >= k)",
    ]
    check("06", 1, EVALUATION, right, wrong, capsys)


def test_be_the_scorer(capsys):
    truth = [True, False, True, False, True, True, False, True]
    wrong = [truth[:-1]] + [[*truth[:i], not truth[i], *truth[i + 1 :]] for i in range(8)]
    check("06", 2, EVALUATION, f"mine = {truth}", [f"mine = {answer}" for answer in wrong], capsys)


def test_tasks_needed(capsys):
    right = """
def tasks_needed(half):
    n = 2
    while wilson(n // 2, n)[1] - 0.5 > half:
        n += 2
    return n
"""
    wrong = [
        "def tasks_needed(half): return 2 * math.ceil((1.96 * 0.5 / half) ** 2 / 2)",  # the usual formula
        right.replace("- 0.5 > half", "- wilson(n // 2, n)[0] > half"),  # the whole width
        right.replace("n = 2\n", "n = 1000\n"),
    ]
    check("06", 3, EVALUATION, right, wrong, capsys)


# ------------------------------------------------------------------------------------------------------------------ 07


@pytest.fixture
def run():
    """What notebook 07 has when its exercises begin, in small: 6 steps of 8 groups of 8."""
    draws = random.Random(0)
    steps: dict[int, list[Trajectory]] = {}
    for step in range(1, 7):
        steps[step] = []
        for question in range(8):
            chance = draws.choice((0.0, 0.5, 1.0))
            broken = draws.choice((0.0, 0.0, 0.2))
            group = [Trajectory("planner", f"{'puzzle' if question % 2 else 'lookup'}-{question}", k) for k in range(8)]
            for t in group:
                form = float(draws.random() >= broken)
                delegates = draws.random() < 0.5
                correct = form * float(draws.random() < chance * (0.4 if delegates else 1.0))
                t.tool_calls = [{"name": "executor"}] * delegates
                t.reward_parts = {"format": form, "correct": correct}
                t.reward = 0.1 * form + 0.9 * correct
            mean = sum(t.reward for t in group) / 8
            for t in group:
                t.advantage = 0.0 if len({u.reward for u in group}) == 1 else t.reward - mean
            steps[step] += group
    published = types.SimpleNamespace(published=steps.__getitem__)
    flat = np.array([metrics.flat_share(trajectories) for trajectories in steps.values()])
    assert 0 < flat.mean() < 1
    return {
        "np": np,
        "config": types.SimpleNamespace(steps=6),
        "team": types.SimpleNamespace(planner=published),
        "curve": lambda role, name: flat,
        "kind_of": {t.question_id: t.question_id.partition("-")[0] for t in steps[1]},
    }


def test_flat_share(run, capsys):
    right = """
def flat_share(planned):
    groups = [{t.reward for t in planned[i : i + 8]} for i in range(0, len(planned), 8)]
    return sum(len(group) == 1 for group in groups) / len(groups)
"""
    wrong = [
        right.replace("t.reward for", "t.reward_parts['correct'] for"),  # not every difference is one of correctness
        right.replace("len(group) == 1", "group == {1.0}"),  # all wrong is flat too
        right.replace(" / len(groups)", ""),
        right.replace("len(group) == 1", "len(group) > 1"),
    ]
    check("07", 1, run, right, wrong, capsys)


def test_format_only(run, capsys):
    right = """
def format_only(planned):
    groups = [planned[i : i + 8] for i in range(0, len(planned), 8)]
    silent = [g for g in groups if len({t.reward_parts["correct"] for t in g}) == 1]
    return sum(len({t.reward for t in g}) > 1 for g in silent)
"""
    wrong = [
        right.replace("for g in silent", "for g in groups"),
        right.replace("len({t.reward for t in g}) > 1", "len({t.reward for t in g}) == 1"),
        right.replace("sum(len({t.reward for t in g}) > 1 for g in silent)", "len(silent)"),
    ]
    check("07", 2, run, right, wrong, capsys)


def test_puzzle_shares(run, capsys):
    right = """
def puzzle_shares(planned):
    puzzles = [t for t in planned if kind_of[t.question_id] == "puzzle"]
    sides = [[t.reward_parts["correct"] for t in puzzles if bool(t.tool_calls) is way] for way in (True, False)]
    return tuple(sum(side) / len(side) for side in sides)
"""
    wrong = [
        right.replace(' if kind_of[t.question_id] == "puzzle"', ""),
        right.replace("(True, False)", "(False, True)"),
        right.replace('t.reward_parts["correct"] for', "t.reward for"),
        right.replace("len(side)", "len(puzzles)"),
    ]
    check("07", 3, run, right, wrong, capsys, uses=("share",))
