"""What a person sees while a run runs: a live panel in a terminal, lines of plain text in a file or a pipe.

Only stdout is written to, never stderr (a notebook grader counts anything there as a failure). This module knows
numbers and texts, no models: it imports rich and nothing heavy, so that the commands can use it before torch is there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

# label, role and name of the metric, heading in plain text
ROWS = (
    ("format, planner", "planner", "format", "form"),
    ("format, executor", "executor", "format", "exec"),
    ("accuracy", "planner", "correct", "acc"),
    ("puzzles delegated", "planner", "puzzle_delegation", "puz"),
    ("look-ups delegated", "planner", "lookup_delegation", "look"),
    ("specific queries", "executor", "query_specificity", "spec"),
    ("expert score", "executor", "expert", "expt"),
    ("planner groups without signal", "planner", "flat", "pflat"),
    ("executor groups without signal", "executor", "flat", "eflat"),
)
GLOSSARY = """\
form, exec: format of planner and executor; acc: accuracy; puz, look: puzzles
and look-ups delegated; spec: specific queries; expt: expert score; pflat,
eflat: groups of each role without signal; d: delegations in a rollout"""
WIDTH = 40  # of a sparkline and of a bar
SHOWN_CALLS = 8  # rollouts with more delegations share one bar
SHOWN_TEXT = 400  # characters of a line in a tree


class Parser(argparse.ArgumentParser):
    """A wrong flag is answered with one sentence on stderr and exit code 2."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def complain(problem: str) -> int:
    """Say in one sentence on stderr what went wrong -> the exit code."""
    print(" ".join(problem.split()), file=sys.stderr)
    return 2


def pipe_closed() -> int:
    """The reader of stdout has gone, as after ``| head``: say nothing more -> the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


@contextlib.contextmanager
def interruptible():
    """Ctrl-C while the libraries are still being imported ends the command without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nStopped before the run began: nothing was written.")
        sys.exit(130)


def console() -> Console:
    """stdout for rich; without control codes unless it is a terminal. Text that it cannot encode never stops a run."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return Console(highlight=False)
    return Console(highlight=False, force_terminal=False, force_jupyter=False, color_system=None)


class Progress:
    """Shows the steps of a run. A context manager; ``past`` is what the steps before a resume measured.

    What a step measured is ``servers.Team.measured``: {"step", "planner": {...}, "executor": {...}}.
    """

    def __init__(self, screen: Console, steps: int, d_max: int, past: list[dict] = ()):
        self.screen, self.steps, self.d_max, self.seen = screen, steps, d_max, list(past)
        self.moments = [time.perf_counter()]  # when it began, and when each step came
        self.live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        else:
            head = "".join(f"{heading:>6}" for *_, heading in ROWS)
            self.screen.print(Text(f"{GLOSSARY}\n{'step':>9}{'left':>7}{head}{'d':>6}"))
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()

    def update(self, measured: dict) -> None:
        """Take in one step."""
        self.seen.append(measured)
        self.moments.append(time.perf_counter())
        step, counts = measured["step"], measured["planner"]["calls"]
        if self.live:
            self.live.update(self._panel(), refresh=True)
        elif len(self.moments) == 2 or step % max(1, self.steps // 20) == 0 or step == self.steps:
            cells = "".join(f"{_share(measured[role][name]):>6}" for _, role, name, _ in ROWS)
            calls = sum(d * n for d, n in enumerate(counts)) / max(1, sum(counts))
            self.screen.print(Text(f"{f'{step}/{self.steps}':>9}{self._left():>7}{cells}{calls:>6.1f}"))

    def _speed(self) -> float:
        """Steps per second of late; those before a resume do not count."""
        recent = self.moments[-11:]
        return (len(recent) - 1) / max(recent[-1] - recent[0], 1e-9)

    def _left(self) -> str:
        seconds = (self.steps - self.seen[-1]["step"]) / self._speed()
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def _panel(self) -> Panel:
        now = self.seen[-1]
        top = Table.grid(padding=(0, 2))
        speed = f"{self._speed():.2f} steps/s"
        top.add_row(
            Text(f"step {now['step']}/{self.steps}", style="bold"),
            ProgressBar(total=max(1, self.steps), completed=now["step"], width=24),
            speed,
            f"{self._left()} left",
        )
        lines = Table.grid(padding=(0, 1))
        for width in (30, 3, WIDTH):
            lines.add_column(min_width=width)
        for label, role, name, _ in ROWS:
            lines.add_row(label, *curve([m[role][name] for m in self.seen]))
        lines.add_row("")
        counts = now["planner"]["calls"]
        counts = [*counts[:SHOWN_CALLS], sum(counts[SHOWN_CALLS:])] if len(counts) > SHOWN_CALLS else counts
        for calls in range(max(len(counts), min(self.d_max, SHOWN_CALLS) + 1)):
            share = counts[calls] / max(1, sum(counts)) if calls < len(counts) else 0.0
            label = f"{'' if calls else 'rollouts with delegations: '}{calls}{'+' if calls == SHOWN_CALLS else ' '}"
            mark = " <- D_max" if calls == self.d_max else ""
            bar = Text("█" * round(share * (WIDTH - 10)), style="cyan") + Text(mark, style="yellow")
            lines.add_row(Text(f"{label:>30}"), Text(_share(share), style="bold"), bar)
        return Panel(Group(top, Text(), lines), title="M-GRPO", title_align="left", expand=False)


class Line:
    """What a process is doing, in one line: rewritten in place in a terminal, now and then a new one elsewhere."""

    EVERY = 60  # seconds between two lines of a state that is not worth one of its own

    def __init__(self, screen: Console):
        self.screen, self.last, self.shown = screen, "", -self.EVERY
        self.live = Live(console=screen, auto_refresh=False, transient=True) if screen.is_terminal else None

    def __enter__(self) -> Line:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()

    def state(self, text: str) -> None:
        """Show a state that passes, such as waiting."""
        if self.live and text != self.last:
            self.live.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)
        elif not self.live and time.monotonic() - self.shown >= self.EVERY:
            self.screen.print(Text(text))
            self.shown = time.monotonic()
        self.last = text

    def keep(self, text: str) -> None:
        """Print a line that stays."""
        self.screen.print(Text(text))


def _share(value: float | None) -> str:
    """
    >>> _share(0.256), _share(1.0), _share(None)
    ('.26', '1.0', '-')
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"[1:]


