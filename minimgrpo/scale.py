"""How the cost of a step grows, and what two servers cost against one process: ``python -m minimgrpo.bench --scale``.

1. Rollouts: steps of 64, 128, ... 1,024 rollouts (K = 8).
2. Turns: planners that are made to delegate once, twice, four and eight times before they answer, to executors that
   make one call each.
3. The same run in one process and in two.

In 1 and 2 a coin decides who is right, so that every group has a signal and the whole batch is learned from: larger
steps must not look cheap because more of them is skipped. In 2 what agents write is sampled as always, but read as the
next call or the answer, so that the number of turns is exact. A growth of 1 is linear (the slope in logarithms).
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

from minimgrpo import agents, bench, display, log, sampler, server, settle, tasks, train
from minimgrpo.agents import Limits
from minimgrpo.protocol import ROLES, Call, Result
from minimgrpo.servers import Config, Team
from minimgrpo.tools import Tools

ROLLOUTS = (64, 128, 256, 512, 1024)
DELEGATIONS = (1, 2, 4, 8)
STEPS = 12  # of the runs in one process and in two


def cpu_of_a_step(team: Team) -> float:
    """CPU-seconds of the team's second step; the first warms up. A coin says who is right."""
    draws = random.Random(0)
    with mock.patch.object(settle, "gaia_score", lambda *_: draws.random() < 0.5):
        team.step(1)
        started = time.process_time()
        team.step(2)
        return time.process_time() - started


class Script:
    """While it is entered, planners delegate so many times and then answer; executors make one call and report."""

    def __init__(self, delegations: int):
        self.delegations, self.now, self.stack = delegations, 0, ExitStack()
        self.generate = sampler.Conversations.generate

    def __enter__(self) -> Script:
        script = self

        def generate(conversations, *args, **kwargs):
            script.now = conversations.written = getattr(conversations, "written", 0) + 1
            return script.generate(conversations, *args, **kwargs)

        self.stack.enter_context(mock.patch.object(sampler.Conversations, "generate", generate))
        self.stack.enter_context(mock.patch.object(agents.protocol, "parse", self.parse))
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def parse(self, role: str, _text: str) -> Call | Result:
        """Conversations go in lock-step: whoever is read now has written as often as the batch has."""
        if role == "planner":
            delegate = Call("executor", {"task": "Find the capital of Ghana"})
            return delegate if self.now <= self.delegations else Result("Accra")
        return Call("search", {"query": "capital Ghana"}) if self.now == 1 else Result("Accra")


def growth(sizes: list[float], costs: list[float]) -> float:
    """The slope of the costs over the sizes in logarithms, by least squares: 1 is linear.

    >>> round(growth([1, 2, 4], [3, 6, 12]), 6), round(growth([1, 2, 4], [1, 4, 16]), 6)
    (1.0, 2.0)
    """
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(c) for c in costs]).slope


def rollouts_and_turns(config: Config, folder: Path, rollouts=ROLLOUTS, delegations=DELEGATIONS) -> None:
    """Measure and print 1 and 2."""
    screen, policy = display.console(), train.load_policies(config)[0]
    world = tasks.load_questions("train"), Tools(tasks.load_pages())

    def team(name: str, **changes) -> Team:
        return Team(replace(config, steps=2, **changes), policy, folder / name, *world)

    costs = [cpu_of_a_step(team(f"rollouts-{n}", questions=n // 8, rollouts=8)) for n in rollouts]
    print("\n1. A step against its rollouts")
    rows = [[str(n), f"{c:.2f}", f"{1000 * c / n:.1f}"] for n, c in zip(rollouts, costs, strict=True)]
    display.print_table(screen, ["rollouts", "CPU s", "ms a rollout"], rows)
    print(f"growth: {growth(list(rollouts), costs):.2f} (aim: at most 1, which is linear)")

    most = max(delegations)
    limits, costs = Limits(turns=most + 1, calls=most, context=policy.max_context), []
    for n in delegations:
        with Script(n):
            costs.append(cpu_of_a_step(team(f"delegations-{n}", limits=limits)))
    print(f"\n2. A step of {config.questions} questions x {config.rollouts} rollouts against the planner's delegations")
    rows = [[str(n), f"{c:.2f}", f"{c / n:.2f}"] for n, c in zip(delegations, costs, strict=True)]
    display.print_table(screen, ["delegations", "CPU s", "CPU s each"], rows)
    print(f"growth: {growth(list(delegations), costs):.2f} (aim: at most 1, which is linear)")


# ------------------------------------------------------------------------------------------- one process against two


def metered_server(role: str, root: str, flags: list[str]) -> None:
    """Run a server with its log and its waiting timed, and print the seconds as JSON, as the last line."""
    meter = bench.Meter()
    parts = {"log": bench.TIMED["log"] + bench.TIMED["checkpoints"], "waiting": [(server.Waiting, "__call__")]}
    with meter.wrapped(parts):
        code = server.main([role, root, *flags])
    meter.charge()
    wall = {part: meter.wall[part] for part in parts}
    print("\n" + json.dumps({"code": code, "cpu": sum(meter.cpu.values()), "log_cpu": meter.cpu["log"], **wall}))


def seconds_a_step(root: Path) -> float:
    """Wall seconds a step of a finished run: from its second outcome to its last."""
    times = [path.stat().st_mtime for path in sorted((root / "outcomes").glob("step-*.jsonl"))]
    return (times[-1] - times[1]) / (len(times) - 2)


def one_and_two_processes(config: Config, folder: Path, steps: int = STEPS) -> None:
    """Measure and print 3: each run is started as a person would start it, in new processes."""
    rows, first = [], None
    for threads in dict.fromkeys((config.threads, 1)):
        run, flags = folder / f"one-{threads}", server.flags_of(replace(config, steps=steps, threads=threads))
        subprocess.run([sys.executable, "-m", "minimgrpo.train", str(run), *flags], check=True, capture_output=True)
        seconds = seconds_a_step(run)
        first = first or seconds
        rows.append([f"one process, {threads} threads", f"{seconds:.2f}", f"{seconds / first:.2f}", ""])
    run, flags = folder / "two", server.flags_of(replace(config, steps=steps, threads=1))
    call = "from minimgrpo import scale; scale.metered_server({!r}, {!r}, {!r})"
    children = [
        subprocess.Popen([sys.executable, "-c", call.format(role, str(run), flags)], stdout=subprocess.PIPE, text=True)
        for role in ROLES
    ]
    said = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    if any(s["code"] for s in said):
        raise OSError(f"a server of {run} gave up")
    seconds, spent = seconds_a_step(run), sum(s["log"] for s in said)
    rows.append(["two processes, 1 thread each", f"{seconds:.2f}", f"{seconds / first:.2f}", f"{spent / steps:.3f}"])
    print(f"\n3. The same {steps} steps in one process and in two (wall seconds)")
    display.print_table(display.console(), ["", "a step", "ratio", "mail, log, checkpoints a step"], rows)
    cpu = 100 * sum(s["log_cpu"] for s in said) / sum(s["cpu"] for s in said)
    print(f"mail, log and checkpoints of both: {100 * spent / steps / seconds:.1f} % of a step (aim: at most 3 %)")
    print(f"{cpu:.1f} % of both servers' CPU, their start included; the rest of it is waiting for the disk")
    waits = [f"the {role} {s['waiting'] / steps:.2f} s" for role, s in zip(ROLES, said, strict=True)]
    print(f"waited for each other, a step: {', '.join(waits)}")
    crossed = sum(log.RunLog(run).traffic().values())
    print(f"{crossed / steps:,.0f} bytes a step crossed between them, text and scalars only")
