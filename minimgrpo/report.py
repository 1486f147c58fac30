"""What a run leaves for a person to read: ``curves.png``, and ``report.html`` with curves, tables and transcripts.

The page is one file without any outside resource. Whatever a model wrote is escaped: it is text, never markup.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path

from minimgrpo.protocol import CALL, ROLES
from minimgrpo.scorer import wilson
from minimgrpo.trajectory import Rollout, Trajectory, rollouts

Line = tuple[int, str, str]  # depth, who or what, text

# ------------------------------------------------------------------------------------------------------ transcripts


def transcript(rollout: Rollout, scored: bool = False) -> list[Line]:
    """A rollout as lines: the planner's turns, the executor's a level deeper, and what the tools returned.

    ``scored`` ends every trajectory with a line that says why it ended and what it earned.
    """
    return conversation(rollout.planner, rollout.calls, scored)


def conversation(t: Trajectory, calls: list[Trajectory] = (), scored: bool = False, depth: int = 0) -> list[Line]:
    """One agent's trajectory as lines; ``calls`` are the executor's trajectories, shown at the turns that caused them.

    A report is shown once: as the executor's last line, or, without its trajectory, as what the call returned.
    """
    lines: list[Line] = []
    shown = {call.call: call for call in calls}
    for turn, text in enumerate(m["content"] for m in t.messages if m["role"] == "assistant"):
        if turn >= len(t.tool_calls):  # the last message: a result, or what broke the format
            lines.append((depth, t.agent, printable(text) or "(nothing)"))
            continue
        call = t.tool_calls[turn]
        thought = printable(text.partition(CALL)[0])
        asked = ", ".join(printable(str(value)) for value in call["arguments"].values())
        lines.append((depth, t.agent, f"{thought} [{call['name']}] {asked}".strip()))
        if turn in shown:
            lines += conversation(shown[turn], scored=scored, depth=depth + 1)
        if turn not in shown or not call["ok"]:
            lines.append((depth + 1, "->", printable(call["output"])))
    if scored or not t.format_ok:
        why = t.stop_reason + (f": {printable(t.note)}" if t.note else "")
        lines.append((depth, "=" if t.format_ok else "stopped", f"{why}; {score(t)}" if scored else f"({why})"))
    return lines


def score(t: Trajectory) -> str:
    """What a trajectory earned; in training (an evaluation has no step) also how much it counts in the update."""
    parts = ", ".join(f"{name.removeprefix('expert_')} {round(value, 2):g}" for name, value in t.reward_parts.items())
    text = f"reward {t.reward:.2f} ({parts})"
    if t.step:
        text += f", advantage {t.advantage:+.2f}" + (f", copies {t.copies}" if t.agent == "executor" else "")
    return text


def printable(text: str) -> str:
    """One line without control characters, which a terminal would obey.

    >>> printable("red: \\x1b[31m\\nnext")
    'red: ·[31m next'
    """
    return "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))


CASES = ((False, True), (True, False), (False, False), (True, True))  # right before, right after


def telling(questions: list, before: list[Rollout], after: list[Rollout], per_kind: int = 3) -> list[int]:
    """Indices of questions worth reading, ``per_kind`` of each kind: learned ones, then lost ones, then the others."""
    right = [[bool(r.planner.reward_parts["correct"]) for r in rollouts] for rollouts in (before, after)]
    chosen = []
    for kind in dict.fromkeys(q.kind for q in questions):
        here = [i for i, q in enumerate(questions) if q.kind == kind]
        # the first of each case before the second of any
        cases = [[i for i in here if (right[0][i], right[1][i]) == case] for case in CASES]
        ranked = sorted((place, rank, i) for rank, case in enumerate(cases) for place, i in enumerate(case))
        chosen += [i for *_, i in ranked[:per_kind]]
    return chosen


def telling_group(planned: list[Trajectory], executed: list[Trajectory]) -> list[Rollout]:
    """Of one step's groups with signal the one with the most delegations, as its K rollouts."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts(planned, executed):
        groups.setdefault(rollout.planner.question_id, []).append(rollout)
    return max(groups.values(), key=lambda g: (any(r.planner.advantage for r in g), sum(len(r.calls) for r in g)))


# ----------------------------------------------------------------------------------------------------------- tables

MEASURES = {
    "format": "format, planner",
    "executor_format": "format, executor",
    "puzzle_delegation": "puzzles delegated",
    "lookup_delegation": "look-ups delegated",
    "query_specificity": "specific queries",
    "expert": "expert score",
}


