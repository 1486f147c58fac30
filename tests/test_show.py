"""Looking at a run: the summary, each filter, both agents alone, the page, and runs that are young or damaged."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Reader
from rich.console import Console

from minimgrpo import display, log, metrics, show, tasks
from minimgrpo.log import RunLog
from minimgrpo.trajectory import Rollout, Trajectory

EVIL = "<script>alert(1)</script><img src=http://x.example/y> \x1b[31m[bold]"
PUZZLE, TWO_HOP = "atlas-train-puzzle-0001", "atlas-train-two-hop-0001"
QUESTIONS = {q.task_id: q for q in tasks.load_questions("train")}


def say(t, *contents):
    roles = ["system", "user", *["assistant", "user"] * len(contents)]
    t.messages = [{"role": role, "content": c} for role, c in zip(roles, ("s", *contents), strict=False)]


def planner(question, k, correct, task=None, step=1, text=None):
    """A planner that is right or wrong, or (``correct`` None) breaks the format; with a task it delegates once."""
    stop = "result" if correct is not None else "format"
    t = Trajectory("planner", question, k, step=step, stop_reason=stop, note="" if correct is not None else "no answer")
    call = f'Hm. <tool_call>{{"name": "executor", "arguments": {{"task": "{task}"}}}}</tool_call>'
    say(t, text or QUESTIONS[question].question, *((call, "r") if task else ()), f"FINAL ANSWER: {EVIL}")
    if task:
        t.tool_calls = [{"name": "executor", "arguments": {"task": task}, "output": "Accra", "ok": True}]
    t.reward_parts = {"format": float(correct is not None), "correct": float(correct or 0)}
    t.reward, t.advantage = {None: 0.0, 0: 0.1, 1: 1.0}[correct], 1.25
    return t


def executor(question, k, task, reward, stop="result", step=1):
    t = Trajectory("executor", question, k, step=step, stop_reason=stop, copies=2, reward=reward, advantage=-0.5)
    search = '<tool_call>{"name": "search", "arguments": {"query": "it"}}</tool_call>'
    say(t, task, search, "r", "Accra")
    t.tool_calls = [{"name": "search", "arguments": {"query": "it"}, "output": "fact " * 200 + "the end", "ok": True}]
    t.reward_parts = {"format": 1.0, "planner_correct": 0.0, "expert": 0.947, "expert_tools": 1.0}
    return t


def publish(run, step):
    planned = [
        planner(PUZZLE, 0, 1, step=step),
        planner(PUZZLE, 1, None, step=step),
        planner(TWO_HOP, 0, 0, "Find it", step=step),
        planner(TWO_HOP, 1, 1, "Find the rest", step=step),
    ]
    executed = [
        executor(TWO_HOP, 0, "Find it", 0.573, step=step),
        executor(TWO_HOP, 1, "Find the rest", 0.0, "length", step),
    ]
    log.publish(run.trajectories("planner", step), [t.to_json() for t in planned])
    log.publish(run.trajectories("executor", step), [t.to_json() for t in executed])
    for role, batch, own in (
        ("planner", planned, metrics.planner(planned, list(QUESTIONS.values()))),
        ("executor", executed, metrics.executor(executed, [], {})),
    ):
        rows = log.read_metrics(run.metrics(role))
        log.replace(run.metrics(role), [*rows, metrics.row(role, step, batch, {"grad_norm": 0.5 * step}, 1.0) | own])
        run.checkpoint(role, step).mkdir(parents=True)


@pytest.fixture
def run(tmp_path):
    """Three steps of two questions and two rollouts."""
    run = RunLog(tmp_path / "run")
    objective = {"lr": 0.002}
    facts = {"steps": 9, "model": "atlas-lm", "quantize": "nf4", "questions": 2, "rollouts": 2, "d_max": 4, "seed": 0}
    log.publish_text(run.root / "config.json", json.dumps(facts | {"objective": objective}))
    for step in (1, 2, 3):
        publish(run, step)
    return run


@pytest.fixture
def shown(run, capsys):
    """``shown(flag, ...)`` -> what the command printed; nothing on stderr."""

    def shown(*flags):
        assert show.main([str(run.root), *flags]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return shown


def heads(text):
    """(step, short question, rollout) of every tree, executor calls with their number."""
    pattern = r"^step (\d), atlas-train-(puzzle|two-hop)-0001, level \d, rollout (\d)(?:, call (\d))?: (?:right|wrong)"
    return [(int(s), q, int(k), *([int(c)] if c else [])) for s, q, k, c in re.findall(pattern, text, re.MULTILINE)]


# ---------------------------------------------------------------------------------------------------------- the summary


def test_without_a_filter_a_run_is_one_plain_screen(shown):
    text = shown()
    assert "3 of 9 steps done" in text and "D_max 4, lr 0.002, seed 0" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["correct"].split()[1:] == [".50", "▅▅▅"]
    assert lines["format"].split()[1:] == [".75", "▇▇▇", ".50", "▅▅▅"]
    assert lines["grad_norm"].split()[1:] == ["1.5", "▃▆█", "1.5", "▃▆█"]  # up to its largest value
    assert "2 made 0, 2 made 1" in text
    assert "--step last --wrong" in text and "test questions" not in text
    assert len(text.splitlines()) <= 30 and all(len(line) <= 80 for line in text.splitlines()[1:-1])  # of any path
    assert all(c.isprintable() or c == "\n" for c in text)


def test_the_summary_has_the_evaluations(run, shown):
    publish_evaluation(run, "before", "greedy", [0, 1, 0])
    publish_evaluation(run, "after", "greedy", [1, 1, 0])
    [line] = [line for line in shown().splitlines() if line.startswith("greedy")]
    assert line.split() == ["greedy", "3", "33", "67"]


def test_a_run_without_a_step(tmp_path, capsys):
    log.publish_text(tmp_path / "run" / "config.json", json.dumps({"steps": 5}))
    assert show.main([str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "0 of 5 steps done" in text and "No step has been measured yet." in text
    assert show.main([str(tmp_path / "run"), "--step", "last"]) == 2
    assert "its first step is not complete" in one_sentence(capsys)


def test_a_run_that_is_still_being_written(run, shown):
    """Of step 4 the planner's file is there and the executor's is half written; nobody looks at either."""
    run.trajectories("planner", 4).write_text("{}\n", encoding="utf-8")
    run.trajectories("executor", 4).with_suffix(".jsonl.tmp").write_text('{"half', encoding="utf-8")
    run.metrics("planner").with_suffix(".jsonl.tmp").write_text('{"half', encoding="utf-8")
    assert heads(shown("--step", "last", "--limit", "9"))[0] == (3, "puzzle", 0)
    assert "3 of 9 steps done" in shown()


# --------------------------------------------------------------------------------------------------------- the filters


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--step", "2"], [(2, q, k) for q in ("puzzle", "two-hop") for k in (0, 1)]),
        (["--step", "middle", "--right"], [(2, "puzzle", 0), (2, "two-hop", 1)]),
        (["--step", "first", "--wrong"], [(1, "puzzle", 1), (1, "two-hop", 0)]),
        (["--step", "2-9", "--question", PUZZLE, "--right"], [(2, "puzzle", 0), (3, "puzzle", 0)]),
        (["--step", "3", "--question", "CAPITAL IS nouakchott"], [(3, "two-hop", 0), (3, "two-hop", 1)]),
        (["--step", "3", "--level", "1"], [(3, "puzzle", 0), (3, "puzzle", 1)]),
        (["--step", "3", "--reward", ">=0.1"], [(3, "puzzle", 0), (3, "two-hop", 0), (3, "two-hop", 1)]),
        (["--step", "3", "--reward", ">0.1"], [(3, "puzzle", 0), (3, "two-hop", 1)]),
        (["--step", "3", "--reward", "<0.1"], [(3, "puzzle", 1)]),
        (["--step", "3", "--reward", "<=.1"], [(3, "puzzle", 1), (3, "two-hop", 0)]),
        (["--step", "3", "--reward", "0"], [(3, "puzzle", 1)]),
        (["--step", "3", "--stop-reason", "format"], [(3, "puzzle", 1)]),
        (["--step", "3", "--stop-reason", "length"], []),  # that was the executor
        (["--step", "3", "--agent", "executor"], [(3, "two-hop", 0, 0), (3, "two-hop", 1, 0)]),
        (["--step", "3", "--agent", "executor", "--stop-reason", "length"], [(3, "two-hop", 1, 0)]),
        (["--step", "3", "--agent", "executor", "--reward", "0.57"], [(3, "two-hop", 0, 0)]),  # as it is shown
        (["--step", "3", "--agent", "executor", "--wrong"], [(3, "two-hop", 0, 0)]),
        (["--step", "3", "--agent", "planner", "--level", "2"], [(3, "two-hop", 0), (3, "two-hop", 1)]),
    ],
)
def test_a_filter_finds_what_it_names_and_nothing_else(shown, flags, expected):
    text = shown(*flags, "--limit", "99")
    assert heads(text) == expected
    assert f"{len(expected)} of {len(expected)} matching" in text or "None of 4 rollouts passes" in text


def test_the_limit_and_what_is_left(shown):
    text = shown("--right")
    assert heads(text) == [(1, "puzzle", 0), (1, "two-hop", 1), (2, "puzzle", 0)]
    assert "3 of 6 matching rollouts, among 12 rollouts; --limit shows more" in text
    assert len(heads(shown("--limit", "12"))) == 12


# ------------------------------------------------------------------------------------------------------------ the trees


def test_a_rollout_is_a_tree_of_turns_calls_and_tools(shown):
    text = shown("--step", "1", "--level", "2", "--right")
    flat = " ".join(text.replace("│", " ").split())
    assert "rollout 1: right What is the currency" in flat and "(gold answer: Ouguiya)" in flat
    plain = [re.sub(r"^[│ ]*[├└]── ", lambda m: ">" * (len(m[0]) // 4), line) for line in text.splitlines()]
    tree = [line.rstrip() for line in plain if line.startswith(">")]
    assert tree[0] == ">planner Hm. [executor] Find the rest"
    assert (
        tree[1] == ">>executor [search] it" and tree[2].startswith(">>>-> fact fact") and tree[3] == ">>executor Accra"
    )
    assert tree[4].startswith(">>stopped length; reward 0.00 (format 1, planner_correct 0, expert 0.95,")
    assert "advantage -0.50, copies 2" in flat
    assert tree[5].startswith(">planner FINAL ANSWER: <script>") and tree[6].startswith(
        ">= result; reward 1.00 (format 1"
    )
    assert "the end" not in text and "(607 more characters)" in text.replace("\n", "").replace("│", "").replace(
        "  ", ""
    )
    assert "[bold]" in text and "\x1b" not in text


def test_one_agent_alone(shown):
    text = shown("--step", "1", "--agent", "executor", "--stop-reason", "length")
    assert "Sub-task: Find the rest" in text and "planner Hm" not in text and "executor [search] it" in text
    text = shown("--step", "1", "--agent", "planner", "--level", "2", "--right")
    assert "-> Accra" in text and "[search]" not in text


def test_a_broken_format_says_why(shown):
    text = " ".join(shown("--reward", "0").split())
    assert "└── stopped format: no answer; reward 0.00 (format 0, correct 0), advantage +1.25" in text


def test_a_tree_in_a_terminal_has_colours():
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    display.print_tree(
        screen, display.Text("head"), [(0, "planner", "[red]text"), (1, "->", "\x07"), (0, "=", "score")]
    )
    assert "\x1b[1;36mplanner" in screen.file.getvalue() and "[red]text" in screen.file.getvalue()


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_one_file_with_everything_escaped(shown, tmp_path):
    page = tmp_path / "pages" / "page.html"
    text = shown("--step", "2", "--question", "<none>", "--html", str(page))
    assert "None of 4" in text and not page.exists()  # nothing to write
    text = shown("--step", "2", "--limit", "9", "--html", str(page))
    assert "4 of 4 matching rollouts" in text and not heads(text)
    content = page.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(content)
    assert not reader.tags & {"script", "link", "iframe", "img"}
    assert not [value for name, value in reader.attributes if name in ("src", "href")] and "url(" not in content
    assert content.count("<details open>") == 4 and content.count("&lt;script&gt;") == 4 and "\x1b" not in content
    assert content.count("the end") == 2  # nothing is shortened here
    assert "gold answer: Ouguiya" in content and "copies 2" in content


def test_a_page_replaces_nothing(run, capsys):
    config = run.root / "config.json"
    before = config.read_bytes()
    assert show.main([str(run.root), "--html", str(config)]) == 2
    assert "choose another name" in one_sentence(capsys) and config.read_bytes() == before


# --------------------------------------------------------------------------------------------------------- evaluations


def publish_evaluation(run, when, way, flags):
    questions = tasks.load_questions("test")
    rows = []
    for q, flag in zip(questions, flags, strict=False):
        calls = [executor(q.task_id, 0, "Find it", 0.5, step=0)] if flag else []
        rollout = Rollout(planner(q.task_id, 0, flag, "Find it" if flag else None, 0, q.question), calls)
        rows.append({"planner": rollout.planner.to_json(), "calls": [t.to_json() for t in rollout.calls]})
    log.publish(run.evaluation(when, way), rows)


def test_an_evaluation(run, shown, capsys):
    publish_evaluation(run, "after", "sampled", [0, 1, 1])
    publish_evaluation(run, "after", "greedy", [1, 0, 0, 0])
    text = shown("--evaluation", "after", "--right")
    assert text.count("rollout 0: right") == 2 and "among 3 rollouts" in text
    assert "advantage" not in text and "step" not in text and "gold" in text and "level 1" in text
    assert shown("--evaluation", "after", "--greedy", "--wrong").count("rollout 0: wrong") == 3
    assert "2 of 2 matching executor" in shown("--evaluation", "after", "--sampled", "--agent", "executor")
    assert show.main([str(run.root), "--evaluation", "before"]) == 2
    assert "before-sampled.jsonl is missing" in one_sentence(capsys)


# ----------------------------------------------------------------------------------------------------------- bad input


def one_sentence(capsys):
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err, err
    return err


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--step", "9"], "only of 1 to 3"),
        (["--step", "0"], "only of 1 to 3"),
        (["--step", "5-3"], "write 3-5"),
        (["--step", "x"], "first, middle or last"),
        (["--step", "-1"], "not '-1'"),
        (["--reward", "big"], "no condition"),
        (["--reward", "1-2"], "no condition"),
        (["--reward", "nan"], "no condition"),
        (["--level", "4"], "1, 2, 3"),
        (["--agent", "judge"], "executor"),
        (["--stop-reason", "bored"], "context"),
        (["--limit", "0"], "starts at 1"),
        (["--right", "--wrong"], "not allowed"),
        (["--greedy"], "--evaluation"),
        (["--evaluation", "during"], "before"),
        (["--evaluation", "after", "--step", "1"], "no steps"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_a_bad_filter_is_one_sentence(run, capsys, flags, word):
    try:
        code = show.main([str(run.root), *flags])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2 and word in one_sentence(capsys)


def test_no_run(tmp_path, capsys):
    for place in (tmp_path, tmp_path / "nothing"):
        assert show.main([str(place)]) == 2
        assert "no run" in one_sentence(capsys)


@pytest.mark.parametrize("damage", ['{"half', "5\n", '{"step": 1}\n', "\xff\n"])
@pytest.mark.parametrize("name", ["planner/step-000002.jsonl", "executor/metrics.jsonl", "config.json", "evaluation"])
def test_a_damaged_file_is_named(run, capsys, name, damage):
    flags = ["--step", "2"] if "step" in name else []
    if name == "evaluation":
        name, flags = "evaluation/after-sampled.jsonl", ["--evaluation", "after"]
        publish_evaluation(run, "after", "sampled", [1])
    if name == "config.json" and damage.startswith('{"step"'):
        return  # it has no fixed fields as far as this command goes
    (run.root / name).write_text(damage, encoding="latin-1")
    assert show.main([str(run.root), *flags]) == 2
    assert Path(name).name in one_sentence(capsys)


def test_the_command_is_light_and_plain_in_a_pipe(run):
    code = (
        "import sys; from minimgrpo import show; code = show.main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(run.root), "--step", "1"]
    environment = os.environ | {"FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert "3 of 4 matching rollouts" in done.stdout
