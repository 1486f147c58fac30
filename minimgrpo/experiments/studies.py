"""The experiments: what each claims, which runs it needs, and which numbers it compares.

All claims are the paper's (arXiv 2511.13288) unless they say otherwise; they were written down before the final runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from minimgrpo.experiments.setting import Setting

Measure = Callable[[dict], float]
SMOOTH = 3  # steps that a point of a curve, a start or an end is the mean of


@dataclass(frozen=True)
class Claim:
    """``a relation b`` for two (arm, measure); ``verdicts.judge`` decides.

    With a third part, (arm, measure, other arm), it is about the arm's lead over the other.
    """

    text: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    relation: str = ">"


@dataclass(frozen=True)
class Study:
    """``arms``: name -> its setting, from the base setting. ``columns``: the measures that the table shows."""

    name: str
    title: str
    arms: dict[str, Callable[[Setting], Setting]]
    claims: tuple[Claim, ...]
    columns: tuple[str, ...] = ("T=1", "greedy")
    curve: str = "correct"
    note: str = ""

    def settings(self, base: Setting, seeds: int) -> dict[str, list[Setting]]:
        """Arm -> its setting for each seed."""
        return {
            arm: [make(replace(base, config=replace(base.config, seed=seed))) for seed in range(seeds)]
            for arm, make in self.arms.items()
        }


# ------------------------------------------------------------------------------------------------------------- measures


def _found(*path: str) -> Measure:
    def measure(result: dict) -> float:
        for name in path:
            result = result[name]
        return result

    return measure


def _hard(result: dict) -> float:
    kinds = result["sampled"]["kinds"]
    return (kinds["two-hop"] + kinds["calculation"]) / 2


def curve(result: dict, name: str, role: str = "planner") -> list[float]:
    """What the training measured, each step the mean of the last ``SMOOTH``; what a step lacks is repeated."""
    values, last = [], 0.0
    for line in result["history"]:
        last = line[role][name] if line[role][name] is not None else last
        values.append(last)
    return [sum(some) / len(some) for some in (values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values)))]


def reached(values: list[float], share: float = 0.9) -> float:
    """The first step (from 1) at which a curve has gone ``share`` of the way from its first value to its last.

    >>> reached([0.0, 0.5, 0.9, 1.0]), reached([0.8, 0.9, 0.98, 1.0]), reached([1.0, 1.0])
    (3.0, 3.0, 1.0)
    """
    goal = values[0] + share * (values[-1] - values[0])
    rising = values[-1] >= values[0]
    return float(next(i for i, v in enumerate(values, 1) if (v >= goal - 1e-12 if rising else v <= goal + 1e-12)))


def reached_level(values: list[float], share: float = 0.9) -> float:
    """The first step (from 1) at which a curve is at ``share`` of its last value.

    >>> reached_level([0.85, 0.95, 1.0]), reached_level([0.1, 0.5, 0.9, 1.0])
    (2.0, 3.0)
    """
    return float(next(i for i, v in enumerate(values, 1) if v >= share * values[-1] - 1e-12))


def _start(name: str, role: str) -> Measure:
    return lambda result: curve(result, name, role)[min(SMOOTH, len(result["history"])) - 1]


def _end(name: str, role: str) -> Measure:
    return lambda result: curve(result, name, role)[-1]


MEASURES: dict[str, Measure] = {
    "T=1": _found("sampled", "accuracy"),
    "greedy": _found("greedy", "accuracy"),
    "hard, T=1": _hard,
    "puzzle": _found("sampled", "kinds", "puzzle"),
    "lookup": _found("sampled", "kinds", "lookup"),
    "two-hop": _found("sampled", "kinds", "two-hop"),
    "calc": _found("sampled", "kinds", "calculation"),
    "format": _found("sampled", "format"),
    "specific": _found("sampled", "query_specificity"),
    "expert": _found("sampled", "expert"),
    "superf.": _found("sampled", "experts", "superficial"),
    "true": _found("sampled", "experts", "accurate"),
    "words": _found("sampled", "report_words"),
    "calls": _found("sampled", "calls"),
    "context": _found("sampled", "context"),
    "k tokens": lambda result: (result["tokens"]["sampled"] + result["tokens"]["read"]) / 1000,
    "k trained": lambda result: result["tokens"]["trained"] / 1000,
    "format at 90 %": lambda result: reached_level(curve(result, "format")),
    "accuracy at 90 %": lambda result: reached_level(curve(result, "correct")),
    "format's rise": lambda result: reached(curve(result, "format")),
    "accuracy's rise": lambda result: reached(curve(result, "correct")),
    "puzzles delegated, start": _start("puzzle_delegation", "planner"),
    "puzzles delegated, end": _end("puzzle_delegation", "planner"),
    "look-ups delegated, start": _start("lookup_delegation", "planner"),
    "look-ups delegated, end": _end("lookup_delegation", "planner"),
    "specific queries, start": _start("query_specificity", "executor"),
    "specific queries, end": _end("query_specificity", "executor"),
}
"""Name -> how it is read from a run's result. Steps count from 1; shares lie in [0, 1]."""

