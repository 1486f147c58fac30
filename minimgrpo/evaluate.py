"""Evaluate a team on a benchmark: ``python -m minimgrpo.evaluate RUN``, or ``--model NAME`` for an untrained one.

    python -m minimgrpo.evaluate runs/mine                                        the Atlas, validation split
    python -m minimgrpo.evaluate runs/mine --benchmark gaia --data data/GAIA --attempts 4
    python -m minimgrpo.evaluate --model atlas-lm --temperature 0
    python -m minimgrpo.evaluate --report OUT                                     the tables again, without a model
    python -m minimgrpo.evaluate --compare OUT_A OUT_B                            two policies on the same tasks

OUT gets ``config.json``, one JSON line per finished attempt in ``attempt-00/batch-0001.jsonl``, ..., and
``summary.json``. Every batch is published by one rename, so a kill loses at most the batch that was running, and the
same command again does what is missing: attempts that are not there, and those that ended in an error. It refuses to
continue with anything that changes the answers (another adapter, temperature, corpus, ...): ``config_hash`` is over all
of it. Select checkpoints on the validation split, and touch the test split once.

What happens to an attempt is one of: it ended by itself (status "ok": with an answer, or by the limit or format fault
that ``stop_reason`` names), it ran out of ``--timeout`` ("timeout"), or something raised ("error"). The last is the one
place where any exception is caught: an evaluation of hours must not end by one task, and every such task stays in the
denominator, is wrong, and has a column of its own. An error in a batch is narrowed down by halving the batch.

Agents see the question and the names of its attachments, nothing else. ``attempt``, ``by_group`` and ``summarise`` are
the demo's evaluation: sampled and greedy on the Atlas, with what training rewards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from minimgrpo import display

with display.interruptible():  # torch and transformers take seconds to import
    import torch

    from minimgrpo import agents, benchmarks, corpus, log, metrics, results, train
    from minimgrpo.agents import Limits, SubTask, generator
    from minimgrpo.benchmarks import Benchmark, Task
    from minimgrpo.chat import Chat
    from minimgrpo.experts import Rubric
    from minimgrpo.judge import Judge, endpoint, local
    from minimgrpo.log import LogError, RunLog
    from minimgrpo.policy import Policy, describe
    from minimgrpo.protocol import ROLES
    from minimgrpo.results import Results
    from minimgrpo.scorer import wilson
    from minimgrpo.servers import Config, reward_executor, reward_planner
    from minimgrpo.tools import ToolResult, Tools
    from minimgrpo.trajectory import Rollout, Trajectory

GRADERS = {
    "gaia": "the GAIA scorer",
    "exact": "exact match (normalised)",
    "squad": "exact match and F1 (SQuAD's rules)",
    "hotpotqa": "exact match and F1 (HotpotQA's rules)",
}


# ---------------------------------------------------------------------------------------------------- the demo's own


@dataclass
class Evaluation:
    """One attempt at each question: ``rollouts`` in the questions' order, and the numbers."""

    rollouts: list[Rollout]
    numbers: dict


def attempt(
    policy: Policy, tools: Tools, questions: list, temperature: float, seed: int, limits: Limits, batch: int = 160
) -> Evaluation:
    """Let the team answer each question once; ``batch`` questions at a time (it bounds the memory)."""
    rollouts: list[Rollout] = []
    for start in range(0, len(questions), batch):
        some = questions[start : start + batch]
        rollouts += team_rollouts(policy, tools, some, limits, temperature, (seed, "evaluate", start))
    planned, executed = [r.planner for r in rollouts], [call for r in rollouts for call in r.calls]
    reward_planner(planned, questions)
    reward_executor(executed, {(t.question_id, 0): t.reward_parts["correct"] for t in planned}, Rubric())
    return Evaluation(rollouts, metrics.team(questions, planned, executed))


def team_rollouts(
    policy: Policy,
    tools: Tools,
    questions: list,
    limits: Limits,
    temperature: float,
    key: tuple,
    deadline: float | None = None,
) -> list[Rollout]:
    """One rollout of each question, in order, as one batch. ``key`` is what its random numbers depend on."""
    executed: list[Trajectory] = []

    def delegate(turn: int, sub_tasks: list[SubTask]) -> list[ToolResult]:
        draws = generator(*key, "executor", turn)
        done = agents.execute(policy, tools, sub_tasks, limits, temperature, draws, deadline)
        executed.extend(done)
        return [agents.report(t) for t in done]

    planned = agents.plan(policy, questions, 1, delegate, limits, temperature, generator(*key, "planner"), deadline)
    calls: dict[str, list] = {}
    for trajectory in sorted(executed, key=lambda t: t.call):
        calls.setdefault(trajectory.question_id, []).append(trajectory)
    return [Rollout(t, calls.get(t.question_id, [])) for t in planned]


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


