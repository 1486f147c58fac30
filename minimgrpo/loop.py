"""The evaluation loop: tasks in batches, one record for every attempt, resumed where it was stopped.

Every batch is published by one rename (``log``), so a kill loses at most the batch that was running, and the same call
again does what is missing: attempts that are not there, and those that ended in an error. It refuses to continue with
anything that changes the answers (another adapter, temperature, corpus, ...): ``config_hash`` is over all of it.

What happens to an attempt is one of: it ended by itself (status "ok": with an answer, or by the limit or format fault
that ``stop_reason`` names), it ran out of time ("timeout"), or something raised ("error"). The last is the one place
where any exception is caught: an evaluation of hours must not end by one task, and every such task stays in the
denominator, is wrong, and has a column of its own. An error in a batch is narrowed down by halving the batch.

Agents see the question and the names of its attachments, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from minimgrpo import benchmarks, log, results, train
from minimgrpo.agents import Limits, team_rollouts
from minimgrpo.benchmarks import Benchmark, Task
from minimgrpo.judge import Judge
from minimgrpo.log import LogError
from minimgrpo.policy import Policy
from minimgrpo.protocol import ROLES
from minimgrpo.results import Results
from minimgrpo.tools import Tools
from minimgrpo.trajectory import Rollout, Trajectory

GRADERS = {
    "gaia": "the GAIA scorer",
    "exact": "exact match (normalised)",
    "squad": "exact match and F1 (SQuAD's rules)",
    "hotpotqa": "exact match and F1 (HotpotQA's rules)",
}


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
