"""The README's table of results, from finished demo runs: ``python docs/table.py runs/demo-seed*``."""

import json
import sys
from pathlib import Path

COLUMNS = "seed|  |T=1, 95 % interval|greedy|level 1 / 2 / 3|puzzle / look-up / two-hop / calculation"
COLUMNS += "|format|puzzles delegated|specific queries|seconds"
KINDS = ("puzzle", "lookup", "two-hop", "calculation")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def row(summary: dict, when: str) -> list[str]:
    s = summary[when]
    low, high = s["ci95"]
    return [
        str(summary["seed"]),
        when,
        f"{percent(s['accuracy'])} ({100 * low:.0f}-{100 * high:.0f})",
        percent(s["greedy"]),
        " / ".join(percent(level["accuracy"]) for level in s["levels"].values()),
        " / ".join(percent(s["kinds"][kind]["accuracy"]) for kind in KINDS),
        percent(s["format"]),
        percent(s["puzzle_delegation"]),
        percent(s["query_specificity"]),
        f"{summary['seconds']:.0f}" if when == "after" else "",
    ]


def main(runs: list[str]) -> None:
    summaries = [json.loads((Path(run) / "summary.json").read_text(encoding="utf-8")) for run in runs]
    names = COLUMNS.split("|")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for when in ("before", "after"):
        for summary in sorted(summaries, key=lambda s: s["seed"]):
            print("| " + " | ".join(row(summary, when)) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