NUMBERS = {"k tokens", "k trained", "words", "calls", "context"} | {n for n in MEASURES if "90 %" in n or "rise" in n}
"""Those that are numbers; all others are shares, shown in percent."""


# -------------------------------------------------------------------------------------------------------------- studies


def _with(**changes) -> Callable[[Setting], Setting]:
    """The base setting with changes; those to fields of its config are sorted out."""

    def make(base: Setting) -> Setting:
        inner = {name: value for name, value in changes.items() if hasattr(base.config, name)}
        outer = {name: value for name, value in changes.items() if name not in inner}
        return replace(base, config=replace(base.config, **inner), **outer)

    return make


CO = "co-trained"
_SOLO = {"team": "solo", "trains": ("solo",)}
LOADS = {"1 x 1": (1, 1), "1 x 4": (1, 4), "3 x 3": (3, 3)}  # hits x sentences that a search shows


def _two(text: str, a: str, b: str, relation: str = ">") -> tuple[Claim, Claim]:
    """The same claim about accuracy, sampled and greedy."""
    return tuple(Claim(f"{text} ({way})", (a, way), (b, way), relation) for way in ("T=1", "greedy"))


STUDIES = (
    Study(
        "arms",
        "What co-training buys: equal questions, rollouts and steps",
        {
            "untrained": lambda base: _with(steps=0)(base),
            CO: _with(),
            "planner only": _with(trains=("planner",)),
            "executor only": _with(trains=("executor",)),
            "one shared adapter": _with(team="shared", trains=("shared",)),
            "single agent": _with(**_SOLO),
            "single, untrained": _with(steps=0, **_SOLO),
            "single, 52 steps": _with(steps=52, **_SOLO),
        },
        (
            *_two("co-trained > planner only", CO, "planner only"),
            *_two("planner only > single agent", "planner only", "single agent"),
            *_two("co-trained > single agent", CO, "single agent"),
            *_two("co-trained > single agent with as many tokens (ours)", CO, "single, 52 steps"),
            *_two("co-trained > executor only (ours)", CO, "executor only"),
            *_two("co-trained > one shared adapter (ours)", CO, "one shared adapter"),
        ),
        ("T=1", "greedy", "puzzle", "lookup", "two-hop", "calc", "specific", "k tokens"),
        note="The single agent needs fewer tokens a rollout; in 52 steps it has about as many as the co-trained team.",
    ),
    Study(
        "rewards",
        "What the executor is paid for",
        {
            "mix, rubric": _with(),
            "outcome only": _with(weights=(0.1, 0.9, 0.0)),
            "superficial only": _with(weights=(0.1, 0.0, 0.9), expert="superficial"),
            "mix, superficial": _with(expert="superficial"),
            "accurate only": _with(weights=(0.1, 0.0, 0.9), expert="accurate"),
            "mix, accurate": _with(expert="accurate"),
        },
        (
            *_two("superficial expert: mix > expert alone", "mix, superficial", "superficial only"),
            Claim(
                "superficial expert alone: pleases it more than the mix does",
                ("superficial only", "superf."),
                ("mix, superficial", "superf."),
            ),
            Claim(
                "superficial expert alone: specific queries are lost against the planner's outcome alone",
                ("outcome only", "specific"),
                ("superficial only", "specific"),
            ),
            *_two("accurate expert: the planner's term is redundant", "mix, accurate", "accurate only", "="),
            *_two("mix with the rubric > planner's outcome alone", "mix, rubric", "outcome only"),
        ),
        ("T=1", "greedy", "specific", "expert", "superf.", "true", "words", "k tokens"),
    ),
    Study(
        "staleness",
        "Learning from old trajectories, with and without alignment",
        {
            "0, aligned": _with(),
            "1, aligned": _with(staleness=1),
            "4, aligned": _with(staleness=4),
            "0, not aligned": _with(alignment="none"),
            "4, not aligned": _with(staleness=4, alignment="none"),
        },
        (
            *_two("synchronised > 1 step stale", "0, aligned", "1, aligned"),
            *_two("synchronised > 4 steps stale", "0, aligned", "4, aligned"),
            *_two("without alignment: synchronised > 4 steps stale", "0, not aligned", "4, not aligned"),
            *_two("4 steps stale: aligned > not aligned", "4, aligned", "4, not aligned"),
        ),
        ("T=1", "greedy", "two-hop", "calc", "specific", "k tokens"),
        note="Staleness n: the executor makes the update from a step n steps later; the planner is synchronised.",
    ),
    Study(
        "alignment",
        "How much each executor trajectory counts",
        {
            "D = 1": _with(d_max=1),
            "D = 2": _with(d_max=2),
            "D = 4": _with(),
            "D = 8": _with(d_max=8),
            "none": _with(alignment="none"),
            "1/d": _with(alignment="1/d"),
        },
        (
            *_two("D = 4 > no alignment", "D = 4", "none"),
            *_two("D = 4 > D = 1", "D = 4", "D = 1"),
            *_two("D = 4 > 1/d", "D = 4", "1/d"),
            *_two("D = 8 = D = 4", "D = 8", "D = 4", "="),
        ),
        ("T=1", "greedy", "two-hop", "calc", "specific", "k trained"),
    ),
    Study(
        "curriculum",
        "Easy questions first",
        {
            "easy, then hard": _with(curriculum="easy first"),
            "hard alone": _with(curriculum="hard"),
            "mixed": _with(),
        },
        (
            *_two("easy first > hard alone", "easy, then hard", "hard alone"),
            Claim(
                "easy first > hard alone, on hard questions",
                ("easy, then hard", "hard, T=1"),
                ("hard alone", "hard, T=1"),
            ),
            *_two("easy first > mixed (ours)", "easy, then hard", "mixed"),
        ),
        ("T=1", "greedy", "hard, T=1", "puzzle", "lookup", "format", "k tokens"),
        note="Easy: level 1 for the first third of the steps; hard: levels 2 and 3.",
    ),
    Study(
        "order",
        "What is learned first, and who does what in the end",
        {CO: _with()},
        (
            Claim("format reaches 90 % of its last value first", (CO, "accuracy at 90 %"), (CO, "format at 90 %")),
            Claim("90 % of format's rise comes first (ours)", (CO, "accuracy's rise"), (CO, "format's rise")),
            Claim(
                "puzzles: fewer are delegated at the end",
                (CO, "puzzles delegated, start"),
                (CO, "puzzles delegated, end"),
            ),
            Claim(
                "look-ups are delegated at the end as at the start (within 10 points)",
                (CO, "look-ups delegated, end"),
                (CO, "look-ups delegated, start"),
                "=",
            ),
            Claim("queries become specific", (CO, "specific queries, end"), (CO, "specific queries, start")),
        ),
        (
            *("format at 90 %", "accuracy at 90 %", "puzzles delegated, start", "puzzles delegated, end"),
            *("specific queries, start", "specific queries, end"),
        ),
        note=f"From the training steps; each value is the mean of {SMOOTH} steps, start: steps 1 to {SMOOTH}.",
    ),
    Study(
        "load",
        "Context load: one agent against the team as searches show more",
        {
            f"{who}, {load}": _with(hits=hits, sentences=sentences, **extra)
            for load, (hits, sentences) in LOADS.items()
            for who, extra in (("team", {}), ("single", _SOLO))
        },
        tuple(
            claim
            for load in LOADS
            for claim in _two(f"at {load}: team > single agent", f"team, {load}", f"single, {load}")
        )
        + tuple(
            Claim(
                f"the team's lead is larger at 3 x 3 than at 1 x 1 (ours) ({way})",
                ("team, 3 x 3", way, "single, 3 x 3"),
                ("team, 1 x 1", way, "single, 1 x 1"),
            )
            for way in ("T=1", "greedy")
        ),
        ("T=1", "greedy", "lookup", "two-hop", "calc", "context", "k tokens"),
        note="Load: hits x sentences that one search shows. Context: tokens of the planner's or the single agent's.",
    ),
)
BY_NAME = {study.name: study for study in STUDIES}
