"""The command: ``python -m minimgrpo.experiments NAME ...`` (``all``; ``--quick`` for a look).

Every run that has been made is kept in ``runs/experiments`` under a hash of its whole setting, and is never made again:
the experiments share runs, Ctrl-C loses only those under way, and more seeds add to what is there. The results go to
``data/results/NAME.json`` and ``NAME.png``, those of ``--quick`` to ``runs/experiments/quick``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    from minimgrpo import tasks
    from minimgrpo.base import ModelError
    from minimgrpo.chat import ChatError
    from minimgrpo.experiments import pool, show
    from minimgrpo.experiments.setting import Setting
    from minimgrpo.experiments.studies import BY_NAME, STUDIES, Study
    from minimgrpo.experiments.variance import draw_variance, remembered_variance
    from minimgrpo.experiments.verdicts import MARGIN
    from minimgrpo.log import LogError

RUNS = Path("runs/experiments")
QUICK = {"steps": 4, "questions": 4, "rollouts": 4}
QUICK_REST = {"examined": 16, "demonstrations": 60, "split": "validation"}


def main(argv: list[str] | None = None) -> int:
    parser = display.Parser(
        prog="minimgrpo.experiments", description="Measure what co-training buys, with intervals over seeds."
    )
    names = ", ".join(study.name for study in STUDIES)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help=f"all, or some of: {names}")
    add("--quick", action="store_true", help="tiny runs and 2 seeds, to see how it goes; says nothing about the claims")
    add("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (5; quick: 2)")
    add("--jobs", type=int, metavar="N", default=min(2, os.cpu_count() or 1), help="processes, a thread each (2)")
    add("--model", default="atlas-lm", help="the base: atlas-lm, a folder, a hub name")
    add("--out", type=Path, metavar="DIR", help="the results' folder (data/results; quick: runs/experiments/quick)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name != "all" and name not in BY_NAME]:
        parser.error(f"there is no experiment {unknown[0]!r}: all, {names}")
    seeds = args.seeds if args.seeds is not None else 2 if args.quick else 5
    if not 2 <= seeds <= 16:
        parser.error(
            f"--seeds is 2 to 16, not {seeds}: an interval needs two, and the permutation test counts 2^N signs"
        )
    if args.jobs < 1:
        parser.error(f"--jobs starts at 1, not {args.jobs}")
    chosen = list(STUDIES) if "all" in args.names else [BY_NAME[name] for name in dict.fromkeys(args.names)]
    out = args.out or (RUNS / "quick" if args.quick else Path("data/results"))
    again = f"python -m minimgrpo.experiments {shlex.join(argv)}"
    try:
        for study in chosen:
            carry_out(study, base_setting(args.model, args.quick), seeds, args.jobs, out, args.quick, again)
        return 0
    except KeyboardInterrupt:
        print(f"\nStopped. Finished runs are kept in {RUNS}; the same command continues:\n  {again}")
        return 130
    except BrokenPipeError:
        return display.pipe_closed()
    except BrokenProcessPool:
        problem = f"a process that made a run was ended from outside, perhaps for its memory; {again} continues"
    except (ModelError, ChatError, LogError, tasks.DataError, FloatingPointError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return display.complain(problem)


def base_setting(model: str, quick: bool) -> Setting:
    """What all runs share but for what their arms say."""
    base = Setting()
    config = replace(base.config, model=model, **(QUICK if quick else {}))
    return replace(base, config=config, **(QUICK_REST if quick else {}))


def carry_out(study: Study, base: Setting, seeds: int, jobs: int, out: Path, quick: bool, again: str) -> None:
    """Make the study's runs, judge its claims, print and write everything."""
    screen, started = display.console(), time.perf_counter()
    arms = study.settings(base, seeds)
    settings = list(dict.fromkeys(s for some in arms.values() for s in some))
    names = {setting: arm for arm, some in arms.items() for setting in some}

    def say(done: int, of: int, setting: Setting, result: dict) -> None:
        left = (time.perf_counter() - started) / done * (of - done) / 60
        accuracy = f"{100 * result['sampled']['accuracy']:.0f} and {100 * result['greedy']['accuracy']:.0f} %"
        print(f"  {done}/{of} {names[setting]}, seed {setting.seed}: {accuracy} ({left:.0f} min left)")

    print(f"{study.name}: {study.title}; {len(settings)} runs")
    made = dict(zip(settings, pool.perform_all(settings, RUNS, jobs, say), strict=True))
    results = {arm: [made[setting] for setting in some] for arm, some in arms.items()}
    extra, panel = {}, None
    if study.name == "alignment":
        extra["variance"] = remembered_variance(base, RUNS, quick)
        panel = draw_variance(extra["variance"])
    found = show.judged(study, results)
    protocol = {
        "reproduce": again,
        "seeds": list(range(seeds)),
        "base_setting": base.facts(),
        "verdict": f"paired by seed; Student's 95 % interval of the difference; '=' within {MARGIN}; p: sign-flip test",
        "note": study.note,
    }
    print()
    display.print_table(screen, *show.table(study, results))
    print()
    display.print_table(screen, *show.verdict_table(study, found))
    if extra:
        print()
        display.print_table(screen, *extra["variance"]["table"])
    print(f"{study.note}\n" if study.note else "")
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(show.kept(study, results, found, protocol, extra), separators=(",", ":"))
    (out / f"{study.name}.json").write_text(text + "\n", encoding="utf-8")
    show.draw(study, results, out / f"{study.name}.png", panel)
    (out / "verdicts.md").write_text(show.overview(out), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
