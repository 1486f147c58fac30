"""What a person reads: transcripts, tables, curves, the page, the live display."""

import io

import pytest
from conftest import Reader
from rich.console import Console

from minimgrpo import display, report
from minimgrpo.tasks import Question
from minimgrpo.trajectory import Rollout, Trajectory

EVIL = "<script>alert(1)</script><img src=http://x.example/y> \x1b[31m"


def question(number, kind="lookup", level=1):
    return Question(f"q{number}", f"What is {EVIL}?", level, "42 & <b>", kind, (), (), ())


def rollout(right, task="Find it", report_ok=True):
    """A planner that delegates once; its executor searches once."""
    planner = Trajectory("planner", "q0", 0, stop_reason="result", result="42")
    say = lambda role, content: {"role": role, "content": content}  # noqa: E731
    call = f'Hm. <tool_call>{{"name": "executor", "arguments": {{"task": "{task}"}}}}</tool_call>'
    planner.messages = [
        say("system", "s"),
        say("user", EVIL),
        say("assistant", call),
        say("user", "r"),
        say("assistant", EVIL),
    ]
    planner.tool_calls = [{"name": "executor", "arguments": {"task": task}, "output": EVIL, "ok": report_ok}]
    planner.reward_parts, planner.reward, planner.advantage = {"format": 1.0, "correct": float(right)}, 0.5, 1.25
    executor = Trajectory(
        "executor", "q0", 0, stop_reason="result" if report_ok else "format", note="" if report_ok else EVIL
    )
    search = '<tool_call>{"name": "search", "arguments": {"query": "it"}}</tool_call>'
    executor.messages = [
        say("system", "s"),
        say("user", task),
        say("assistant", search),
        say("user", "r"),
        say("assistant", EVIL),
    ]
    executor.tool_calls = [{"name": "search", "arguments": {"query": "it"}, "output": EVIL, "ok": True}]
    executor.reward_parts = {"format": 1.0, "expert": 0.7}
    planner.step = executor.step = 1
    return Rollout(planner, [executor])


def numbers(accuracy):
    group = {"n": 20, "accuracy": accuracy}
    measures = dict.fromkeys(report.MEASURES, 0.5) | {"expert": None}
    groups = {f"{way}{name}": {"x": group} for way in ("", "greedy_") for name in ("levels", "kinds")}
    return {
        "n": 20,
        "accuracy": accuracy,
        "greedy": 1.0,
        "ci95": [0.0, 1.0],
        **groups,
        **measures,
        "greedy_numbers": measures,
    }


def step(number, calls):
    """What a step measured: shares that rise, and ``calls[d]`` rollouts with d delegations."""
    measured = {"step": number, "planner": {"calls": calls, "entropy": 1.0}, "executor": {"entropy": None}}
    for _, role, name, _ in display.ROWS:
        measured[role][name] = min(1.0, number / 10)
    return measured


def test_a_transcript_is_nested_and_printable():
    lines = report.transcript(rollout(True))
    assert [(depth, who) for depth, who, _ in lines] == [
        (0, "planner"), (1, "executor"), (2, "->"), (1, "executor"), (0, "planner"),
    ]  # fmt: skip
    assert lines[0][2] == "Hm. [executor] Find it" and lines[1][2] == "[search] it"
    assert all(text.isprintable() for _, _, text in lines)


def test_a_scored_transcript_says_what_everyone_earned_and_why_it_ended():
    both = rollout(True, report_ok=False)
    both.calls[0].reward_parts["expert_tools"] = 1 / 3
    scores = [line for line in report.transcript(both, scored=True) if line[1] in ("=", "stopped")]
    safe = report.printable(EVIL)
    assert scores == [
        (1, "stopped", f"format: {safe}; reward 0.00 (format 1, expert 0.7, tools 0.33), advantage +0.00, copies 1"),
        (0, "=", "result; reward 0.50 (format 1, correct 1), advantage +1.25"),
    ]
    both.planner.step = 0  # an evaluation has no advantages
    assert "advantage" not in report.transcript(both, scored=True)[-1][2]


def test_one_agents_conversation_alone_shows_what_its_calls_returned():
    lines = report.conversation(rollout(True).planner)
    assert [(depth, who) for depth, who, _ in lines] == [(0, "planner"), (1, "->"), (0, "planner")]


def test_a_transcript_says_why_it_stopped():
    lines = report.transcript(rollout(True, report_ok=False))
    assert (1, "stopped") in [(depth, who) for depth, who, _ in lines]
    assert [who for depth, who, _ in lines if depth == 1][-1] == "->"  # the planner reads an error instead of a report


def test_the_page_is_one_file_and_escapes_what_models_wrote(tmp_path):
    curves = tmp_path / "curves.png"
    report.draw_curves(curves, [step(1, [3, 0, 1]), step(2, [0, 4])], 2, numbers(0.25), numbers(0.5))
    assert curves.read_bytes().startswith(b"\x89PNG")
    both = rollout(False), rollout(True, report_ok=False)
    text = report.page("run <b>", EVIL, numbers(0.25), numbers(0.5), curves, [(question(0), *both)], [(1, list(both))])
    reader = Reader()
    reader.feed(text)
    assert not reader.tags & {"script", "link", "iframe"} and "<b>" not in text.replace("<b>lookup</b>", "")
    sources = [value for name, value in reader.attributes if name in ("src", "href")]
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,")
    assert "url(" not in text and "@import" not in text
    assert "&lt;script&gt;" in text and "advantage +1.25" in text and "expert 0.7" in text and "\x1b" not in text


def test_curves_of_no_steps_at_all(tmp_path):
    report.draw_curves(tmp_path / "curves.png", [], 2, numbers(0.0), numbers(1.0))
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_telling_questions_come_from_every_kind_and_every_case():
    questions = [question(i, kind) for i, kind in enumerate(["puzzle"] * 4 + ["lookup"] * 4)]
    before = [rollout(right) for right in (0, 0, 1, 0, 1, 1, 1, 1)]
    after = [rollout(right) for right in (0, 1, 0, 1, 1, 1, 1, 1)]
    assert report.telling(questions, before, after, per_kind=3) == [1, 2, 0, 4, 5, 6]


def test_the_tables_fit_eighty_columns():
    for table in (report.accuracy_table, report.measure_table):
        screen = Console(file=io.StringIO(), force_terminal=True, width=80)
        display.print_table(screen, *table(numbers(0.25), numbers(0.5)))
        assert "25 [11, 47]" in screen.file.getvalue() or table is report.measure_table
        assert "…" not in screen.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_fits_eighty_columns(terminal):
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    past = [step(n, [1, 3]) for n in range(1, 60)]
    with display.Progress(screen, 100, 4, past) as progress:
        for n in range(60, 101):
            progress.update(step(n, [1, 3, *[0] * 10, 1]))
    text = screen.file.getvalue()
    assert "100/100" in text and ("D_max" in text) == terminal and ("\x1b" in text) == terminal
    assert all(len(line) <= 80 for line in text.split("\x1b[2K")[-1].splitlines())


def test_stdout_that_is_no_terminal_stays_plain(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    display.console().print(display.Text("red", style="red"))
    assert capsys.readouterr().out == "red\n"
