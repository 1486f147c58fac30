"""Evaluate a team on a benchmark: ``python -m minimgrpo.evaluate RUN``, or ``--model NAME`` for an untrained one.

    python -m minimgrpo.evaluate runs/mine                                        the Atlas, validation split
    python -m minimgrpo.evaluate runs/mine --benchmark gaia --data data/GAIA --attempts 4
    python -m minimgrpo.evaluate --model atlas-lm --temperature 0
    python -m minimgrpo.evaluate --report OUT                                     the tables again, without a model
    python -m minimgrpo.evaluate --compare OUT_A OUT_B                            two policies on the same tasks

OUT gets ``config.json``, one JSON line per finished attempt in ``attempt-00/batch-0001.jsonl``, ..., and
``summary.json``. The same command again continues (``loop`` says how, ``results`` how the numbers are made). Select
checkpoints on the validation split, and touch the test split once. The exit code is 1 where attempts ended in an error.

``attempt``, ``by_group`` and ``summarise`` are the demo's evaluation: sampled and greedy on the Atlas, with the rewards
of training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    import torch

    from minimgrpo import agents, benchmarks, corpus, log, loop, metrics, results, train
    from minimgrpo.agents import Limits
    from minimgrpo.base import devices
    from minimgrpo.chat import Chat
    from minimgrpo.experts import Rubric
    from minimgrpo.judge import Judge, endpoint, local
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.loop import Settings
    from minimgrpo.policy import Policy, describe
    from minimgrpo.protocol import ROLES
    from minimgrpo.results import Results
    from minimgrpo.scorer import wilson
    from minimgrpo.servers import Config
    from minimgrpo.settle import reward_executor, reward_planner
    from minimgrpo.tools import Tools
    from minimgrpo.trajectory import Rollout

# ---------------------------------------------------------------------------------------------------- the demo's own


@dataclass
class Evaluation:
    """One attempt at each question: ``rollouts`` in the questions' order, and the numbers."""

    rollouts: list[Rollout]
    numbers: dict


def attempt(
    policy: Policy,
    tools: Tools,
    questions: list,
    temperature: float,
    seed: int,
    limits: Limits,
    batch: int = 160,
    executor_policy: Policy | None = None,
) -> Evaluation:
    """Let the team answer each question once; ``batch`` questions at a time (it bounds the memory).

    ``executor_policy`` is given where the executor stands on a device of its own.
    """
    rollouts: list[Rollout] = []
    for start in range(0, len(questions), batch):
        some, key = questions[start : start + batch], (seed, "evaluate", start)
        rollouts += agents.team_rollouts(policy, tools, some, limits, temperature, key, executor_policy=executor_policy)
    planned, executed = [r.planner for r in rollouts], [call for r in rollouts for call in r.calls]
    reward_planner(planned, questions)
    reward_executor(executed, {(t.question_id, 0): t.reward_parts["correct"] for t in planned}, Rubric())
    return Evaluation(rollouts, metrics.team(questions, planned, executed))


def by_group(questions: list, evaluation: Evaluation, name: str) -> dict[str, dict]:
    """{"n", "accuracy"} for each value of the questions' attribute ``name`` ("level", "kind")."""
    groups: dict[str, list[float]] = {}
    for question, rollout in zip(questions, evaluation.rollouts, strict=True):
        groups.setdefault(str(getattr(question, name)), []).append(rollout.planner.reward_parts["correct"])
    return {key: {"n": len(flags), "accuracy": sum(flags) / len(flags)} for key, flags in sorted(groups.items())}


def summarise(questions: list, sampled: Evaluation, greedy: Evaluation) -> dict:
    """The S of ``summary.json``: numbers of the sampled attempts, and the greedy accuracy."""
    n, numbers = len(questions), sampled.numbers
    return {
        "n": n,
        "accuracy": numbers["accuracy"],
        "ci95": list(wilson(round(numbers["accuracy"] * n), n)),
        "greedy": greedy.numbers["accuracy"],
        "format": numbers["format"],
        "levels": by_group(questions, sampled, "level"),
        "kinds": by_group(questions, sampled, "kind"),
        "greedy_levels": by_group(questions, greedy, "level"),
        "puzzle_delegation": numbers["puzzle_delegation"],
        "query_specificity": numbers["query_specificity"],
    }


# --------------------------------------------------------------------------------------------------------- the command


class Parser(display.Parser):
    """The flags."""

    def __init__(self):
        super().__init__(
            prog="minimgrpo.evaluate",
            description="Evaluate a planner and an executor on a benchmark.",
        )
        add = self.add_argument
        add("run", type=Path, nargs="?", metavar="RUN", help="a trained run: its newest adapters are evaluated")
        add("--model", help="an untrained team instead: atlas-lm, a folder, or a hub name")
        add("--quantize", default="nf4", help="base weights of --model: nf4, int8 or none (nf4)")
        add("--device", default="auto", help="cpu, cuda:0, mps, ...; auto: the first GPU, else the CPU")
        add("--benchmark", default="atlas", choices=benchmarks.NAMES, metavar="NAME", help=", ".join(benchmarks.NAMES))
        add("--data", type=Path, help="the benchmark's file or folder, where it does not come with this repository")
        add("--corpus", type=Path, help="pages to search: a folder of .txt, .md, .html, or JSON lines of pages")
        add("--judge", metavar="MODEL", help="decides where an answer is no exact match (xbench, webwalker, ...)")
        add("--judge-url", metavar="URL", help="its OpenAI-compatible endpoint; without it MODEL is loaded here")
        add("--out", type=Path, help="the evaluation's folder (a name made of the other flags, in RUN or runs/)")
        add("--submission", type=Path, metavar="FILE", help="write the answers in GAIA's leaderboard format as well")
        add("--report", type=Path, metavar="OUT", help="show an evaluation again; no model is loaded")
        add(
            "--compare",
            type=Path,
            nargs=2,
            metavar=("OUT_A", "OUT_B"),
            help="two evaluations on the same tasks, paired",
        )
        train.add_fields(self, Settings)
        train.add_fields(self, Limits, "the run's")


