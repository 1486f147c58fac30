"""See what a run did: ``python -m minimgrpo.show RUN``, also while it runs.

Without a filter: one screen about the run. With filters: the rollouts that pass all of them, each as a tree of the
planner's turns, the executor's work that each caused, and what the tools returned, with why every trajectory ended and
what it earned::

    python -m minimgrpo.show RUN --step last --wrong
    python -m minimgrpo.show RUN --question "capital of Ghana" --limit 8
    python -m minimgrpo.show RUN --agent executor --stop-reason length --reward '<0.5'
    python -m minimgrpo.show RUN --evaluation after --greedy --level 3 --html page.html

It reads published files and nothing else: no model, no lock.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minimgrpo import display

with display.interruptible():
    from minimgrpo import log, report, tasks
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.protocol import ROLES
    from minimgrpo.report import Line
    from minimgrpo.trajectory import STOP_REASONS, Rollout, Trajectory, rollouts

LIMIT = 3  # trees that fit about a screen

# ---------------------------------------------------------------------------------------------------------- the filters


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = display.Parser(
        prog="minimgrpo.show", description="See what a run did: a summary, or, with filters, its rollouts as trees."
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run's directory")
    add("--step", type=step, metavar="STEP", help="a number, a range such as 3-5, first, middle or last")
    add("--question", metavar="TEXT", help="a question's id, or a part of its text")
    add("--level", type=int, choices=(1, 2, 3), help="questions of this level")
    add("--agent", choices=ROLES, help="this agent's trajectories alone; the two filters below are then about them")
    add("--reward", type=condition, metavar="COND", help="reward of the planner (or AGENT): 0, '>=0.5', '<0.3'")
    add("--stop-reason", choices=STOP_REASONS, help="why the planner (or AGENT) ended")
    verdict = parser.add_mutually_exclusive_group()
    verdict.add_argument("--right", action="store_const", const=True, help="rollouts whose answer is right")
    verdict.add_argument(
        "--wrong", dest="right", action="store_const", const=False, help="rollouts whose answer is not"
    )
    add("--evaluation", choices=("before", "after"), help="an evaluation of the demo instead of the training steps")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--sampled", dest="way", action="store_const", const="sampled", help="its attempts at T=1 (default)"
    )
    way.add_argument("--greedy", dest="way", action="store_const", const="greedy", help="its greedy attempts")
    add("--limit", type=int, metavar="N", help=f"show at most so many ({LIMIT})")
    add("--html", type=Path, metavar="FILE", help="write them to FILE, one page without outside resources, instead")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit starts at 1, not {args.limit}")
    if args.way and not args.evaluation:
        parser.error(f"--{args.way} is about an evaluation: add --evaluation before or --evaluation after")
    if args.step and args.evaluation:
        parser.error("an evaluation has no steps: leave out --step or --evaluation")
    return args


def step(text: str) -> str:
    """Checks that a text names steps; which, only the run can tell (``chosen_steps``)."""
    if match := re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text):
        if int(match[1]) > int(match[2] or match[1]):
            raise argparse.ArgumentTypeError(f"{text} begins after its end: write {match[2]}-{match[1]}")
    elif text not in ("first", "middle", "last"):
        raise argparse.ArgumentTypeError(f"a number, a range such as 3-5, first, middle or last, not {text!r}")
    return text


def condition(text: str) -> Callable[[float], bool]:
    """A test of a number; a number alone means equal as shown, to two digits.

    >>> condition(">=0.5")(0.5), condition("<0.5")(0.5), condition("0.95")(0.947)
    (True, False, True)
    """
    match = re.fullmatch(r"\s*(>=|<=|>|<|=|)\s*([-+.\d]+)\s*", text)
    try:
        sign, bound = match[1], float(match[2])
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no condition: try 0, '>=0.5' or '<0.3', in quotes") from None
    tiny = 1e-6  # 0.1 + 0.9 * 0.3 is not 0.37
    return {
        ">=": lambda value: value >= bound - tiny,
        "<=": lambda value: value <= bound + tiny,
        ">": lambda value: value > bound + tiny,
        "<": lambda value: value < bound - tiny,
    }.get(sign, lambda value: math.isclose(value, bound, rel_tol=0, abs_tol=0.005 + tiny))


def chosen_steps(text: str | None, complete: list[int]) -> list[int]:
    """The steps that ``--step`` asks for. Raises LogError when the run has none of them.

    >>> chosen_steps("middle", [1, 2, 3, 4]), chosen_steps("3-9", [1, 2, 3, 4]), chosen_steps(None, [1, 2])
    ([2], [3, 4], [1, 2])
    """
    if text is None:
        return complete
    if place := {"first": 1, "middle": (len(complete) + 1) // 2, "last": len(complete)}.get(text):
        return [complete[place - 1]]
    low, _, high = text.partition("-")
    if not (chosen := [n for n in complete if int(low) <= n <= int(high or low)]):
        raise LogError(f"the run has no rollouts of step {text}, only of {complete[0]} to {complete[-1]}")
    return chosen


@dataclass(frozen=True)
class Found:
    """What is shown of one match."""

    where: str
    right: bool
    about: str
    lines: list[Line]


def matches(args: argparse.Namespace, rollout: Rollout, questions: dict) -> Iterator[Found]:
    """What of a rollout passes the filters: itself, or with --agent executor any of its executor trajectories."""
    planner = rollout.planner
    question, text = questions.get(planner.question_id), planner.messages[1]["content"]
    right = bool(planner.reward_parts.get("correct"))
    level = question.level if question else None
    if args.question and args.question != planner.question_id and args.question.lower() not in text.lower():
        return
    if (args.level and args.level != level) or (args.right is not None and args.right != right):
        return

    def passes(t: Trajectory) -> bool:
        return (not args.reward or args.reward(t.reward)) and args.stop_reason in (None, t.stop_reason)

    where = f"step {planner.step}, " if planner.step else ""
    where += f"{planner.question_id}, " + (f"level {level}, " if level else "") + f"rollout {planner.rollout}"
    about = report.printable(text) + (f" (gold answer: {report.printable(question.answer)})" if question else "")
    if args.agent == "executor":
        for t in filter(passes, rollout.calls):
            task = report.printable(t.messages[1]["content"])
            yield Found(
                f"{where}, call {t.call}", right, f"{about}\nSub-task: {task}", report.conversation(t, scored=True)
            )
    elif passes(planner):
        calls = [] if args.agent else rollout.calls
        yield Found(where, right, about, report.conversation(planner, calls, scored=True))


def source(args: argparse.Namespace, run: RunLog) -> Iterator[Rollout]:
    """The rollouts to choose from, step by step. Raises LogError when there are none, or a file is damaged."""
    if args.evaluation:
        path = run.evaluation(args.evaluation, args.way or "sampled")
        if not path.exists():
            raise LogError(f"{path} is missing: the demo writes it (train does not), {args.evaluation} its training")
        yield from log.read_rollouts(path)
    elif not (complete := run.steps()):
        raise LogError(f"{run.root} has no rollouts yet: its first step is not complete")
    else:
        for n in chosen_steps(args.step, complete):
            yield from rollouts(*(log.read_trajectories(run.trajectories(role, n)) for role in ROLES))


# ----------------------------------------------------------------------------------------------------------- the output


def select(screen, args: argparse.Namespace, run: RunLog, command: str) -> None:
    """Show, or write to a page, the first of what passes the filters."""
    if args.html and args.html.exists():
        raise LogError(f"{args.html} exists: choose another name for the page")
    questions = {q.task_id: q for q in tasks.load_questions("test" if args.evaluation else "train")}
    limit, shown, matching, seen = args.limit or LIMIT, [], 0, 0
    for rollout in source(args, run):
        seen += 1
        for found in matches(args, rollout, questions):
            matching += 1
            if len(shown) < limit:
                shown.append(found)
                if not args.html:
                    display.print_tree(screen, head(found), found.lines)
                    print()
    what = "executor trajectories" if args.agent == "executor" else "rollouts"
    if not matching:
        print(f"None of {seen} rollouts passes these filters.")
        return
    count = f"{len(shown)} of {matching} matching {what}, among {seen} rollouts"
    if args.html:
        log.publish_text(args.html, page(f"{run.root.name}: {count}", f"python -m minimgrpo.show {command}", shown))
        print(f"{args.html}: {count}")
    else:
        print(count + ("; --limit shows more" if matching > len(shown) else ""))


def head(found: Found) -> display.Text:
    verdict = ("right", "bold green") if found.right else ("wrong", "bold red")
    return display.Text.assemble((f"{found.where}: ", "bold"), verdict, f"\n{found.about}")


def page(title: str, command: str, shown: list[Found]) -> str:
    """The same as one HTML text."""
    found = "".join(
        f"<details open><summary><b>{report.safe(f.where)}</b>: {report.verdict(f.right)}</summary>"
        + "".join(f"<p>{report.safe(line)}</p>" for line in f.about.split("\n"))
        + report.paragraphs(f.lines)
        + "</details>"
        for f in shown
    )
    return report.document(title, f'<p class="note">{report.safe(command)}</p>{found}')


# ---------------------------------------------------------------------------------------------------------- the summary

# name in metrics.jsonl -> the top of its curve, None: its largest value
CURVES = {
    **dict.fromkeys(("reward", "format", "correct", "puzzle_delegation", "lookup_delegation"), 1.0),
    **dict.fromkeys(("expert", "query_specificity", "flat", "truncated"), 1.0),
    **dict.fromkeys(("entropy", "grad_norm", "sample_seconds", "learn_seconds"), None),
}


def summary(screen, run: RunLog) -> None:
    """One screen: what the run is, how far it is, what its steps and its evaluations measured, what to look at next."""
    config = log.read_config(run.root)
    objective = config.get("objective", {})
    done = min(run.last_checkpoint(role) or 0 for role in ROLES)
    print(
        f"{run.root}: {done} of {config.get('steps')} steps done\n"
        f"{config.get('model')} ({config.get('quantize')}), {config.get('questions')} questions x "
        f"{config.get('rollouts')} rollouts a step, D_max {config.get('d_max')}, lr {objective.get('lr')}, "
        f"seed {config.get('seed')}\n"
    )
    rows = {role: log.read_metrics(run.metrics(role)) for role in ROLES}
    if all(rows.values()):
        last = rows["planner"][-1]
        print(f"Measured in step {last['step']}, and the curve since step {rows['planner'][0]['step']}:")
        display.print_curves(screen, rows, CURVES)
        counts = ", ".join(f"{n} made {d}" for d, n in enumerate(last["calls"]) if n)
        print(f"Delegations, of {last['trajectories']} rollouts: {counts}.\nWhat the names mean: docs/metrics.md.")
    else:
        print("No step has been measured yet.")
    if (run.root / "evaluation").is_dir():
        print()
        display.print_table(screen, ["test questions right, %", "n", "before", "after"], evaluations(run))
    print(
        f"""
