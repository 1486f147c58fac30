"""What an evaluation found: its folder read back, the table, the comparison of two, GAIA's submission file.

An evaluation's folder (``minimgrpo.evaluate`` writes it) is ``config.json`` and ``attempt-00/batch-0001.jsonl``, ...:
one record a line, each file published once by a rename. A later file of a batch holds its repeated errors.

How the numbers are made:

* avg@k: the mean over the tasks of the share of right attempts. Errors and time-outs count as wrong, and have columns
  of their own. What nobody could grade (no gold answer, an unreadable verdict) is neither right nor wrong: it is
  counted as ungraded, left out, and said so. A task of which something was left out still counts as one task.
* the 95 % interval: Wilson's with one attempt a task; with several a bootstrap over tasks, since attempts at one task
  resemble each other. (Where every task has the same score a bootstrap sees no spread: then Wilson's over the tasks.)
* pass@k: the unbiased estimate of ``scorer.pass_at_k``.
* a comparison is paired: the difference on each task, a bootstrap over tasks, and an exact sign test on the tasks that
  differ (with one attempt a task: McNemar's exact test).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minimgrpo import log
from minimgrpo.log import LogError
from minimgrpo.scorer import pass_at_k, wilson
from minimgrpo.tasks import DataError

RESAMPLES = 10_000
FIELDS = ("task_id", "attempt", "level", "prediction", "correct", "status", "stop_reason", "seconds", "tokens", "turns")


@dataclass(frozen=True)
class Results:
    """``records`` by (task_id, attempt); ``torn``: last lines that were cut off; ``stale``: of another config."""

    root: Path
    config: dict
    records: dict[tuple[str, int], dict]
    torn: int
    stale: int

    @property
    def attempts(self) -> int:
        """k: attempts at each task (what an unfinished evaluation lacks of them is in ``missing``)."""
        return 1 + max((attempt for _, attempt in self.records), default=0)

    @property
    def missing(self) -> int:
        return len(self.config["task_ids"]) * self.attempts - len(self.records)


def read(root: str | Path) -> Results:
    """Read a folder. A torn last line is ignored and counted; other damage is a LogError that names the line."""
    root = Path(root)
    config = read_config(root)
    known, records, torn, stale = set(config["task_ids"]), {}, 0, 0
    for path in sorted(root.glob("attempt-*/batch-*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        torn += bool(lines[-1])
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line.decode("utf-8"))
                key = record["task_id"], record["attempt"]
                if missing := [name for name in FIELDS if name not in record]:
                    raise ValueError(f"no {missing[0]}")
            except (ValueError, TypeError, KeyError) as error:
                raise LogError(f"{path} is damaged in line {number} ({error}): remove it and run again") from None
            if record["config_hash"] != config["config_hash"] or key[0] not in known:
                stale += 1
            else:
                records[key] = record  # of a repeated attempt the later file counts
    return Results(root, config, records, torn, stale)


def read_config(root: Path) -> dict:
    """Its ``config.json``. Raises LogError when there is none or it is damaged."""
    path = Path(root) / "config.json"
    if not path.is_file():
        raise LogError(f"{root} holds no evaluation (no config.json): name the --out of one")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config["task_ids"], list) or not isinstance(config["config_hash"], str):
            raise ValueError("not an evaluation's")
    except (ValueError, TypeError, KeyError):
        raise LogError(f"{path} is damaged or not an evaluation's: name the --out of one") from None
    return config


# ------------------------------------------------------------------------------------------------------------- numbers


def by_task(records: list[dict]) -> dict[str, list[bool]]:
    """task -> its graded attempts, right or wrong; a task without any is not there."""
    flags: dict[str, list[bool]] = {}
    for record in records:
        if record["correct"] is not None:
            flags.setdefault(record["task_id"], []).append(record["correct"])
    return flags


def measure(records: list[dict], k: int) -> dict:
    """The numbers of some records, at ``k`` attempts a task. What cannot be said is None."""
    flags = by_task(records)
    means = [sum(f) / len(f) for f in flags.values()]
    counts = Counter(record["status"] for record in records)
    whole = bool(flags) and all(len(f) >= k for f in flags.values())  # pass@k refuses tasks with fewer attempts
    f1 = [record["f1"] for record in records if record.get("f1") is not None]
    return {
        "tasks": len({record["task_id"] for record in records}),
        "n": len(records),
        "correct": sum(map(sum, flags.values())),
        "errors": counts["error"],
        "timeouts": counts["timeout"],
        "no_answer": sum(r["status"] == "ok" and r["stop_reason"] != "result" for r in records),
        "ungraded": sum(record["correct"] is None for record in records),
        "avg": sum(means) / len(means) if means else None,
        "ci95": interval(list(flags.values())) if flags else None,
        "pass": sum(pass_at_k(len(f), sum(f), k) for f in flags.values()) / len(flags) if whole else None,
        "f1": sum(f1) / len(f1) if f1 else None,
        "seconds": sum(record["seconds"] for record in records) / len(records) if records else None,
        "turns": sum(record["turns"] for record in records) / len(records) if records else None,
        "tool_calls": sum(record["tool_calls"] for record in records) / len(records) if records else None,
        "tokens": {
            role: {
                way: sum(record["tokens"][role][way] for record in records) / len(records) if records else None
                for way in ("in", "out")
            }
            for role in ("planner", "executor")
        },
    }


def interval(flags: list[list[bool]]) -> list[float]:
    """The 95 % interval of the mean over tasks (see the module's docstring).

    >>> [round(100 * x, 1) for x in interval([[True]] * 8 + [[False]] * 18)]
    [16.5, 50.0]
    """
    means = [sum(f) / len(f) for f in flags]
    if all(len(f) == 1 for f in flags) or min(means) == max(means):
        return list(wilson(round(sum(means)), len(means)))
    return bootstrap(means)


def bootstrap(values: list[float]) -> list[float]:
    """The 2.5 % and 97.5 % quantiles of the mean over tasks drawn again with replacement; the same every time."""
    values = np.asarray(values, dtype=float)
    draws = np.random.default_rng(0)
    size = max(1, 2_000_000 // len(values))  # means at a time: bounds the memory
    means = [
        values[draws.integers(0, len(values), (min(size, RESAMPLES - done), len(values)))].mean(1)
        for done in range(0, RESAMPLES, size)
    ]
    return [float(x) for x in np.quantile(np.concatenate(means), (0.025, 0.975))]


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of ``wins`` against ``losses`` when both are as likely.

    >>> sign_test(0, 0), sign_test(5, 0), round(sign_test(8, 2), 4)
    (1.0, 0.0625, 0.1094)
    """
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


def summary(results: Results) -> dict:
    """What ``summary.json`` holds: the numbers over all tasks and for each level, and what they are about."""
    records, k = list(results.records.values()), results.attempts
    levels = sorted({record["level"] for record in records})
    return {
        **{name: results.config[name] for name in ("benchmark", "split", "grader", "config_hash")},
        "attempts": k,
        "missing": results.missing,
        "all": measure(records, k),
        "levels": {level: measure([r for r in records if r["level"] == level], k) for level in levels},
    }


# -------------------------------------------------------------------------------------------------------------- a page


def tables(results: Results) -> list[tuple[list[str], list[list[str]]]]:
    """Two tables (header, rows) for ``display.print_table``: how many were right, and what an attempt cost."""
    found = summary(results)
    groups = {"all": found["all"]} | {f"level {level}": m for level, m in found["levels"].items() if level != "all"}
    k = found["attempts"]
    right = ["%", "n", "right", "errors", "time-outs", "no answer", "ungraded", f"avg@{k} [95 %]"]
    cost = ["an attempt", "planner in", "out", "executor in", "out", "messages", "calls", "seconds"]
    some_f1 = found["all"]["f1"] is not None
    right += ([f"pass@{k}"] if k > 1 else []) + (["F1"] if some_f1 else [])
    right_rows, cost_rows = [], []
    for name, m in groups.items():
        counts = [m[c] for c in ("n", "correct", "errors", "timeouts", "no_answer", "ungraded")]
        row = [name, *map(str, counts), rate(m)]
        right_rows.append(row + ([percent(m["pass"])] if k > 1 else []) + ([percent(m["f1"])] if some_f1 else []))
        tokens = [m["tokens"][role][way] for role in ("planner", "executor") for way in ("in", "out")]
        numbers = [*(f"{x:.0f}" for x in tokens), f"{m['turns']:.1f}", f"{m['tool_calls']:.1f}", f"{m['seconds']:.2f}"]
        cost_rows.append([name, *numbers])
    return [(right, right_rows), (cost, cost_rows)] if results.records else []


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def rate(m: dict) -> str:
    if m["avg"] is None:
        return "-"
    return f"{percent(m['avg'])} [{percent(m['ci95'][0])}, {percent(m['ci95'][1])}]"


def remarks(results: Results) -> list[str]:
    """Sentences that belong under the table: what was measured how, and what to be careful about."""
    config, m, k = results.config, measure(list(results.records.values()), results.attempts), results.attempts
    out = [
        f"{config['benchmark']} {config['split']}, {len(config['task_ids'])} tasks, {k} attempt{'s' * (k > 1)} each, "
        f"T={config['temperature']}; graded by {config['grader']}; corpus: {config['corpus']}. Tokens, messages, calls "
        f"and seconds are means over attempts (seconds: an attempt's share of its batch).",
    ]
    if results.missing:
        out.append(f"UNFINISHED: {results.missing} attempts are not there yet; run the same command again.")
    if m["errors"]:
        first = next(r["error"] for r in results.records.values() if r["status"] == "error")
        out.append(f"{m['errors']} attempts ended in an error and count as wrong, the first: {first}")
    if m["ungraded"]:
        text = f"{m['ungraded']} attempts are ungraded (no gold answer or no readable verdict) and not in the rates"
        if m["avg"] is not None:
            low, high = m["correct"] / m["n"], (m["correct"] + m["ungraded"]) / m["n"]
            text += f"; if all were wrong: {percent(low)} %, if all were right: {percent(high)} %"
        out.append(text + ".")
    if k > 1 and m["pass"] is None and m["avg"] is not None:
        out.append(f"No pass@{k}: some task has fewer than {k} graded attempts.")
    if results.torn or results.stale:
        out.append(f"Ignored: {results.torn} torn last lines, {results.stale} records of another configuration.")
    return out


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(a: Results, b: Results) -> dict:
    """B minus A on the same tasks. Raises DataError when tasks or graders differ, or nothing can be compared.

    Tasks that one of the two could not grade are left out and counted in ``left_out``.
    """
    for name, what in (("task_ids", "tasks"), ("tasks", "tasks"), ("grader", "graders")):
        if a.config[name] != b.config[name]:
            raise DataError(f"{a.root} and {b.root} have different {what}: only the same can be compared in pairs.")
    flags = [by_task(list(results.records.values())) for results in (a, b)]
    shared = [task for task in a.config["task_ids"] if task in flags[0] and task in flags[1]]
    if not shared:
        raise DataError(f"{a.root} and {b.root} have no task that both graded.")
    means = [[sum(f[task]) / len(f[task]) for task in shared] for f in flags]
    differences = [y - x for x, y in zip(*means, strict=True)]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return {
        "tasks": len(shared),
        "left_out": len(a.config["task_ids"]) - len(shared),
        "a": sum(means[0]) / len(shared),
        "b": sum(means[1]) / len(shared),
        "difference": sum(differences) / len(shared),
        "ci95": bootstrap(differences),
        "better": wins,
        "worse": losses,
        "equal": len(shared) - wins - losses,
        "p": sign_test(wins, losses),
        "differ_in": [
            name
            for name in a.config
            if name not in ("config_hash", "task_ids") and a.config[name] != b.config.get(name)
        ],
    }


def compared(a: Results, b: Results) -> list[str]:
    """The comparison as sentences."""
    c = compare(a, b)
    low, high = (f"{100 * x:+.1f}" for x in c["ci95"])
    out = [
        f"A {a.root}: {percent(c['a'])} %    B {b.root}: {percent(c['b'])} %    on the same {c['tasks']} tasks",
        f"B - A: {100 * c['difference']:+.1f} points, 95 % interval [{low}, {high}] (bootstrap over tasks, paired)",
        f"B is better on {c['better']} tasks, worse on {c['worse']}, equal on {c['equal']}; "
        f"sign test p = {c['p']:.3g} (exact, two-sided)",
        f"They differ in: {', '.join(c['differ_in']) or 'nothing that the configuration knows'}.",
    ]
    if c["left_out"]:
        out.append(f"{c['left_out']} tasks are left out: A or B has no graded attempt at them.")
    for results in (a, b):
        out += [f"{results.root}: {text}" for text in remarks(results)[1:]]
    return out


# ---------------------------------------------------------------------------------------------------------- submission


def submission(results: Results, path: Path) -> str:
    """Write GAIA's leaderboard file, every task exactly once -> a sentence about it. Raises DataError if it cannot be.

    An attempt that ended without an answer is submitted as ""; an error is not: run the evaluation again first.
    """
    config, records = results.config, results.records
    if config["benchmark"] != "gaia":
        raise DataError(f"a submission is GAIA's format, and {results.root} is an evaluation of {config['benchmark']}.")
    if results.attempts > 1:
        raise DataError(f"{results.root} has {results.attempts} answers to each task, and a submission takes one.")
    lacking = [task for task in config["task_ids"] if (task, 0) not in records]
    failed = [task for task, _ in records if records[task, 0]["status"] == "error"]
    for tasks, what in ((lacking, "are not there"), (failed, "ended in an error")):
        if tasks:
            raise DataError(f"{len(tasks)} of {len(config['task_ids'])} tasks {what}: run the evaluation again first.")
    if path.exists():
        raise DataError(f"{path} exists: name another file for the submission.")
    answers = [(task, records[task, 0]["prediction"] or "") for task in config["task_ids"]]
    log.publish(path, ({"task_id": task, "model_answer": answer} for task, answer in answers))
    empty = sum(not answer for _, answer in answers)
    return f"{path}: {len(answers)} answers, {empty} of them empty, in GAIA's leaderboard format."
