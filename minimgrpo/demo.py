"""The whole thing in one command: ``python -m minimgrpo.demo`` (``--quick`` for a look in seconds).

It evaluates the untrained team on held-out questions, trains planner and executor together with M-GRPO, evaluates
again, and leaves in RUN the trajectory log, both adapters, ``summary.json``, ``curves.png`` and ``report.html``.

``summary.json`` is ``{"seed", "steps", "seconds", "model", "before": S, "after": S}``, S as in ``evaluate.summarise``.
Both evaluations stand in ``RUN/evaluation/`` as JSON lines, one rollout a line, so a resumed demo repeats neither.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    from minimgrpo import evaluate, log, metrics, report, tasks, train
    from minimgrpo.evaluate import Evaluation
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.protocol import ROLES
    from minimgrpo.servers import Config, Team
    from minimgrpo.trajectory import Rollout

QUICK = {"steps": 3}
QUICK_QUESTIONS = 40


def main(argv: list[str] | None = None) -> int:
    parser = train.Parser(prog="minimgrpo.demo", description="Train a planner and an executor, seen before and after.")
    parser.add_argument("--quick", action="store_true", help=f"3 steps, {QUICK_QUESTIONS} test questions: under 30 s")
    parser.add_argument("--out", type=Path, metavar="RUN", help="the run's directory (runs/demo-seed0)")
    args = parser.parse_args(argv)
    quick = " --quick" if args.quick else ""
    root = args.out or Path("runs") / f"{'quick' if quick else 'demo'}-seed{getattr(args, 'seed', 0)}"

    def run() -> None:
        screen = display.console()
        if args.resume and (root / "summary.json").exists():
            print(f"{root} is finished: nothing is left to do.")
            return show(screen, read_summary(root))
        config = train.chosen_config(parser, args, root, Config(**QUICK) if quick else Config())
        team = train.load_team(root, config, args.resume)
        with log.owned(root, "planner"), log.owned(root, "executor"):
            demo(screen, team, args.quick)

    return train.guarded(run, root, f"python -m minimgrpo.demo{quick} --resume --out {shlex.quote(str(root))}")


def demo(screen, team: Team, quick: bool) -> None:
    """Evaluate, train, evaluate, show, write. What a stopped run has done already is read instead."""
    started, root, config = time.perf_counter(), team.log.root, team.config
    questions = held_out(root, quick)

    before, sampled_before = examined(team, questions, "before")  # the adapters are fresh: they change nothing yet
    seen = train.resumed(team)
    earlier = sum(m[role][f"{phase}_seconds"] or 0.0 for m in seen for role in ROLES for phase in ("sample", "learn"))
    print(f"training, {config.questions} questions x {config.rollouts} rollouts a step")
    with display.Progress(screen, config.steps, config.d_max, seen) as progress:
        for *_, measured in train.train(team, len(seen) + 1):
            progress.update(measured)
            seen.append(measured)
    after, sampled_after = examined(team, questions, "after")

    rollouts = sampled_before.rollouts, sampled_after.rollouts
    summary = {
        "seed": config.seed,
        "steps": config.steps,
        "seconds": 0.0,
        "model": config.model,
        "before": before,
        "after": after,
    }
    show(screen, summary)
    show_example(screen, questions, *rollouts)

    report.draw_curves(root / "curves.png", seen, config.d_max, before, after)
    tests = [(questions[i], rollouts[0][i], rollouts[1][i]) for i in report.telling(questions, *rollouts)]
    steps = sorted({1, (1 + config.steps) // 2, config.steps}) if config.steps else []
    groups = [(n, report.telling_group(team.planner.published(n), team.executor.published(n))) for n in steps]
    facts = f"Model {config.model}, {config.steps} steps of {config.questions} questions x {config.rollouts} rollouts, "
    facts += f"D_max {config.d_max}, seed {config.seed}."
    text = report.page(f"M-GRPO run {root.name}", facts, before, after, root / "curves.png", tests, groups)
    log.publish_text(root / "report.html", text)
    seconds = summary["seconds"] = round(earlier + time.perf_counter() - started, 1)
    # the last file: with it the run is finished
    log.publish_text(root / "summary.json", json.dumps(summary, indent=1) + "\n")
    print(f"\n{seconds:.0f} s in all. report.html, curves.png, summary.json, the log and both adapters are in {root}")


# ------------------------------------------------------------------------------------------------------- evaluating


def held_out(root: Path, quick: bool) -> list:
    """The test split; with ``quick`` the first few of each kind; in a resumed run those of its first evaluation."""
    questions = tasks.load_questions("test")
    first = RunLog(root).evaluation("before", "sampled")
    if first.exists():
        by_id = {q.task_id: q for q in questions}
        ids = [rollout.planner.question_id for rollout in log.read_rollouts(first)]
        if unknown := [i for i in ids if i not in by_id]:
            raise LogError(f"{first} is about other questions than the test split ({unknown[0]}): start a new run")
        return [by_id[i] for i in ids]
    if not quick:
        return questions
    kinds = dict.fromkeys(q.kind for q in questions)
    return [q for kind in kinds for q in [q for q in questions if q.kind == kind][: QUICK_QUESTIONS // len(kinds)]]


def examined(team: Team, questions: list, when: str) -> tuple[dict, Evaluation]:
    """Evaluate the team sampled and greedily -> the S of the summary, and the sampled attempts."""
    started, config = time.perf_counter(), team.config
    print(f"{when}: {len(questions)} test questions, sampled and greedy", end="", flush=True)
    found = {}
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        path = team.log.evaluation(when, way)
        if not path.exists():
            policy, tools = team.planner.policy, team.executor.tools
            at_once = config.questions * config.rollouts  # as in training, so that the memory suffices here too
            attempt = evaluate.attempt(
                policy,
                tools,
                questions,
                temperature,
                config.seed,
                config.limits,
                at_once,
                executor_policy=team.executor.policy,
            )
            log.publish(path, (asdict(rollout) for rollout in attempt.rollouts))
        found[way] = counted(questions, log.read_rollouts(path))
    numbers, greedy = found["sampled"].numbers, found["greedy"].numbers
    summary = {
        **{name: numbers[name] for name in report.MEASURES},
        **evaluate.summarise(questions, **found),
        "greedy_kinds": evaluate.by_group(questions, found["greedy"], "kind"),
        "greedy_numbers": {name: greedy[name] for name in report.MEASURES},
    }
    seconds = time.perf_counter() - started
    print(f": {100 * summary['accuracy']:.0f} % and {100 * summary['greedy']:.0f} % right ({seconds:.1f} s)")
    return summary, found["sampled"]


def counted(questions: list, rollouts: list[Rollout]) -> Evaluation:
    """An evaluation from its rollouts."""
    planned, executed = [r.planner for r in rollouts], [call for r in rollouts for call in r.calls]
    return Evaluation(rollouts, metrics.team(questions, planned, executed))


# ----------------------------------------------------------------------------------------------------------- showing


def read_summary(root: Path) -> dict:
    path = root / "summary.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LogError(f"{path} is damaged ({error}): remove it and resume again") from None


def show(screen, summary: dict) -> None:
    """Both tables."""
    for table in (report.accuracy_table, report.measure_table):
        print()
        display.print_table(screen, *table(summary["before"], summary["after"]))


def show_example(screen, questions: list, before: list[Rollout], after: list[Rollout]) -> None:
    """One question's whole transcript before and after: the hardest that was wrong and is right, else the first."""
    learned = [
        i
        for i, (old, new) in enumerate(zip(before, after, strict=True))
        if new.planner.reward_parts["correct"] > old.planner.reward_parts["correct"]
    ]
    i = max(learned, key=lambda i: questions[i].level, default=0)
    head = f"\nOne question, level {questions[i].level}: {questions[i].question}\nGold answer: {questions[i].answer}\n"
    screen.print(display.Text(head))
    titles = [
        f"{when} ({'right' if rollout.planner.reward_parts['correct'] else 'wrong'})"
        for when, rollout in (("before", before[i]), ("after", after[i]))
    ]
    display.print_side_by_side(screen, titles, [report.transcript(before[i]), report.transcript(after[i])])


if __name__ == "__main__":
    sys.exit(main())