Look at rollouts with --step, --question, --level, --agent, --reward, --right,
--wrong, --stop-reason, --evaluation (--help says more), for example:
  python -m minimgrpo.show {shlex.quote(str(run.root))} --step last --wrong"""
    )


def evaluations(run: RunLog) -> list[list[str]]:
    """Rows of a table: how many of the test questions were answered right; empty cells where there is no file."""
    rows = []
    for way in ("sampled", "greedy"):
        cells, n = [], ""
        for when in ("before", "after"):
            path = run.evaluation(when, way)
            flags = [r.planner.reward_parts["correct"] for r in log.read_rollouts(path)] if path.exists() else []
            cells.append(f"{100 * sum(flags) / len(flags):.0f}" if flags else "")
            n = str(len(flags) or n)
        rows.append([way, n, *cells])
    return rows


# ---------------------------------------------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    args, screen = parse(argv), display.console()
    filters = {name: value for name, value in vars(args).items() if name != "run" and value is not None}
    try:
        if not (args.run / "config.json").is_file():
            raise LogError(f"{args.run} is no run: it has no config.json")
        if "workflow" in log.read_config(args.run):
            where = f"{args.run}/<adapter>/step-*.jsonl"
            raise LogError(f"{args.run} is a workflow's run, and show reads planners and executors; look into {where}")
        run = RunLog(args.run)
        if filters:
            select(screen, args, run, shlex.join(sys.argv[1:] if argv is None else argv))
        else:
            summary(screen, run)
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return display.pipe_closed()
    except (LogError, tasks.DataError) as error:
        return display.complain(str(error))
    except OSError as error:
        return display.complain(f"{error.strerror or error} ({error.filename})")


if __name__ == "__main__":
    sys.exit(main())