def curve(values: list[float | None], width: int = WIDTH, top: float | None = 1.0) -> tuple[Text, Text]:
    """Two cells: the last value, and a sparkline up to ``top`` (None: up to the largest value)."""
    if top is None:
        top = max((v for v in values if v), default=1.0)
    scaled = [None if v is None else v / top for v in values]
    return Text(_share(values[-1]) if values else "", style="bold"), Text(sparkline(scaled, width))


def sparkline(values: list[float | None], width: int = WIDTH) -> str:
    """Shares as a row of blocks, oldest first; None is a gap. More than ``width`` values are averaged in pieces.

    >>> sparkline([0, 0.5, None, 1])
    '▁▅ █'
    """
    pieces = min(width, len(values))
    text = ""
    for i in range(pieces):
        piece = [v for v in values[i * len(values) // pieces : (i + 1) * len(values) // pieces] if v is not None]
        text += "▁▂▃▄▅▆▇█"[min(7, int(8 * sum(piece) / len(piece)))] if piece else " "
    return text


# ------------------------------------------------------------------------------------------------- before and after


def print_table(screen: Console, header: list[str], rows: list[list[str]]) -> None:
    """A table: the first column to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD if screen.is_terminal else None, padding=(0, 1), pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    screen.print(table)


def print_curves(screen: Console, rows: dict[str, list[dict]], tops: dict[str, float | None]) -> None:
    """For each role the last value and the curve of what its ``rows`` measured.

    ``tops``: the names, and up to where each curve goes (``curve``).
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for role in rows:
        table.add_column("", justify="right")
        table.add_column(role, min_width=WIDTH // 2)
    for name, top in tops.items():
        cells: list[str | Text] = [name]
        for measured in rows.values():
            has_it = name in measured[-1]
            cells += curve([row.get(name) for row in measured], WIDTH // 2, top) if has_it else ("", "")
        table.add_row(*cells)
    screen.print(table)


def print_tree(screen: Console, head: Text, lines: list[tuple[int, str, str]]) -> None:
    """A transcript (``report.transcript``) as a tree under ``head``; what is very long is shortened."""
    root = Tree(head, guide_style="dim")
    last = {-1: root}  # depth -> the newest node there
    for depth, who, text in lines:
        if len(text) > SHOWN_TEXT:
            text = f"{text[:SHOWN_TEXT]} ... ({len(text) - SHOWN_TEXT} more characters)"
        last = {d: node for d, node in last.items() if d < depth}
        last[depth] = last[max(last)].add(_said(who, text))
    screen.print(root)


def _said(who: str, text: str) -> Text:
    return Text.assemble((f"{who} ", STYLES.get(who, "dim")), (text, "dim" if who == "=" else ""), overflow="fold")


def print_side_by_side(screen: Console, titles: list[str], transcripts: list[list[tuple[int, str, str]]]) -> None:
    """Transcripts (``report.transcript``) as columns of the same width."""
    table = Table(
        box=box.SIMPLE_HEAD if screen.is_terminal else None,
        expand=True,
        padding=(0, 1),
        pad_edge=False,
        show_header=True,
    )
    for title in titles:
        table.add_column(Text(title), ratio=1, overflow="fold")
    columns = []
    for lines in transcripts:
        columns.append(Group(*(Padding(_said(who, text), (0, 0, 0, 2 * depth)) for depth, who, text in lines)))
    table.add_row(*columns)
    screen.print(table)


STYLES = {"planner": "bold cyan", "executor": "bold green", "stopped": "red"}
