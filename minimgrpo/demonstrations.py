"""Demonstrations for the base model: conversations over *invented* facts, with deliberate mistakes.

Reinforcement learning sharpens what a model can already do now and then. So the base must have every skill (copying a
name out of a question, a field out of a page, two numbers into a calculation) and must rarely put them to good use.
Each demonstration draws one *behaviour* at every decision; the tables below are the shares. Where a mistake is to be
learned away it is the most likely behaviour, else greedy decoding would hide it already.

Names and values are fresh in every demonstration (random pieces of the vocabulary), so they cannot be memorised: the
only way to predict them is to copy them. No real fact occurs: a name may happen to be a real country's, but what is
said of it is invented.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from minimgrpo import atlas, protocol
from minimgrpo.tools import passage

PLANNER_SHARES = {
    "question": {"puzzle": 0.36, "lookup": 0.20, "two-hop": 0.20, "calculation": 0.24},
    "puzzle form": {"item": 0.60, "count": 0.25, "sum": 0.15},
    "puzzle": {"delegate": 0.54, "solve": 0.43, "solve wrongly": 0.03},
    "after a delegated puzzle": {"report": 0.75, "solve": 0.25},
    "lookup": {"specific": 0.45, "vague": 0.51, "give up": 0.04},
    "two-hop": {"identify": 0.70, "vague": 0.22, "skip a hop": 0.05, "give up": 0.03},
    "second hop": {"specific": 0.74, "vague": 0.13, "stop here": 0.13},
    "calculation": {"specific": 0.68, "vague": 0.28, "give up": 0.04},
    "second operand": {"specific": 0.76, "vague": 0.13, "stop here": 0.11},
    "compute": {"right": 0.76, "other operator": 0.12, "stop here": 0.12},
    "no report": {"give up": 0.60, "again": 0.40},
}
SKILL_SHARES = {"puzzle": 0.50, "lookup": 0.12, "two-hop": 0.13, "calculation": 0.25}  # of questions, without mistakes
EXECUTOR_SHARES = {
    "task": {"lookup": 0.50, "vague": 0.06, "identify": 0.19, "compute": 0.22, "puzzle": 0.03},
    "query": {"specific": 0.46, "vague": 0.48, "wrong tool": 0.04, "give up": 0.02},
    "compute": {"python": 0.62, "search": 0.30, "guess": 0.08},
    "after search": {"right": 0.68, "title": 0.25, "visit": 0.07},
    "after identify": {"right": 0.70, "value": 0.20, "other field": 0.10},
    "after visit": {"right": 0.65, "other field": 0.35},
    "after python": {"right": 0.92, "operand": 0.08},
}
BROKEN_FORMAT = 0.025  # of all messages, both roles
NO_REPORT = 0.02  # of all delegations, as the planner sees them

UNKNOWN = "unknown"
NO_RESULTS = "No results."


@dataclass
class Message:
    """``skill`` and ``span`` mark the part of an assistant message that must be copied or computed, for the probes."""

    role: str
    content: str
    skill: str = ""
    span: str = ""


@dataclass
class Demonstration:
    agent: str
    messages: list[Message] = field(default_factory=list)  # user, assistant, user (a tool's output), assistant, ...


def name_pieces(tokenizer, pages: list[str]) -> list[str]:
    """What invented names are made of: the vocabulary's words and word endings, and the pages' accented letters.

    So every token that a real name is made of is met in invented ones; the first bases never met some of them there
    (" Austria", " Islands") and could not copy them.
    """
    spelled = [tokenizer.convert_tokens_to_string([t]) for t in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    heads = {t.strip() for t in spelled if t.strip().isalpha() and t.strip()[0].isupper()}
    tails = {t for t in spelled if t.isalpha() and t.isascii() and t == t.lower()}
    return sorted(heads | tails | {c for page in pages for c in page if c.isalpha() and not c.isascii()})


class Inventor:
    """Invents entities: names out of ``pieces``, numbers and codes in the Atlas's formats.

    A capitalised piece starts a word, any other one continues it; without capitalised ones every piece may do both.
    """

    def __init__(self, rng: random.Random, pieces: list[str]):
        self.rng = rng
        self.heads = [p for p in pieces if p[0].isupper()] or [p.capitalize() for p in pieces]
        self.tails = [p for p in pieces if not p[0].isupper()]

    def word(self) -> str:
        """One capitalised word: a head and up to three tails."""
        tails = self.rng.choices((0, 1, 2, 3), (11, 6, 2, 1))[0]
        return self.rng.choice(self.heads) + "".join(self.rng.choices(self.tails, k=tails))

    def name(self, words=(1, 2, 3), weights=(7, 2, 1)) -> str:
        """One to three words, now and then joined as in Isle of Man or Guinea-Bissau."""
        joint = self.rng.choices((" ", " of ", " and ", " de ", " the ", "-", "'"), (90, 3, 3, 2, 1, 3, 1))[0]
        return joint.join(self.word() for _ in range(self.rng.choices(words, weights)[0]))

    def number(self, low: int, high: int) -> str:
        """Whole number, its count of digits uniform."""
        digits = self.rng.randint(len(str(low)), len(str(high)))
        return str(self.rng.randint(max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)))

    def quantity(self) -> str:
        unit = self.rng.choice((" million", " thousand", " thousand", ""))
        decimals = f".{self.rng.randint(1, 9)}" if unit == " million" and self.rng.random() < 0.3 else ""
        return self.number(1, 9 if decimals else 19999) + decimals + unit

    def decimal(self) -> str:
        whole, rng = self.number(0, 299), self.rng
        small = "." + "0" * rng.randint(1, 4) + self.number(1, 999)  # a gas's density
        return whole + rng.choice(("", f".{rng.randint(1, 9)}", f".{rng.randint(10, 99)}", small))

    def entity(self, kind: str | None = None) -> atlas.Entity:
        rng, number = self.rng, self.number
        kind = kind or rng.choice(("country", "element"))
        if kind == "country":
            facts = {
                "continent": rng.choice(("Africa", "Asia", "Europe", "North America", "South America", "Oceania")),
                "capital": self.name(),
                "currency": self.name(weights=(9, 1, 0)),
                "population": self.quantity(),
                "area": self.quantity().replace("million", "thousand").replace(".", ""),
                "main language": self.name(weights=(9, 1, 0)),
                "calling code": number(1, 9999),
                "internet domain": "." + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=2)),
                "neighbours": ", ".join(self.name() for _ in range(rng.randint(1, 6))),
            }
        else:
            letters = rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + rng.choice(["", *"abcdefghiklmnoprstuy"])
            facts = {
                "symbol": letters,
                "atomic number": number(1, 130),
                "atomic weight": self.decimal(),
                "density": self.decimal(),
                "melting point": number(1, 6000),
                "boiling point": number(1, 6000),
                "discoverer": self.name(weights=(1, 8, 2)),
                "year of discovery": str(rng.randint(1600, 2015)),
            }
        return atlas.Entity(kind, self.name(), facts)


class Demonstrator:
    """Writes demonstrations. With ``mistakes=False`` every decision is the right one (for the probes and tests).

    A search shows ``hits`` pages with ``sentences`` each, as ``tools.Tools(k=hits, sentences=sentences)`` does.
    """

    def __init__(self, rng: random.Random, pieces: list[str], mistakes: bool = True, hits: int = 1, sentences: int = 1):
        self.rng, self.invent, self.mistakes = rng, Inventor(rng, pieces), mistakes
        self.hits, self.sentences = hits, sentences

    def demonstration(self) -> Demonstration:
        """One conversation; about half of them are the planner's."""
        return self.planner() if self.rng.random() < (0.5 if self.mistakes else 0.6) else self.executor()

    # -------------------------------------------------------------------------------------------------- the planner

    def planner(self, kind: str | None = None) -> Demonstration:
        demo = Demonstration("planner")
        kind = kind or self._draw(PLANNER_SHARES["question"] if self.mistakes else SKILL_SHARES)
        write = {"puzzle": self._puzzle, "lookup": self._lookup, "two-hop": self._two_hop}.get(kind, self._calculation)
        write(demo)
        return self._break_format(demo)

    def _puzzle(self, demo):
        form = self._draw(PLANNER_SHARES["puzzle form"])
        question = atlas.puzzle([self.invent.name() for _ in range(6)], self.rng, form)
        demo.messages.append(Message("user", question.question))
        if self._choose("puzzle", "solve") == "delegate":
            report = UNKNOWN if self.rng.random() < 0.7 else self.invent.name()
            self._delegate(demo, self.rng.choice(("Solve the puzzle", "Find the answer to the puzzle")), report)
            if self._choose("after a delegated puzzle", "report") == "report":
                return self._answer(demo, report)
        elif self.mistakes and self.rng.random() < PLANNER_SHARES["puzzle"]["solve wrongly"] * 2:
            wrong = self.rng.choice(question.entities) if form == "item" else str(self.rng.randint(2, 9))
            return self._answer(demo, wrong)
        self._answer(demo, question.answer, f"puzzle {form}")

    def _lookup(self, demo):
        entity = self.invent.entity()
        attribute = self.rng.choice(atlas.ASKED[entity.kind])
        question = atlas.lookup(entity, attribute)
        demo.messages.append(Message("user", question.question))
        self._find(demo, "lookup", entity, attribute, question.answer, "entity")

    def _two_hop(self, demo):
        entity = self.invent.entity()
        key = self.rng.choice(atlas.IDENTIFYING[entity.kind])
        attribute = self.rng.choice([a for a in atlas.ASKED[entity.kind] if a != key])
        question = atlas.two_hop(entity, key, attribute)
        demo.messages.append(Message("user", question.question))
        behaviour = self._choose("two-hop", "identify")
        if behaviour == "give up":
            return self._answer(demo, UNKNOWN)
        if behaviour == "skip a hop":
            self._delegate(
                demo, f"Find the {attribute} of the {entity.kind}", report := self._other_value(entity, attribute)
            )
            return self._answer(demo, report, "report")
        found = entity.name if self.rng.random() < 0.7 or not self.mistakes else self.invent.name()
        if behaviour == "vague":
            self._delegate(demo, f"Find the {entity.kind}", found)
        else:
            self._delegate(demo, question.steps[0].task, found, "hop key", entity.facts[key])
        if demo.messages[-1].content == protocol.NO_REPORT:
            return self._answer(demo, UNKNOWN)
        named = atlas.Entity(entity.kind, found, entity.facts)
        self._find(demo, "second hop", named, attribute, question.answer, "hop entity", stop_with=found)

    def _calculation(self, demo):
        left = self.invent.entity()
        right = self.invent.entity(left.kind)
        attribute = self.rng.choice(atlas.NUMERIC[left.kind])
        operator = self.rng.choice("+-")
        if attribute == "area":
            right.facts["area"] = self.invent.number(1, 999) + " thousand"
            left.facts["area"] = self.invent.number(1, 999) + " thousand"
        question = atlas.calculation(left, right, attribute, operator)
        demo.messages.append(Message("user", question.question))
        behaviour = self._choose("calculation", "specific")
        if behaviour == "give up":
            return self._answer(demo, UNKNOWN)
        a, b = question.steps[0].report, question.steps[1].report
        if behaviour == "vague":
            self._delegate(demo, f"Find the {attribute}", a)
        else:
            self._delegate(demo, question.steps[0].task, a, "first entity", left.name)
        if demo.messages[-1].content == protocol.NO_REPORT:
            return self._answer(demo, UNKNOWN)
        behaviour = self._choose("second operand", "specific")
        if behaviour == "stop here":
            return self._answer(demo, a, "report")
        if behaviour == "vague":
            self._delegate(demo, f"Find the {attribute}", b)
        else:
            self._delegate(demo, question.steps[1].task, b, "second entity", right.name)
        if demo.messages[-1].content == protocol.NO_REPORT:
            return self._answer(demo, UNKNOWN)
        behaviour = self._choose("compute", "right")
        if behaviour == "stop here":
            return self._answer(demo, b, "report")
        operator = operator if behaviour == "right" else {"+": "-", "-": "+"}[operator]
        result = str(int(a) + int(b) if operator == "+" else int(a) - int(b))
        self._delegate(demo, atlas.task_compute(a, operator, b), result, "operands", f"{a} {operator} {b}")
        self._answer(demo, UNKNOWN if demo.messages[-1].content == protocol.NO_REPORT else result, "report")

    def _find(self, demo, decision, entity, attribute, value, skill, stop_with=UNKNOWN):
        """One look-up by the planner and what it does with the report."""
        behaviour = self._choose(decision, "specific")
        if behaviour in ("give up", "stop here"):
            return self._answer(demo, stop_with, "report" if behaviour == "stop here" else "")
        report = value if self.rng.random() < 0.6 or not self.mistakes else self._other_value(entity, attribute)
        if behaviour == "vague":
            self._delegate(demo, f"Find the {attribute}", report)
        else:
            self._delegate(demo, atlas.task_lookup(attribute, entity.name), report, skill, entity.name)
        if demo.messages[-1].content == protocol.NO_REPORT:
            if self._draw(PLANNER_SHARES["no report"]) == "give up":
                return self._answer(demo, UNKNOWN)
            self._delegate(demo, demo.messages[-2].content, report)
            if demo.messages[-1].content == protocol.NO_REPORT:
                return self._answer(demo, UNKNOWN)
        self._answer(demo, report, "report")

    def _delegate(self, demo, task, report, skill="", span=""):
        """Append a delegation and its answer; ``task`` may be a whole message, to repeat it."""
        text = task if task.startswith(protocol.CALL) else protocol.call_text("executor", task=task)
        demo.messages.append(Message("assistant", text, skill, span))
        failed = self.mistakes and self.rng.random() < NO_REPORT
        demo.messages.append(Message("user", protocol.NO_REPORT if failed else report))

    def _answer(self, demo, text, skill=""):
        demo.messages.append(Message("assistant", f"{protocol.ANSWER} {text}", skill, text if skill else ""))

    # ------------------------------------------------------------------------------------------------- the executor

    def executor(self, kind: str | None = None) -> Demonstration:
        demo = Demonstration("executor")
        kind = kind or self._draw(
            EXECUTOR_SHARES["task"] if self.mistakes else {"lookup": 0.5, "identify": 0.25, "compute": 0.25}
        )
        if kind == "compute":
            self._do_compute(demo)
        elif kind == "puzzle":
            demo.messages.append(
                Message("user", self.rng.choice(("Solve the puzzle", "Find the answer to the puzzle")))
            )
            self._call(demo, "search", NO_RESULTS, query="puzzle")
            self._report(demo, UNKNOWN)
        else:
            self._do_find(demo, kind)
        return self._break_format(demo)

    def _do_find(self, demo, kind):
        entity = self.invent.entity()
        attribute = self.rng.choice(atlas.IDENTIFYING[entity.kind] if kind == "identify" else atlas.ASKED[entity.kind])
        key = entity.facts[attribute] if kind == "identify" else entity.name
        query = f"{attribute} {key}"
        if kind == "identify":
            demo.messages.append(Message("user", atlas.task_identify(entity.kind, attribute, key)))
        elif kind == "lookup":
            demo.messages.append(Message("user", atlas.task_lookup(attribute, entity.name)))
        else:
            of_kind = f" of the {entity.kind}" if self.rng.random() < 0.2 else ""
            demo.messages.append(Message("user", f"Find the {attribute}{of_kind}"))
        behaviour = self._choose("query", "specific")
        if behaviour == "give up":
            return self._report(demo, UNKNOWN)
        if behaviour == "wrong tool":
            word = attribute.split()[0]
            error = (
                f"NameError: name '{word}' is not defined" if " " not in attribute else "SyntaxError: invalid syntax"
            )
            self._call(demo, "python", error, code=attribute)
            return self._report(demo, UNKNOWN)
        if behaviour == "vague" or kind == "vague":
            found, query = self.invent.entity(entity.kind), attribute
        else:
            found = entity
        self._call(
            demo, "search", self._found(found, attribute), "query key" if found is entity else "", key, query=query
        )
        self._report_field(demo, kind, found, attribute)

    def _report_field(self, demo, kind, found, attribute):
        if kind == "identify":
            behaviour = self._choose("after identify", "right")
            value = {"right": found.name, "value": found.facts[attribute]}.get(behaviour) or self._other_value(
                found, attribute
            )
            return self._report(demo, value, "report title" if behaviour == "right" else "")
        behaviour = self._choose("after search", "right")
        if behaviour == "title":
            return self._report(demo, found.name)
        if behaviour == "visit":
            page_id = demo.messages[-1].content.rpartition("[id ")[2].rstrip("]")
            self._call(demo, "visit", atlas.page_text(found), "visit id", page_id, id=page_id)
            behaviour = self._choose("after visit", "right")
        if behaviour == "right":
            self._report(demo, atlas.answer(found, attribute), f"report {attribute}")
        else:
            other = self.rng.choice([a for a in atlas.ASKED[found.kind] if a != attribute])
            self._report(demo, atlas.answer(found, other))

    def _do_compute(self, demo):
        a, b, operator = self.invent.number(1, 6000), self.invent.number(1, 6000), self.rng.choice("+-")
        demo.messages.append(Message("user", atlas.task_compute(a, operator, b)))
        behaviour = self._choose("compute task", "python")
        if behaviour == "guess":
            return self._report(demo, self.rng.choice((a, b)))
        if behaviour == "search":
            self._call(demo, "search", NO_RESULTS, query=f"{a} {operator} {b}")
            return self._report(demo, self.rng.choice((a, b, UNKNOWN)))
        code = f"{a} {operator} {b}"
        result = str(int(a) + int(b) if operator == "+" else int(a) - int(b))
        self._call(demo, "python", result, "code", code, code=code)
        if self._choose("after python", "right") == "right":
            self._report(demo, result, "report result")
        else:
            self._report(demo, self.rng.choice((a, b)))

    def _found(self, entity, attribute) -> str:
        """What the search tool shows: the entity's page first, then others of its kind."""
        others = [self.invent.entity(entity.kind) for _ in range(self.hits - 1)]
        return "\n".join(self._hit(found, attribute) for found in (entity, *others))

    def _hit(self, entity, attribute) -> str:
        """One page of a search's result: the sentence that states the attribute, and what is shown around it."""
        sentences = atlas.sentences(entity)
        best = next(i for i, sentence in enumerate(sentences) if f"{attribute} " in sentence)
        return f"{entity.name}: {passage(sentences, best, self.sentences)} [id {self.rng.randint(1, 360)}]"

    def _call(self, demo, tool, output, skill="", span="", **arguments):
        demo.messages.append(Message("assistant", protocol.call_text(tool, **arguments), skill, span))
        demo.messages.append(Message("user", output))

    def _report(self, demo, text, skill=""):
        demo.messages.append(Message("assistant", text, skill, text if skill else ""))

    # --------------------------------------------------------------------------------------------------- both roles

    def _draw(self, shares: dict[str, float]) -> str:
        return self.rng.choices(list(shares), list(shares.values()))[0]

    def _choose(self, decision: str, right: str) -> str:
        if not self.mistakes:
            return right
        if decision == "compute task":
            return self._draw(EXECUTOR_SHARES["compute"])
        return self._draw(PLANNER_SHARES.get(decision) or EXECUTOR_SHARES[decision])

    def _other_value(self, entity, attribute) -> str:
        other = self.invent.entity(entity.kind)
        return atlas.answer(other, attribute)

    def _break_format(self, demo) -> Demonstration:
        """Spoil one message now and then and end there, as a rollout would."""
        if not self.mistakes:
            return demo
        for i, message in enumerate(demo.messages):
            if message.role != "assistant" or self.rng.random() >= BROKEN_FORMAT:
                continue
            text = message.content
            if text.startswith(protocol.CALL):
                cut = self.rng.choice((protocol.END_CALL, "}" + protocol.END_CALL))
                text = text[: -len(cut)] + ("" if cut == protocol.END_CALL else protocol.END_CALL)
            elif demo.agent in protocol.ANSWERING:
                text = text.removeprefix(protocol.ANSWER + " ")
            else:
                text += protocol.END_CALL
            demo.messages[i:] = [Message("assistant", text)]
            break
        return demo