def main(argv: list[str] | None = None) -> int:
    parser = Parser()
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if sum(map(bool, (args.run, args.model, args.report, args.compare))) != 1:
        parser.error("name one thing: a RUN, --model, --report or --compare")
    if args.judge_url and not args.judge:
        parser.error("--judge-url needs the name of the model there: --judge MODEL")
    again = f"python -m minimgrpo.evaluate {shlex.join(map(str, argv))}"
    root, code = args.out or args.report or Path("runs"), 0

    def run() -> None:
        nonlocal code
        try:
            work()
        except KeyboardInterrupt:
            kept = f"Whole batches are saved in {root}; the same command continues:\n  {again}"
            begun = (root / "config.json").exists()
            print(f"\nStopped. {kept if begun else 'Nothing was written.'}")
            code = 130

    def work() -> None:
        nonlocal root, code
        screen = display.console()
        if args.compare:
            return print("\n".join(results.compared(*map(results.read, args.compare))))
        if args.report:
            return show(screen, results.read(args.report), args.submission)
        settings, config, limits = chosen(parser, args)
        if args.submission and (args.benchmark != "gaia" or settings.attempts > 1 or args.submission.exists()):
            parser.error("--submission takes a file that does not exist yet, --benchmark gaia, and one attempt a task")
        torch.set_num_threads(settings.threads)
        benchmark = benchmarks.load(args.benchmark, settings.split, args.data)
        if args.judge and benchmark.grader != "exact":
            parser.error(f"{args.benchmark} is graded by {loop.GRADERS[benchmark.grader]}: leave out --judge")
        policy, facts, name = load_policy(args.run, config, args.device)
        pages, index, facts["corpus"] = benchmark.pages, None, "none"
        if args.corpus:
            pages, index, facts["corpus"] = corpus.load(args.corpus)
        elif pages:
            facts["corpus"] = f"the benchmark's {len(pages)} pages, {corpus.content_hash(pages)}"
        tools = Tools(pages, bm25=index, files=benchmark.files)
        if benchmark.files:
            policy.chat = Chat(policy.chat.tokenizer, "files")  # its prompts tell of the tool that reads them
            print(f"{len(benchmark.files)} attached files")
        judge = None
        if args.judge:
            judge = Judge(args.judge, endpoint(args.judge, args.judge_url) if args.judge_url else local(args.judge))
        root = args.out or default_out(args.run, name, args.benchmark, settings)
        print(f"{describe(policy)}; {benchmark.name} {settings.split}: {len(benchmark.tasks)} tasks -> {root}")
        if not pages:
            print("There are no pages to search, so every search will find nothing: name some with --corpus.")
        found = loop.evaluate(policy, tools, benchmark, settings, limits, facts, root, judge)
        summary = results.summary(found)
        (root / "summary.json").unlink(missing_ok=True)  # of fewer attempts
        log.publish_text(root / "summary.json", json.dumps(summary, indent=1) + "\n")
        show(screen, found, args.submission)
        code = int(summary["all"]["errors"] > 0)

    return train.guarded(run, root, again) or code


def chosen(parser: Parser, args: argparse.Namespace) -> tuple[Settings, Config, Limits]:
    """The settings, the policy's config (a run's own, or --model's) and the limits that the flags ask for."""
    config = train.stored_config(args.run) if args.run else Config(model=args.model, quantize=args.quantize)
    try:
        limits = replace(config.limits, **train.given(args, Limits))
        replace(config, limits=limits)  # checks them
        return Settings(**train.given(args, Settings)), config, limits
    except ValueError as error:
        parser.error(str(error))


def load_policy(run: Path | None, config: Config, device: str = "auto") -> tuple[Policy, dict, str]:
    """The policy, with the newest complete adapters of ``run`` -> it, what to record about it, and its short name.

    It computes in the run's number type, on a device of this machine, which need not be the one it was trained on.
    """
    facts = {"model": config.model, "quantize": config.quantize, "step": 0}
    steps = [RunLog(run).last_checkpoint(role) or 0 for role in ROLES] if run else [0]
    facts["step"] = min(steps)  # a run that was stopped may have updated one role only
    if run and not facts["step"]:
        raise LogError(f"{run} has no adapters of both roles yet: train it first, or evaluate its base with --model")
    policy = train.load_policy(config, devices(device, device)[0], ROLES)
    for role in ROLES if run else ():
        policy.load_adapter(role, RunLog(run).checkpoint(role, facts["step"]))
    name = f"step-{facts['step']:06d}" if run else f"untrained-{Path(config.model).name}"
    return policy, facts, name


def default_out(run: Path | None, name: str, benchmark: str, settings: Settings) -> Path:
    folder = f"{name}-{benchmark}-{settings.split}-T{settings.temperature:g}-seed{settings.seed}"
    return (run / "evaluations" if run else Path("runs")) / folder


def show(screen, found: Results, submission: Path | None) -> None:
    """The tables, the remarks, and the submission if one is asked for."""
    for header, rows in results.tables(found):
        print()
        display.print_table(screen, header, rows)
    print()
    for text in results.remarks(found):
        print(text)
    if submission:
        print(results.submission(found, submission))


if __name__ == "__main__":
    sys.exit(main())
