"""Measure the claims of all lessons, or of those named: ``python -m minimgrpo.lessons [NAME ...] [--quick]``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time

from minimgrpo import display, lessons


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(lessons.__path__) if not m.name.startswith("_"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minimgrpo.lessons", description="Measure what the lessons' systems claim.")
    parser.add_argument("lesson", nargs="*", help=f"which lessons (all): {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and shorter runs")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.lesson) - set(names())):
        parser.error(f"there is no lesson {unknown[0]!r}: choose from {', '.join(names())}")
    rows = []
    for name in args.lesson or names():
        started = time.perf_counter()
        found = importlib.import_module(f"minimgrpo.lessons.{name}").claims(args.quick)
        rows += [[name, claim.claim, claim.measured, claim.verdict] for claim in found]
        print(f"{name}: {len(found)} claims in {time.perf_counter() - started:.1f} s", flush=True)
    display.print_table(display.console(), ["lesson", "claim", "measured", "verdict"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
