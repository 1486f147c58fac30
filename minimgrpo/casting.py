"""Demonstrations for the roles of workflows: what a generator, an aggregator, an evaluator, ... says.

atlas-lm has met planners and executors only. Before a workflow is trained each adapter is fine-tuned for seconds
(``warmup.warm_up``) on conversations of its roles about invented facts, with deliberate mistakes: every role knows how
to answer and does so badly, so that something is left to learn. The tables are the shares of what it does at each
decision; an aggregator follows the majority now and then, an evaluator judges by a coin nearly half of the time, an
orchestrator leaves out whom a task is about, a controller routes at random.
"""

from __future__ import annotations

import random

from minimgrpo import atlas, workflows
from minimgrpo.demonstrations import PLANNER_SHARES, Demonstration, Message, name_pieces
from minimgrpo.solo import SoloDemonstrator
from minimgrpo.tools import Page
from minimgrpo.workflows import UNKNOWN, Said

SHARES = {
    "choose": {"any": 0.70, "majority": 0.25, "give up": 0.05},
    "verdict": {"right": 0.55, "coin": 0.45},
    "solver, puzzle": {"right": 0.80, "wrong": 0.20},
    "orchestrator, puzzle": {"solve": 0.45, "delegate": 0.55},
    "task": {"specific": 0.50, "vague": 0.50},
    "synthesize": {"right": 0.65, "first report": 0.35},
    "route": {"generator": 0.50, "solver": 0.50},
    "route on": {"done": 0.60, "again": 0.40},
}
REFINES = 0.2  # of a generator's demonstrations: told what was rejected


