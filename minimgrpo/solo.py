"""One agent alone: demonstrations from which its adapter learns what a conversation with all tools in one context is.

The base model has met planners and executors only. A "solo" adapter is therefore fine-tuned (``warmup.warm_up``) on
conversations in which one agent searches, reads, computes and answers, with the same deliberate mistakes in the same
shares: where the team makes two decisions (what to delegate, what to search for) it makes one, with the executor's
share; whether it goes on to the next hop or operand it decides as the planner does.
"""

from __future__ import annotations

import random

from minimgrpo import atlas
from minimgrpo.demonstrations import (
    NO_RESULTS,
    PLANNER_SHARES,
    SKILL_SHARES,
    UNKNOWN,
    Demonstration,
    Demonstrator,
    Message,
    name_pieces,
)
from minimgrpo.tools import Page

INVALID = "SyntaxError: invalid syntax"


class SoloDemonstrator(Demonstrator):
    """Writes demonstrations of the agent "solo"; otherwise as ``Demonstrator``."""

    def solo(self, kind: str | None = None) -> Demonstration:
        """One conversation about a question of ``kind``, by default one in the planner's shares."""
        demo = Demonstration("solo")
        kind = kind or self._draw(PLANNER_SHARES["question"] if self.mistakes else SKILL_SHARES)
        write = {"puzzle": self._alone_puzzle, "lookup": self._alone_lookup, "two-hop": self._alone_two_hop}
        write.get(kind, self._alone_calculation)(demo)
        return self._break_format(demo)

    def _alone_puzzle(self, demo) -> None:
        form = self._draw(PLANNER_SHARES["puzzle form"])
        question = atlas.puzzle([self.invent.name() for _ in range(6)], self.rng, form)
        demo.messages.append(Message("user", question.question))
        behaviour = self._choose("puzzle", "solve")
        if behaviour == "delegate":  # a team would; alone one searches for the puzzle
            self._call(demo, "search", NO_RESULTS, query="puzzle")
            if self._choose("after a delegated puzzle", "solve") == "report":
                return self._answer(demo, UNKNOWN)
        wrong = behaviour == "solve wrongly" and question.entities
        self._answer(demo, self.rng.choice(question.entities) if wrong else question.answer)

    def _alone_lookup(self, demo) -> None:
        entity = self.invent.entity()
        attribute = self.rng.choice(atlas.ASKED[entity.kind])
        demo.messages.append(Message("user", atlas.lookup(entity, attribute).question))
        self._answer(demo, self._look_up(demo, entity, attribute))

    def _alone_two_hop(self, demo) -> None:
        entity = self.invent.entity()
        key = self.rng.choice(atlas.IDENTIFYING[entity.kind])
        attribute = self.rng.choice([a for a in atlas.ASKED[entity.kind] if a != key])
        demo.messages.append(Message("user", atlas.two_hop(entity, key, attribute).question))
        found = self._search(demo, entity, key, f"{key} {entity.facts[key]}")
        if found is None:
            return self._answer(demo, UNKNOWN)
        behaviour = self._choose("second hop", "specific")
        if behaviour == "stop here":
            return self._answer(demo, found.name)
        knows = self._choose("after identify", "right") == "right"  # else it searches for what it knew already
        name = found.name if knows else entity.facts[key]
        query = f"{attribute} {name}" if behaviour == "specific" else attribute
        found = found if knows and behaviour == "specific" else self.invent.entity(entity.kind)
        self._call(demo, "search", self._found(found, attribute), query=query)
        self._answer(demo, self._read(demo, found, attribute))

    def _alone_calculation(self, demo) -> None:
        left = self.invent.entity()
        right = self.invent.entity(left.kind)
        attribute, operator = self.rng.choice(atlas.NUMERIC[left.kind]), self.rng.choice("+-")
        if attribute == "area":  # whole numbers of the same unit
            for entity in (left, right):
                entity.facts["area"] = self.invent.number(1, 999) + " thousand"
        demo.messages.append(Message("user", atlas.calculation(left, right, attribute, operator).question))
        a = self._look_up(demo, left, attribute)
        if a == UNKNOWN or self._choose("second operand", "specific") == "stop here":
            return self._answer(demo, a)
        b = self._look_up(demo, right, attribute)
        behaviour = self._choose("compute", "right")
        if b == UNKNOWN or behaviour == "stop here":
            return self._answer(demo, b)
        operator = operator if behaviour == "right" else {"+": "-", "-": "+"}[operator]
        code, tool = f"{a} {operator} {b}", self._choose("compute task", "python")
        if tool == "guess":
            return self._answer(demo, self.rng.choice((a, b)))
        if tool == "search":
            self._call(demo, "search", NO_RESULTS, query=code)
            return self._answer(demo, self.rng.choice((a, b, UNKNOWN)))
        result = self._python(a, operator, b)
        self._call(demo, "python", result, code=code)
        self._answer(demo, result if self._choose("after python", "right") == "right" else self.rng.choice((a, b)))

    def _look_up(self, demo, entity, attribute) -> str:
        """Search for one fact -> what it reads there, ``UNKNOWN`` when it gave up."""
        found = self._search(demo, entity, attribute, f"{attribute} {entity.name}")
        return UNKNOWN if found is None else self._read(demo, found, attribute)

    def _search(self, demo, entity, attribute, query) -> atlas.Entity | None:
        """One query -> the entity whose page came up, None when it gave up."""
        behaviour = self._choose("query", "specific")
        if behaviour == "give up":
            return None
        if behaviour == "wrong tool":
            known = f"NameError: name '{attribute}' is not defined"
            self._call(demo, "python", INVALID if " " in attribute else known, code=attribute)
            return None
        found = entity if behaviour == "specific" else self.invent.entity(entity.kind)
        query = query if behaviour == "specific" else attribute
        self._call(demo, "search", self._found(found, attribute), query=query)
        return found

    def _read(self, demo, found, attribute) -> str:
        """What it takes from the page that came up, after a visit perhaps."""
        behaviour = self._choose("after search", "right")
        if behaviour == "visit":
            page_id = demo.messages[-1].content.partition("[id ")[2].partition("]")[0]
            self._call(demo, "visit", atlas.page_text(found), id=page_id)
            behaviour = self._choose("after visit", "right")
        if behaviour == "title":
            return found.name
        if behaviour == "right":
            return atlas.answer(found, attribute)
        return atlas.answer(found, self.rng.choice([a for a in atlas.ASKED[found.kind] if a != attribute]))

    def _python(self, a: str, operator: str, b: str) -> str:
        """What Python says to the calculation; a title is no number."""
        if a.isdecimal() and b.isdecimal():
            return str(int(a) + int(b) if operator == "+" else int(a) - int(b))
        return INVALID


def demonstrations(tokenizer, pages: list[Page], count: int, seed: int, **shown: int) -> list[Demonstration]:
    """``count`` conversations with mistakes, about names invented from the vocabulary's words, as the base saw them.

    ``shown``: ``hits`` and ``sentences`` of a search's result. 1,500 of them (30 s of one core, at a learning rate of
    3e-3) bring atlas-lm to about the accuracy that the untrained team has.
    """
    pieces = name_pieces(tokenizer, [page.text for page in pages])
    demonstrator = SoloDemonstrator(random.Random(f"{seed} solo"), pieces, **shown)
    return [demonstrator.solo() for _ in range(count)]
