"""Workflows: who speaks when, and who sees what. Six of the field's systems, each a short description.

A workflow is a function of the question that *yields* a list of asks (messages wanted now, at the same time) and is
sent what was said, in the same order; what it returns is the team's answer. ``run`` plays any number of them in
lock-step. Nothing here knows a model: who speaks is a function, so tests, training and counterfactuals share all of it.

    voting        3 generators on the same prompt -> an aggregator reads their answers
    eval-opt      a generator -> an evaluator reads what it did -> the generator refines, told what was rejected (twice
                  at most)
    orch-workers  an orchestrator writes up to 3 tasks (or answers at once) -> workers -> a synthesizer reads reports
    debate        2 generators -> both read both answers and answer again, at the same time (1 round) -> a judge
    advisor       a generator -> a reviewer (an evaluator) -> if it objects one redo, of the same prompt, which stands
    swarm         a controller names who works next, a generator or a solver without tools, or is done (3 hops at most)

Sources: arXiv 2605.24202 for the first three (its code's documentation), a textbook chapter ("20.7 Multi-Agent
Collaboration and Agent Swarms") for the others. A *player* is a role and a slot: the second generator of three.
Players of one role share an adapter; a generator that refines is the same player again. Each ask carries a default,
what is said in the player's place when it is left out of a coalition (``minimgrpo.credit``).

Limits that come with the shapes: an orchestrator's workers work at the same time, so a question of two hops, whose
second look-up needs the first one's report, is beyond it unless a worker does both. No role sees a gold answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from minimgrpo.protocol import ANSWER, ONE_OF

VOTERS, DEBATERS, WORKERS = 3, 2, 3
REFINEMENTS, ROUNDS, HOPS = 2, 1, 3
UNKNOWN = "unknown"  # what a player who is left out says
SHARINGS = ("isolated", "shared")
CREDITS = ("team", "per-agent", "difference", "shapley")


@dataclass(frozen=True)
class Ask:
    """One message wanted: from whom, about what text, and what stands in its place when the player is left out."""

    role: str
    text: str
    slot: int = 0
    default: str = UNKNOWN

    @property
    def player(self) -> tuple[str, int]:
        return self.role, self.slot


@dataclass(frozen=True)
class Said:
    """What came back: the result ("" when the message was none), and the tool calls behind it in a line of text."""

    text: str
    work: str = ""


Play = Generator[list[Ask], list[Said], str]


# ------------------------------------------------------------------------------------------------------ the workflows


def voting(question: str) -> Play:
    votes = yield [Ask("generator", question, slot) for slot in range(VOTERS)]
    (chosen,) = yield [Ask("aggregator", candidates(question, votes), default=majority(votes))]
    return chosen.text


def eval_opt(question: str) -> Play:
    (draft,) = yield [Ask("generator", question)]
    for _ in range(REFINEMENTS):
        (verdict,) = yield [Ask("evaluator", review(question, draft), default="correct")]
        if verdict.text != "incorrect":
            break
        (draft,) = yield [Ask("generator", rejected(question, draft))]
    return draft.text


def orch_workers(question: str) -> Play:
    (plan,) = yield [Ask("orchestrator", question, default=question)]
    if ANSWER in plan.text:  # it solved the task itself
        return plan.text.rpartition(ANSWER)[2].strip()
    tasks = [line.strip() for line in plan.text.split("\n") if line.strip()][:WORKERS]
    reports = (yield [Ask("worker", task, slot) for slot, task in enumerate(tasks)]) if tasks else []
    (final,) = yield [Ask("synthesizer", reported(question, tasks, reports), default=majority(reports))]
    return final.text


def debate(question: str) -> Play:
    views = yield [Ask("generator", question, slot) for slot in range(DEBATERS)]
    for _ in range(ROUNDS):
        asks = [(mine, [mine, *views[:slot], *views[slot + 1 :]]) for slot, mine in enumerate(views)]
        views = yield [
            Ask("debater", candidates(question, ordered), slot, default=mine.text or UNKNOWN)
            for slot, (mine, ordered) in enumerate(asks)
        ]
    (final,) = yield [Ask("judge", candidates(question, views), default=majority(views))]
    return final.text


def advisor(question: str) -> Play:
    (draft,) = yield [Ask("generator", question)]
    (verdict,) = yield [Ask("evaluator", review(question, draft), default="correct")]
    if verdict.text == "incorrect":
        (draft,) = yield [Ask("generator", question)]
    return draft.text


def swarm(question: str) -> Play:
    answers: list[Said] = []
    for _ in range(HOPS):
        (route,) = yield [Ask("controller", routing(question, answers), default="done" if answers else "generator")]
        if route.text not in ("generator", "solver"):
            break
        answers += yield [Ask(route.text, question)]
    return answers[-1].text if answers else ""


WORKFLOWS: dict[str, Callable[[str], Play]] = {
    "voting": voting,
    "eval-opt": eval_opt,
    "orch-workers": orch_workers,
    "debate": debate,
    "advisor": advisor,
    "swarm": swarm,
}
ROLES = {
    "voting": ("generator", "aggregator"),
    "eval-opt": ("generator", "evaluator"),
    "orch-workers": ("orchestrator", "worker", "synthesizer"),
    "debate": ("generator", "debater", "judge"),
    "advisor": ("generator", "evaluator"),
    "swarm": ("controller", "generator", "solver"),
}

# ------------------------------------------------------------------------------------------- what a role gets to read


def candidates(question: str, answers: Sequence[Said]) -> str:
    """The question and one answer a line.

    >>> candidates("What is 1 plus 2?", [Said("3"), Said("")])
    'What is 1 plus 2?\\n- 3\\n- unknown'
    """
    return "\n".join([question, *(f"- {a.text or UNKNOWN}" for a in answers)])


def review(question: str, draft: Said) -> str:
    """The question, what was done, the answer, and the words to choose from (a small model copies them).

    >>> review("What is the capital of Ghana?", Said("Accra", "search: capital Ghana"))
    'What is the capital of Ghana?\\nsearch: capital Ghana\\nanswer: Accra\\ncorrect or incorrect?'
    """
    parts = (question, draft.work, f"answer: {draft.text or UNKNOWN}", f"{' or '.join(ONE_OF['evaluator'])}?")
    return "\n".join(part for part in parts if part)


def routing(question: str, answers: Sequence[Said]) -> str:
    """The question, the answers so far, and the words to choose from.

    >>> routing("What is 1 plus 2?", [Said("3")])
    'What is 1 plus 2?\\n- 3\\ngenerator or solver or done?'
    """
    return f"{candidates(question, answers)}\n{' or '.join(ONE_OF['controller'])}?"


def rejected(question: str, draft: Said) -> str:
    return f"{question}\nnot correct: {draft.text or UNKNOWN}"


def reported(question: str, tasks: Sequence[str], reports: Sequence[Said]) -> str:
    lines = (f"- {task}: {said.text or UNKNOWN}" for task, said in zip(tasks, reports, strict=True))
    return "\n".join([question, *lines])


def majority(answers: Sequence[Said]) -> str:
    """The most frequent answer, the earliest of equals; ``UNKNOWN`` when there is none.

    Who says that it does not know abstains, and so does who is left out of a coalition and says so by default: else two
    who are absent would outvote one who is right, and equal votes would get unequal Shapley values.

    >>> majority([Said("unknown"), Said(""), Said("Accra"), Said("unknown")])
    'Accra'
    """
    counts = Counter(a.text for a in answers if a.text not in ("", UNKNOWN))
    return counts.most_common(1)[0][0] if counts else UNKNOWN


# --------------------------------------------------------------------------------------------------------- playing


@dataclass(frozen=True)
class Turn:
    """One ask in an episode: the ``time``-th of its player (0, 1, ...), in the ``round``-th batch."""

    ask: Ask
    time: int
    round: int


Speak = Callable[[list[tuple[int, Turn]]], list[Said]]
"""``speak(turns)``: one batch of (episode, turn) -> what was said, in order."""


def run(workflow: Callable[[str], Play], questions: Sequence[str], speak: Speak) -> list[str]:
    """Play the workflow once for each of ``questions``, in lock-step -> the teams' answers, in order."""
    plays = [workflow(question) for question in questions]
    answers = [""] * len(plays)
    times: list[Counter] = [Counter() for _ in plays]
    pending = {i: next(play) for i, play in enumerate(plays)}
    number = 0
    while pending:
        batch = []
        for i, asks in pending.items():
            for ask in asks:
                batch.append((i, Turn(ask, times[i][ask.player], number)))
                times[i][ask.player] += 1
        said = iter(speak(batch))
        replies = {i: [next(said) for _ in asks] for i, asks in pending.items()}
        pending = {}
        for i, reply in replies.items():
            try:
                pending[i] = plays[i].send(reply)
            except StopIteration as end:
                answers[i] = end.value
        number += 1
    return answers