class RoleDemonstrator(SoloDemonstrator):
    """Writes demonstrations of any role of ``workflows.ROLES``."""

    def role(self, role: str) -> Demonstration:
        """One conversation of ``role``."""
        if role in ("generator", "worker"):
            demo = self.solo() if role == "generator" else self.executor()
            if role == "generator" and self.rng.random() < REFINES:
                first = demo.messages[0]
                first.content = workflows.rejected(first.content, Said(self._wrong()))
            demo.agent = role
            return demo
        demo = Demonstration(role)
        write = {
            "evaluator": self._evaluate,
            "solver": self._solve,
            "orchestrator": self._orchestrate,
            "synthesizer": self._synthesize,
            "controller": self._route,
        }
        write.get(role, self._choose_one)(demo)
        return self._break_format(demo)

    def _question(self) -> tuple[atlas.Question, str]:
        """A question of a kind in the planner's share, and the attribute that it asks for ("" for a puzzle)."""
        kind = self._draw(PLANNER_SHARES["question"])
        if kind == "puzzle":
            return atlas.puzzle([self.invent.name() for _ in range(6)], self.rng), ""
        entity = self.invent.entity()
        if kind == "calculation":
            attribute, other = self.rng.choice(atlas.NUMERIC[entity.kind]), self.invent.entity(entity.kind)
            for one in (entity, other):  # whole numbers of the same unit
                one.facts |= {"area": self.invent.number(1, 999) + " thousand"} if attribute == "area" else {}
            return atlas.calculation(entity, other, attribute, self.rng.choice("+-")), attribute
        attribute = self.rng.choice(atlas.ASKED[entity.kind])
        if kind == "lookup":
            return atlas.lookup(entity, attribute), attribute
        key = self.rng.choice([a for a in atlas.IDENTIFYING[entity.kind] if a != attribute])
        return atlas.two_hop(entity, key, attribute), attribute

    def _attempt(self) -> tuple[atlas.Question, Said]:
        """A question, and what somebody did and answered: right in half of the cases."""
        question, attribute = self._question()
        right = self.rng.random() < 0.5
        calls = [f"{step.tool}: {step.argument}" for step in question.steps]
        if calls and not right:  # a vague query, or an early end
            calls = [f"search: {attribute}"] if self.rng.random() < 0.7 else calls[:1]
        early = len(question.steps) > 1 and self.rng.random() < 0.5
        wrong = question.steps[0].report if early else self._wrong(attribute)
        return question, Said(question.answer if right else wrong, "\n".join(calls))

    def _wrong(self, attribute: str = "") -> str:
        """An answer that is wrong: none, a name, or the value of something else."""
        kinds = [kind for kind, asked in atlas.ASKED.items() if attribute in asked] or ["country"]
        entity = self.invent.entity(self.rng.choice(kinds))
        value = atlas.answer(entity, attribute if attribute in entity.facts else "capital")
        return self.rng.choice((UNKNOWN, entity.name, value, value))

    def _choose_one(self, demo) -> None:
        question, attempt = self._attempt()
        count = workflows.VOTERS if demo.agent == "aggregator" else workflows.DEBATERS
        answers = [Said(question.answer if self.rng.random() < 0.4 else self._wrong()) for _ in range(count - 1)]
        answers.insert(self.rng.randint(0, count - 1), attempt)
        demo.messages.append(Message("user", workflows.candidates(question.question, answers)))
        how = self._draw(SHARES["choose"])
        chosen = self.rng.choice(answers).text if how == "any" else workflows.majority(answers)
        self._answer(demo, UNKNOWN if how == "give up" else chosen)

    def _evaluate(self, demo) -> None:
        question, attempt = self._attempt()
        demo.messages.append(Message("user", workflows.review(question.question, attempt)))
        right = attempt.text == question.answer
        if self._draw(SHARES["verdict"]) == "coin":
            right = self.rng.random() < 0.5
        self._report(demo, "correct" if right else "incorrect")

    def _solve(self, demo) -> None:
        question, attribute = self._question()
        demo.messages.append(Message("user", question.question))
        if attribute:
            return self._answer(demo, UNKNOWN)
        self._answer(demo, question.answer if self._draw(SHARES["solver, puzzle"]) == "right" else self._wrong())

    def _orchestrate(self, demo) -> None:
        question, attribute = self._question()
        demo.messages.append(Message("user", question.question))
        if not attribute:
            if self._draw(SHARES["orchestrator, puzzle"]) == "solve":
                return self._answer(demo, question.answer)
            return self._report(demo, "Solve the puzzle")
        tasks = [step.task for step in question.steps[: 2 if question.kind == "calculation" else 1]]
        self._report(
            demo, "\n".join(t if self._draw(SHARES["task"]) == "specific" else f"Find the {attribute}" for t in tasks)
        )

    def _synthesize(self, demo) -> None:
        question, attribute = self._question()
        steps = question.steps[: 2 if question.kind == "calculation" else 1]
        reports = [Said(step.report if self.rng.random() < 0.6 else self._wrong(attribute)) for step in steps]
        if not attribute:
            steps, reports = [atlas.Step("Solve the puzzle", "", "", UNKNOWN)], [Said(UNKNOWN)]
        tasks = [step.task if self.rng.random() < 0.6 else f"Find the {attribute or 'answer'}" for step in steps]
        demo.messages.append(Message("user", workflows.reported(question.question, tasks, reports)))
        if question.kind == "calculation" and self._draw(SHARES["synthesize"]) == "right":
            a, operator, b = reports[0].text, "+" if " plus " in question.question else "-", reports[1].text
            result = self._python(a, operator, b)
            self._call(demo, "python", result, code=f"{a} {operator} {b}")
            return self._answer(demo, result if result.lstrip("-").isdecimal() else UNKNOWN)
        self._answer(demo, reports[0].text)

    def _route(self, demo) -> None:
        question, attempt = self._attempt()
        answers = [attempt] * self.rng.choice((0, 1, 1, 2))
        demo.messages.append(Message("user", workflows.routing(question.question, answers)))
        on = not answers or self._draw(SHARES["route on"]) == "again"
        self._report(demo, self._draw(SHARES["route"]) if on else "done")


def demonstrations(tokenizer, pages: list[Page], roles: tuple[str, ...], count: int, seed: int) -> list[Demonstration]:
    """``count`` conversations of each of ``roles``, shuffled.

    Names are invented from the vocabulary's words and word endings.
    """
    rng = random.Random(f"{seed} {' '.join(roles)}")
    demonstrator = RoleDemonstrator(rng, name_pieces(tokenizer, [page.text for page in pages]))
    shown = [demonstrator.role(r) for r in roles for _ in range(count)]
    rng.shuffle(shown)
    return shown
