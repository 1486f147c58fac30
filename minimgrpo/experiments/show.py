"""A study's results as a table, a figure, and the JSON that is kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from minimgrpo.experiments.studies import LOADS, MEASURES, NUMBERS, STUDIES, Study, curve
from minimgrpo.experiments.verdicts import Found, judge, t_interval
from minimgrpo.log import LogError

Results = dict[str, list[dict]]
"""Arm -> the result of each seed."""


def judged(study: Study, results: Results) -> list[Found]:
    """What was found about each of the study's claims, in order."""
    found = []
    for claim in study.claims:
        found.append(judge(values(results, claim.a), values(results, claim.b), claim.relation))
    return found


def values(results: Results, side: tuple[str, ...]) -> list[float]:
    """One side of a claim, for each seed (see ``studies.Claim``)."""
    arm, measure, *other = side
    found = [MEASURES[measure](run) for run in results[arm]]
    if other:
        return [x - MEASURES[measure](run) for x, run in zip(found, results[other[0]], strict=True)]
    return found


def table(study: Study, results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows: an arm's mean over the seeds; accuracies ± half of the 95 % interval. Shares in percent."""
    rows = []
    for arm, runs in results.items():
        cells = []
        for name in study.columns:
            found = [MEASURES[name](run) for run in runs]
            if any(value is None for value in found):
                cells.append("-")
                continue
            unit = 1 if name in NUMBERS else 100
            mean, low, _ = t_interval([unit * value for value in found])
            text = f"{mean:.{int(name in NUMBERS)}f}"
            if name in ("T=1", "greedy"):
                text += f" ±{mean - low:.0f}"
            cells.append(text)
        rows.append([arm, *cells])
    return [study.name, *study.columns], rows


def verdict_table(study: Study, found: list[Found]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: claim, difference with its interval, p, verdict."""
    rows = []
    for claim, f in zip(study.claims, found, strict=True):
        unit, digits = (1, 1) if claim.a[1] in NUMBERS else (100, 0)
        numbers = (f"{unit * x:+.{digits}f}" for x in (f.difference, f.low, f.high))
        rows.append([claim.text, "{} [{}, {}]".format(*numbers), f"{f.p:.3f}", f.verdict])
    return ["claim", "difference [95 %]", "p", "verdict"], rows


def kept(study: Study, results: Results, found: list[Found], protocol: dict, extra: dict) -> dict:
    """What ``data/results/NAME.json`` holds: every seed's numbers, and of the training what a claim is about.

    A run's setting is given as what differs from the protocol's ``base_setting``.
    """
    header, rows = table(study, results)
    return {
        "experiment": study.name,
        "title": study.title,
        "protocol": protocol,
        "claims": [
            {"claim": c.text, "a": c.a, "relation": c.relation, "b": c.b, **{k: _short(v) for k, v in vars(f).items()}}
            for c, f in zip(study.claims, found, strict=True)
        ],
        "table": {"columns": header, "rows": rows},
        "verdicts": dict(zip(("columns", "rows"), verdict_table(study, found), strict=True)),
        **extra,
        "runs": {
            arm: [_kept_of(run, protocol["base_setting"], study.name == "order") for run in runs]
            for arm, runs in results.items()
        },
    }


def _kept_of(run: dict, base: dict, whole: bool) -> dict:
    """One run; without its history, unless ``whole``, but for the accuracies in training."""
    setting = run["setting"]
    changed = {name: value for name, value in setting.items() if name != "config" and value != base[name]}
    changed |= {name: value for name, value in setting["config"].items() if value != base["config"][name]}
    rest = {name: value for name, value in run.items() if name != "setting" and (whole or name != "history")}
    accuracies = [round(line["planner"]["correct"], 3) for line in run["history"]]
    return {"seed": setting["config"]["seed"], "changed": changed, **rest, "accuracies": accuracies}


def _short(value):
    return round(value, 4) if isinstance(value, float) else value


def overview(folder: Path) -> str:
    """All claims whose results lie in ``folder``, as a table in Markdown."""
    lines = ["| experiment | claim | difference [95 %] | p | verdict |", "|---|---|---|---|---|"]
    for study in STUDIES:
        path = folder / f"{study.name}.json"
        if path.exists():
            try:
                rows = json.loads(path.read_text(encoding="utf-8"))["verdicts"]["rows"]
            except (ValueError, KeyError, TypeError) as error:
                raise LogError(f"{path} is damaged ({error}): remove it and run again") from None
            lines += [f"| {study.name} | " + " | ".join(row[:-1]) + f" | **{row[-1]}** |" for row in rows]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------------------- figures


def draw(study: Study, results: Results, path: Path, panel: Callable | None = None) -> None:
    """The figure: accuracies of every seed by arm, and training curves; ``panel(axis)`` draws one more."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13 if panel else 10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right, *more = figure.subplots(1, 3 if panel else 2)
    if study.name == "order":
        _draw_shares(left, results)
    elif study.name == "load":
        _draw_load(left, results)
    else:
        _draw_accuracies(left, results)
    if study.name == "order":
        _draw_seeds(right, results)
    else:
        _draw_curves(right, results)
    if panel:
        panel(more[0])
    figure.suptitle(study.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _draw_accuracies(axis, results: Results) -> None:
    for row, runs in enumerate(results.values()):
        for offset, name, colour in ((-0.15, "T=1", "C0"), (0.15, "greedy", "C1")):
            values = [100 * MEASURES[name](run) for run in runs]
            axis.plot(values, [row + offset] * len(values), "o", color=colour, alpha=0.4, markersize=4)
            label = f"{name} (dot: a seed)" if row == 0 else None
            axis.plot(statistics.mean(values), row + offset, "|", color=colour, ms=14, mew=3, label=label)
    axis.set_yticks(range(len(results)), list(results))
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("held-out accuracy, %")
    axis.legend(fontsize="x-small", markerscale=0.5)


def _draw_curves(axis, results: Results) -> None:
    for arm, runs in results.items():
        if curves := [curve(run, "correct") for run in runs if run["history"]]:
            means = [100 * statistics.mean(values) for values in zip(*curves, strict=True)]
            axis.plot(range(1, len(means) + 1), means, label=arm)
    axis.set_xlabel("step")
    axis.set_ylabel("accuracy in training, %")
    axis.set_ylim(0, 100)
    axis.legend(fontsize="x-small")


def _draw_shares(axis, results: Results) -> None:
    (runs,) = results.values()
    for role, name, label in (
        ("planner", "format", "format, planner"),
        ("planner", "correct", "accuracy"),
        ("planner", "puzzle_delegation", "puzzles delegated"),
        ("planner", "lookup_delegation", "look-ups delegated"),
        ("executor", "query_specificity", "specific queries"),
    ):
        curves = [curve(run, name, role) for run in runs]
        means = [100 * statistics.mean(values) for values in zip(*curves, strict=True)]
        axis.plot(range(1, len(means) + 1), means, label=label)
    axis.set_xlabel("step")
    axis.set_ylabel("%")
    axis.legend(fontsize="x-small")


def _draw_seeds(axis, results: Results) -> None:
    (runs,) = results.values()
    for run in runs:
        for name, colour in (("format", "C0"), ("correct", "C1")):
            points = [100 * value for value in curve(run, name)]
            axis.plot(range(1, len(points) + 1), points, color=colour, alpha=0.5, linewidth=1)
    axis.set_xlabel("step (blue: format, orange: accuracy; a line: a seed)")
    axis.set_ylabel("%")
    axis.set_ylim(0, 100)


def _draw_load(axis, results: Results) -> None:
    for who, colour in (("team", "C0"), ("single", "C3")):
        for name, style in (("T=1", "-"), ("greedy", "--")):
            spread = [t_interval([100 * MEASURES[name](r) for r in results[f"{who}, {load}"]]) for load in LOADS]
            means = [mean for mean, *_ in spread]
            half = [high - mean for mean, _, high in spread]
            label = f"{who} ({name})"
            axis.errorbar(range(len(LOADS)), means, half, color=colour, linestyle=style, label=label, capsize=3)
    axis.set_xticks(range(len(LOADS)), list(LOADS))
    axis.set_xlabel("hits x sentences that a search shows")
    axis.set_ylabel("held-out accuracy, %")
    axis.set_ylim(0, 100)
    axis.legend(fontsize="x-small")