# ------------------------------------------------------------------------------------------------------------ the loop


@dataclass(frozen=True)
class Settings:
    """What one evaluation is, beside its policy and its benchmark."""

    split: str = "validation"
    "validation or test (a benchmark that comes as one file ignores it in all but name)"
    temperature: float = 1.0
    "sampling temperature; 0: always the likeliest token"
    seed: int = 0
    "seeds the sampling"
    attempts: int = 1
    "k, attempts at each task (for avg@k and pass@k)"
    batch: int = 32
    "tasks that run at once: bounds the memory, and is what a kill can lose"
    timeout: float = 0.0
    "seconds a batch may take; who still wants to write then is a time-out (0: no limit)"
    threads: int = 2
    "CPU threads"

    def __post_init__(self):
        for problem, message in (
            (self.split not in ("validation", "test"), f"split is validation or test, not {self.split!r}"),
            (not 0 <= self.temperature < 100, f"the temperature cannot be {self.temperature}"),
            (self.attempts < 1, f"at least 1 attempt, not {self.attempts}"),
            (self.batch < 1, f"a batch needs at least 1 task, not {self.batch}"),
            (not self.timeout >= 0, f"the timeout cannot be negative: {self.timeout}"),
            (self.threads < 1, f"at least 1 thread, not {self.threads}"),
            (
                self.attempts > 1 and self.temperature == 0,
                "at temperature 0 all attempts are the same: leave out --attempts, or sample",
            ),
        ):
            if problem:
                raise ValueError(message)