def accuracy_table(before: dict, after: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: accuracy in percent with 95 % intervals, before and after, sampled and greedy."""
    header = ["accuracy, %", "n", "before, T=1", "before, greedy", "after, T=1", "after, greedy"]

    def cells(pick) -> list[str]:
        return [with_interval(pick(side, way)) for side in (before, after) for way in ("", "greedy_")]

    def overall(side: dict, way: str) -> dict:
        return {"n": side["n"], "accuracy": side["greedy" if way else "accuracy"]}

    rows = [["all questions", str(before["n"]), *cells(overall)]]
    for groups, label in (("levels", "level "), ("kinds", "")):
        for name, group in before[groups].items():
            picked = cells(lambda side, way, groups=groups, name=name: side[way + groups][name])
            rows.append([label + name, str(group["n"]), *picked])
    return header, rows


def measure_table(before: dict, after: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: how the team works, in percent, before and after, sampled and greedy."""
    header = ["how they work, %", "before, T=1", "before, greedy", "after, T=1", "after, greedy"]
    rows = []
    for name, label in MEASURES.items():
        values = [values[name] for side in (before, after) for values in (side, side["greedy_numbers"])]
        rows.append([label, *("-" if v is None else f"{100 * v:.0f}" for v in values)])
    return header, rows


def with_interval(group: dict) -> str:
    """
    >>> with_interval({"n": 20, "accuracy": 0.25})
    '25 [11, 47]'
    """
    low, high = wilson(round(group["accuracy"] * group["n"]), group["n"])
    return f"{100 * group['accuracy']:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


# ----------------------------------------------------------------------------------------------------------- curves


def draw_curves(path: Path, history: list[dict], d_max: int, before: dict, after: dict) -> None:
    """Six small panels over the steps; the diamonds in the first are the test questions, with 95 % intervals.

    ``history`` is what each step measured, as ``servers.Team.measured`` says it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [m["step"] for m in history]

    def values(role: str, name: str) -> list[float]:
        return [float("nan") if m[role][name] is None else m[role][name] for m in history]

    def lines(axis, title: str, label: str, named: dict[str, list[float]], top: float | None = 1.03) -> None:
        for (name, ys), colour in zip(named.items(), ("tab:blue", "tab:orange", "tab:green"), strict=False):
            axis.plot(
                steps,
                ys,
                label=name,
                color=colour,
                linewidth=1.4,
                marker="o" if len(steps) < 10 else None,
                markersize=3,
            )
        axis.set(title=title, xlabel="step", ylabel=label)
        axis.set_ylim(-0.03 if top else 0, top)
        axis.legend(fontsize=8, framealpha=0.6)

    figure, axes = pyplot.subplots(3, 2, figsize=(9, 9.5))
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.06, top=0.96, hspace=0.4, wspace=0.25)
    first, delegation, quality, calls, flat, entropy = axes.flat
    lines(
        first,
        "Accuracy and format (training, T=1)",
        "share of rollouts",
        {
            "accuracy": values("planner", "correct"),
            "format, planner": values("planner", "format"),
            "format, executor": values("executor", "format"),
        },
    )
    for x, side in ((0, before), (max(steps, default=0) + 1, after)):
        low, high = side["ci95"]
        middle = side["accuracy"]
        first.errorbar(x, middle, [[middle - low], [high - middle]], fmt="D", color="black", markersize=4, capsize=3)
    first.plot([], [], "D", color="black", markersize=4, label="accuracy, test")
    first.legend(fontsize=8, framealpha=0.6)
    delegated = {
        "puzzles": values("planner", "puzzle_delegation"),
        "look-ups": values("planner", "lookup_delegation"),
    }
    lines(delegation, "Who delegates?", "share that delegates", delegated)
    worked = {
        "specific queries": values("executor", "query_specificity"),
        "expert score": values("executor", "expert"),
    }
    lines(quality, "How the executor works", "share / score", worked)

    counts = [m["planner"]["calls"] for m in history]
    most = max((len(c) for c in counts), default=1) - 1
    shares = [[c[d] / sum(c) if d < len(c) else 0.0 for c in counts] for d in range(most + 1)]
    colours = pyplot.get_cmap("viridis")([d / max(1, most) for d in range(most + 1)])
    calls.stackplot(steps, shares, colors=colours, labels=[str(d) for d in range(most + 1)])
    calls.set(
        title=f"Delegations per rollout (D_max = {d_max})", xlabel="step", ylabel="share of rollouts", ylim=(0, 1)
    )
    calls.legend(fontsize=8, title="d", title_fontsize=8, loc="upper right")

    without, entropies = ({role: values(role, name) for role in ROLES} for name in ("flat", "entropy"))
    lines(flat, "Groups without signal (all rewards equal)", "share of groups", without)
    lines(entropy, "Entropy: mean surprise of the sampled tokens", "nats per token", entropies, top=None)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------------------- page

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: auto; }
body { padding: 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e5e5e5; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
details { border: 1px solid #ddd; border-radius: .4rem; padding: .4rem .7rem; margin: .4rem 0; }
summary { cursor: pointer; }
h4 { margin: .7rem 0 .3rem; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1.5rem; }
.line { margin: .15rem 0; overflow-wrap: anywhere; font-size: .92rem; }
.who { font-weight: 600; color: #666; } .planner > .who { color: #0b63b0; } .executor > .who { color: #1a7f37; }
.right { color: #1a7f37; } .stopped, .wrong { color: #b3261e; } .note { color: #666; font-size: .88rem; }
"""


def page(
    title: str,
    facts: str,
    before: dict,
    after: dict,
    curves: Path,
    tests: list[tuple],
    groups: list[tuple[int, list[Rollout]]],
) -> str:
    """The report as one HTML text.

    tests: (question, rollout before, rollout after); groups: (step, the K rollouts of one question) from the log.
    """
    image = base64.b64encode(curves.read_bytes()).decode("ascii")
    tested = "".join(_tested(*test) for test in tests)
    trained = "".join(_group(step, rollouts) for step, rollouts in groups)
    body = f"""\
<p>A planner and an executor, two LoRA adapters on one language model, learned together with M-GRPO. {safe(facts)}</p>
<h2>Before and after, on held-out questions</h2>
<p>One attempt at each question, sampled at temperature 1 and greedy; in brackets the 95 % interval (Wilson).</p>
<div class="wide">{_table(*accuracy_table(before, after))}</div><br>
<div class="wide">{_table(*measure_table(before, after))}</div>
<h2>Curves</h2>
<p><img alt="six curves over the training steps" src="data:image/png;base64,{image}"></p>
<h2>Test questions, before and after</h2>
<p class="note">Sampled at temperature 1. The executor's turns are indented, and what its tools returned (-&gt;).</p>
{tested}
<h2>Training groups</h2>
<p class="note">The rollouts of one question in one step, from the trajectory log. A group learns from differences: the
advantage is the reward minus the group's mean, divided by its standard deviation. An executor trajectory counts as
often as the alignment to D_max copied it.</p>
{trained}"""
    return document(title, body)


def document(title: str, body: str) -> str:
    """A whole HTML page that needs nothing else; ``body`` is markup, whose texts have gone through ``safe``."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{safe(title)}</title><style>{STYLE}</style></head><body>
<h1>{safe(title)}</h1>
{body}
</body></html>
"""


def safe(text: str) -> str:
    """Text for a page: never markup, nothing that cannot be seen."""
    return html.escape(printable(str(text)))


def _table(header: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{safe(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def paragraphs(lines: list[Line]) -> str:
    """The lines of a transcript, indented by their depth."""
    return "".join(
        f'<p class="line {"note" if who == "=" else who if who.isalpha() else ""}" '
        f'style="margin-left:{1.1 * depth:.1f}rem"><span class="who">{safe(who)}</span> {safe(text)}</p>'
        for depth, who, text in lines
    )


def verdict(right: bool) -> str:
    name = "right" if right else "wrong"
    return f'<span class="{name}">{name}</span>'


def _verdict(rollout: Rollout) -> str:
    return verdict(bool(rollout.planner.reward_parts["correct"]))


def _tested(question, before: Rollout, after: Rollout) -> str:
    sides = "".join(
        f"<div><h4>{name}: {_verdict(r)}</h4>{paragraphs(transcript(r))}</div>"
        for name, r in (("Before", before), ("After", after))
    )
    head = f"<b>{safe(question.kind)}</b> {_verdict(before)} → {_verdict(after)}: {safe(question.question)}"
    body = f'<p>Gold answer: {safe(question.answer)}</p><div class="two">{sides}</div>'
    return f"<details><summary>{head}</summary>{body}</details>"


def _group(step: int, rollouts: list[Rollout]) -> str:
    body = "".join(
        f"<details><summary>rollout {r.planner.rollout}: {_verdict(r)}, {len(r.calls)} delegations, "
        f"{safe(score(r.planner))}</summary>{paragraphs(transcript(r, scored=True))}</details>"
        for r in rollouts
    )
    question = rollouts[0].planner.messages[1]["content"]
    return f"<details><summary>Step {step}: {safe(question)}</summary>{body}</details>"