def evaluate(
    policy: Policy,
    tools: Tools,
    benchmark: Benchmark,
    settings: Settings,
    limits: Limits,
    facts: dict,
    root: Path,
    judge: Judge | None = None,
) -> Results:
    """Do what is missing in ``root``, batch by batch, printing progress -> everything that stands there then.

    ``facts`` is more that the answers depend on (the policy's name, the corpus). ``judge`` decides where an answer is
    no exact match (benchmarks graded "exact" only). Raises LogError when ``root`` holds an evaluation with another
    configuration.
    """
    grader = GRADERS[benchmark.grader] + (f", else the judge {judge.name}" if judge else "")
    config = open_evaluation(root, policy, tools, benchmark, settings, limits, facts | {"grader": grader})
    found = results.read(root)
    slices = [
        (number, start // settings.batch + 1, benchmark.tasks[start : start + settings.batch])
        for number in range(settings.attempts)
        for start in range(0, len(benchmark.tasks), settings.batch)
    ]

    def missing(number: int, some: list[Task]) -> list[Task]:
        done = {task for (task, a), record in found.records.items() if a == number and record["status"] != "error"}
        return [task for task in some if task.task_id not in done]

    pending = [(number, index, todo) for number, index, some in slices if (todo := missing(number, some))]
    progress = Progress(found, len(benchmark.tasks) * settings.attempts, sum(len(todo) for *_, todo in pending))
    for number, index, todo in pending:
        started = time.perf_counter()
        deadline = time.monotonic() + settings.timeout if settings.timeout else None
        key = (settings.seed, "evaluate", number)
        attempted = robustly(policy, tools, todo, limits, settings.temperature, key, deadline)
        seconds = (time.perf_counter() - started) / len(todo)
        records = [
            record(task, number, rollout, seconds, benchmark.grader, config)
            for task, rollout in zip(todo, attempted, strict=True)
        ]
        if judge:
            decide(judge, todo, records)
        log.publish(batch_file(root, number, index), records)
        progress.update(records)
    return results.read(root)


def batch_file(root: Path, number: int, index: int) -> Path:
    """The next file of a batch that does not exist: errors that are tried again go to a file of their own."""
    folder = root / f"attempt-{number:02d}"
    path, again = folder / f"batch-{index:04d}.jsonl", 0
    while path.exists():
        again += 1
        path = folder / f"batch-{index:04d}.retry-{again:02d}.jsonl"
    return path


def open_evaluation(
    root: Path, policy: Policy, tools: Tools, benchmark: Benchmark, settings: Settings, limits: Limits, facts: dict
) -> dict:
    """Create ``config.json`` in ``root``, or find the same there -> the config, with its ``config_hash``."""
    config = {
        "benchmark": benchmark.name,
        **{name: value for name, value in asdict(settings).items() if name != "attempts"},  # more can be added later
        "limits": asdict(limits),
        **facts,
        "base": digest(policy.model.get_input_embeddings().weight),
        "adapters": {role: digest(*policy.parameters(role).values()) for role in ROLES},
        "prompts": digest(*policy.chat.prompts.values()),
        "tools": {"page_chars": tools.page_chars, "max_output": tools.max_output, "k": tools.k},
        "files": digest(*(hashlib.sha256(p.read_bytes()).hexdigest() for p in benchmark.files.values())),
        "tasks": digest(*(repr((t.task_id, t.question, t.level, t.answers)) for t in benchmark.tasks)),
        "task_ids": [task.task_id for task in benchmark.tasks],
    }
    config["config_hash"] = digest(json.dumps(config, sort_keys=True))
    if (root / "config.json").exists():
        stored = results.read_config(root)
        differing = [n for n in config if n != "config_hash" and stored.get(n) != config[n]]
        if differing:
            raise LogError(f"{root} holds an evaluation with another {', '.join(differing)}: choose another --out")
        return stored
    train.refuse_existing(root)
    log.publish_text(root / "config.json", json.dumps(config, indent=1) + "\n")
    return config


def digest(*parts) -> str:
    """The first 16 hex digits of a SHA-256 over texts or tensors."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().contiguous().view(torch.uint8).numpy()
        else:
            part = part.encode("utf-8", "backslashreplace") + b"\0"
        whole.update(part)
    return whole.hexdigest()[:16]


def robustly(
    policy: Policy,
    tools: Tools,
    some: list[Task],
    limits: Limits,
    temperature: float,
    key: tuple,
    deadline: float | None,
) -> list[Rollout | Exception]:
    """A batch's rollouts, in order; where one raises, its exception. Only the tasks that are to blame are lost."""
    try:
        return team_rollouts(policy, tools, some, limits, temperature, (*key, some[0].task_id, len(some)), deadline)
    except Exception as error:
        if len(some) == 1:
            return [error]
        half = len(some) // 2
        return [
            rollout
            for part in (some[:half], some[half:])
            for rollout in robustly(policy, tools, part, limits, temperature, key, deadline)
        ]


def record(task: Task, number: int, rollout: Rollout | Exception, seconds: float, grader: str, config: dict) -> dict:
    """One finished attempt as a line of the log. ``correct`` is None where there is no gold answer to grade by."""
    failed = isinstance(rollout, Exception)
    planner = Trajectory("planner", task.task_id, number) if failed else rollout.planner
    calls = [] if failed else rollout.calls
    timeout = planner.stop_reason == "timeout"
    answered = planner.format_ok
    if not task.answers:
        verdict = {"correct": None}
    elif not answered:
        verdict = {"correct": False} | ({"f1": 0.0} if grader in ("squad", "hotpotqa") else {})
    else:
        verdict = benchmarks.grade(grader, planner.result, task.answers)
    both = [planner, *calls]
    return {
        "task_id": task.task_id,
        "attempt": number,
        "level": task.level,
        "prediction": planner.result if answered else None,
        **verdict,
        "status": "error" if failed else "timeout" if timeout else "ok",
        "error": blame(rollout) if failed else None,
        "stop_reason": planner.stop_reason,
        "seconds": round(seconds, 4),
        "tokens": {"planner": tokens([planner]), "executor": tokens(calls)},
        "turns": sum(message["role"] == "assistant" for t in both for message in t.messages),
        "tool_calls": sum(len(t.tool_calls) for t in both),
        "grader": config["grader"],
        "config_hash": config["config_hash"],
        "messages": {"planner": planner.messages, "executor": [t.messages for t in calls]},
    }


def decide(judge: Judge, some: list[Task], records: list[dict]) -> None:
    """Let the judge decide on the answers that are no exact match; an unreadable verdict makes them ungraded."""
    unsure = [
        (task, row)
        for task, row in zip(some, records, strict=True)
        if row["correct"] is False and row["prediction"] is not None
    ]
    cases = [(task.question, task.answers, row["prediction"]) for task, row in unsure]
    for (_, row), verdict in zip(unsure, judge.verdicts(cases), strict=True):
        row["correct"] = verdict


def tokens(trajectories: list[Trajectory]) -> dict[str, int]:
    """What an agent read and wrote, every one of its conversations included; the cache reads a token once."""
    wrote = sum(t.sampled for t in trajectories)
    return {"in": sum(len(t.token_ids) for t in trajectories) - wrote, "out": wrote}


def blame(error: Exception) -> str:
    """One line: the exception, and where in the code it was raised."""
    [*_, frame] = traceback.extract_tb(error.__traceback__) or [None]
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + place


class Progress:
    """A line of plain text after a batch (about twenty in all): how far, how many right, how long still."""

    def __init__(self, found: Results, total: int, left: int):
        self.total, self.left, self.fresh, self.started = total, left, 0, time.perf_counter()
        done = [r for r in found.records.values() if r["status"] != "error"]
        self.right, self.errors = sum(r["correct"] is True for r in done), 0
        if done:
            print(f"{total - left} of {total} attempts are there already")

    def update(self, records: list[dict]) -> None:
        before = self.fresh * 20 // max(1, self.left)
        self.fresh += len(records)
        self.right += sum(r["correct"] is True for r in records)
        self.errors += sum(r["status"] == "error" for r in records)
        if self.fresh * 20 // self.left > before:
            rest = self.left - self.fresh
            seconds = int(rest * (time.perf_counter() - self.started) / self.fresh)
            errors = f", {self.errors} errors" if self.errors else ""
            done = f"{self.total - rest}/{self.total} attempts"
            print(f"{done}, {self.right} right{errors}, {seconds // 60}:{seconds % 60:02d} left", flush=True)


# --------------------------------------------------------------------------------------------------------- the command


class Parser(argparse.ArgumentParser):
    """The flags; a wrong one is answered with one sentence."""

    def __init__(self):
        super().__init__(
            prog="minimgrpo.evaluate",
            description="Evaluate a planner and an executor on a benchmark.",
            allow_abbrev=False,
        )
        add = self.add_argument
        add("run", type=Path, nargs="?", metavar="RUN", help="a trained run: its newest adapters are evaluated")
        add("--model", help="an untrained team instead: atlas-lm, a folder, or a hub name")
        add("--quantize", default="nf4", help="base weights of --model: nf4, int8 or none (nf4)")
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
        for owner in (Settings, Limits):
            for name, text in train.field_help(owner).items():
                kind = type(getattr(owner, name))
                default = "the run's" if owner is Limits else getattr(owner, name)
                add(
                    "--" + name.replace("_", "-"),
                    type=kind,
                    default=argparse.SUPPRESS,
                    metavar=kind.__name__.upper(),
                    help=f"{text} ({default})".replace("%", "%%"),
                )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def main(argv: list[str] | None = None) -> int:
    parser = Parser()
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if sum(map(bool, (args.run, args.model, args.report, args.compare))) != 1:
        parser.error("name one thing: a RUN, --model, --report or --compare")
    if args.judge_url and not args.judge:
        parser.error("--judge-url needs the name of the model there: --judge MODEL")
    again = f"python -m minimgrpo.evaluate {shlex.join(map(str, argv))}"
    root, code = args.out or args.report or Path("."), 0

    def run() -> None:
        nonlocal root, code
        screen = display.console()
        if args.compare:
            return print("\n".join(results.compared(*map(results.read, args.compare))))
        if args.report:
            return show(screen, results.read(args.report), args.submission)
        settings, config, limits = chosen(parser, args)
        torch.set_num_threads(settings.threads)
        benchmark = benchmarks.load(args.benchmark, settings.split, args.data)
        if args.judge and benchmark.grader != "exact":
            parser.error(f"{args.benchmark} is graded by {GRADERS[benchmark.grader]}: leave out --judge")
        policy, facts, name = load_policy(args.run, config)
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
        try:
            found = evaluate(policy, tools, benchmark, settings, limits, facts, root, judge)
        except KeyboardInterrupt:
            print(f"\nStopped. Whole batches are saved in {root}; the same command continues:\n  {again}")
            raise SystemExit(130) from None
        summary = results.summary(found)
        (root / "summary.json").unlink(missing_ok=True)  # of fewer attempts
        log.publish_text(root / "summary.json", json.dumps(summary, indent=1) + "\n")
        show(screen, found, args.submission)
        code = int(summary["all"]["errors"] > 0)

    return train.guarded(run, root, again) or code


def chosen(parser: Parser, args: argparse.Namespace) -> tuple[Settings, Config, Limits]:
    """The settings, the policy's config (a run's own, or --model's) and the limits that the flags ask for."""

    def given(owner: type) -> dict:
        return {f.name: getattr(args, f.name) for f in fields(owner) if hasattr(args, f.name)}

    config = train.stored_config(args.run) if args.run else Config(model=args.model, quantize=args.quantize)
    try:
        limits = replace(config.limits, **given(Limits))
        replace(config, limits=limits)  # checks them
        return Settings(**given(Settings)), config, limits
    except ValueError as error:
        parser.error(str(error))


def load_policy(run: Path | None, config: Config) -> tuple[Policy, dict, str]:
    """The policy, with the newest complete adapters of ``run`` -> it, what to record about it, and its short name."""
    facts = {"model": config.model, "quantize": config.quantize, "step": 0}
    steps = [RunLog(run).last_checkpoint(role) or 0 for role in ROLES] if run else [0]
    facts["step"] = min(steps)  # a run that was stopped may have updated one role only
    if run and not facts["step"]:
        raise LogError(f"{run} has no adapters of both roles yet: train it first, or evaluate its base with --model")
    policy = Policy.load(config.model, config.quantize, config.rank, config.alpha, seed=config.seed)
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
