"""The language of the Atlas: how a fact becomes a sentence, a question, and the steps that answer it.

The Atlas is a small world of real facts about countries and chemical elements. Three programs speak its language and
share this one grammar: ``data/atlas/build.py`` writes the pages and the questions from real facts, ``pretrain`` writes
demonstrations from *invented* facts, and the tests run a scripted team that follows each question's steps. Nothing here
knows a model or a tool.

======  ===========  ==============================================================  =================================
level   kind         example                                                         what it takes
======  ===========  ==============================================================  =================================
1       puzzle       What is the second item of this list: 1 Chad, 2 Iran?           no tool: the planner can see it
1       lookup       What is the capital of Ghana?                                   one delegation
2       two-hop      What is the currency of the country whose capital is Accra?     two delegations, one after another
3       calculation  What is the melting point of Iron minus that of Gold? (roughly) two look-ups and a calculation
======  ===========  ==============================================================  =================================

Numbers are rounded in the page's own text ("33 million") and a question names the unit, so every answer is short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

UNITS = {"million": "in millions", "thousand": "in thousands"}

# Sentences of a page, one fact each, so that the sentence a search shows holds one value besides the title.
# "{name}" is the entity, "{x y}" the fact "x y".
SENTENCES = {
    "country": (
        "{name} is a country in {continent}.",
        "Its capital is {capital}.",
        "Its currency is the {currency}.",
        "Its population is {population}.",
        "Its area is {area} square kilometres.",
        "Its main language is {main language}.",
        "Its internet domain is {internet domain}.",
        "Its calling code is {calling code}.",
        "Its neighbours are {neighbours}.",
    ),
    "element": (
        "{name} is a chemical element.",
        "Its symbol is {symbol}.",
        "Its atomic number is {atomic number}.",
        "Its atomic weight is {atomic weight}.",
        "Its density is {density} grams per cubic centimetre.",
        "Its melting point is {melting point} kelvin.",
        "Its boiling point is {boiling point} kelvin.",
        "Its discoverer is {discoverer}.",
        "Its year of discovery is {year of discovery}.",
    ),
}

# What may be asked about, what identifies an entity in a two-hop question, and what may be calculated with.
ASKED = {
    "country": ("capital", "currency", "population", "area", "main language", "calling code", "internet domain"),
    "element": (
        *("symbol", "atomic number", "atomic weight", "density"),
        *("melting point", "boiling point", "discoverer", "year of discovery"),
    ),
}
IDENTIFYING = {"country": ("capital", "internet domain", "calling code"), "element": ("symbol", "atomic number")}
NUMERIC = {
    "country": ("area", "calling code"),
    "element": ("atomic number", "melting point", "boiling point", "year of discovery"),
}

ORDINALS = ("first", "second", "third", "last")


@dataclass
class Entity:
    """One page's subject: ``facts`` maps an attribute ("calling code") to its value as the page prints it ("233")."""

    kind: str
    name: str
    facts: dict[str, str]


@dataclass
class Step:
    """One delegation that a correct team makes: the planner's ``task``, the executor's tool call, its ``report``."""

    task: str
    tool: str
    argument: str
    report: str


@dataclass
class Question:
    """A question with its gold ``answer``. ``keys`` are the names a search query must contain to be *specific*."""

    kind: str
    level: int
    question: str
    answer: str
    entities: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------- pages


def sentences(entity: Entity) -> list[str]:
    """The page's sentences. One whose facts are not all known is left out."""
    out = []
    for template in SENTENCES[entity.kind]:
        text = template.replace("{name}", entity.name)
        for attribute, value in entity.facts.items():
            text = text.replace("{" + attribute + "}", value)
        if "{" not in text:
            out.append(text)
    return out


def page_text(entity: Entity) -> str:
    """The page's text: its sentences, one after the other."""
    return " ".join(sentences(entity))


def answer(entity: Entity, attribute: str) -> str:
    """The gold answer: the value without its unit, which the question names.

    >>> answer(Entity("country", "Ghana", {"population": "33 million"}), "population")
    '33'
    """
    value, _, unit = entity.facts[attribute].rpartition(" ")
    return value if unit in UNITS else entity.facts[attribute]


def asked(entity: Entity, attribute: str) -> str:
    """The attribute as a question names it, with its unit.

    >>> asked(Entity("country", "Ghana", {"population": "33 million"}), "population")
    'population in millions'
    """
    unit = entity.facts[attribute].rpartition(" ")[2]
    return f"{attribute} {UNITS[unit]}" if unit in UNITS else attribute


# ------------------------------------------------------------------------------------ what the agents say to each other


def task_lookup(attribute: str, name: str) -> str:
    """The planner's sub-task for one fact."""
    return f"Find the {attribute} of {name}"


def task_identify(kind: str, attribute: str, value: str) -> str:
    """The planner's sub-task for the first hop of a two-hop question."""
    return f"Find the {kind} whose {attribute} is {value}"


def task_compute(left: str, operator: str, right: str) -> str:
    """The planner's sub-task for a calculation."""
    return f"Compute {left} {operator} {right}"


# --------------------------------------------------------------------------------------------------------- questions


def lookup(entity: Entity, attribute: str) -> Question:
    """Level 1: one fact of one entity."""
    step = Step(task_lookup(attribute, entity.name), "search", f"{attribute} {entity.name}", answer(entity, attribute))
    text = f"What is the {asked(entity, attribute)} of {entity.name}?"
    return Question("lookup", 1, text, step.report, [entity.name], [entity.name], [step])


def two_hop(entity: Entity, key: str, attribute: str) -> Question:
    """Level 2: a fact of the entity that another fact identifies."""
    value = entity.facts[key]
    first = Step(task_identify(entity.kind, key, value), "search", f"{key} {value}", entity.name)
    second = Step(
        task_lookup(attribute, entity.name), "search", f"{attribute} {entity.name}", answer(entity, attribute)
    )
    text = f"What is the {asked(entity, attribute)} of the {entity.kind} whose {key} is {value}?"
    return Question("two-hop", 2, text, second.report, [entity.name], [value, entity.name], [first, second])


def calculation(left: Entity, right: Entity, attribute: str, operator: str) -> Question:
    """Level 3: two look-ups and a sum ("+") or a difference ("-") of whole numbers."""
    a, b = answer(left, attribute), answer(right, attribute)
    result = str(int(a) + int(b) if operator == "+" else int(a) - int(b))
    word = {"+": "plus", "-": "minus"}[operator]
    steps = [
        Step(task_lookup(attribute, left.name), "search", f"{attribute} {left.name}", a),
        Step(task_lookup(attribute, right.name), "search", f"{attribute} {right.name}", b),
        Step(task_compute(a, operator, b), "python", f"{a} {operator} {b}", result),
    ]
    text = f"What is the {asked(left, attribute)} of {left.name} {word} that of {right.name}?"
    names = [left.name, right.name]
    return Question("calculation", 3, text, result, names, names, steps)


def puzzle(names: list[str], rng: random.Random, form: str | None = None) -> Question:
    """Level 1: a puzzle whose answer stands in the question; ``names`` are the entities its list may use.

    Half are the n-th item of a numbered list, a quarter the length of a list, a quarter a sum of two one-digit numbers.
    """
    form = form or rng.choice(("item", "item", "count", "sum"))
    if form == "sum":
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        return Question("puzzle", 1, f"What is {a} plus {b}?", str(a + b))
    items = rng.sample(names, rng.randint(3, 5) if form == "item" else rng.randint(2, 6))
    listed = ", ".join(items)
    if form == "count":
        return Question("puzzle", 1, f"How many items are in this list: {listed}?", str(len(items)), items)
    ordinal = rng.choice(ORDINALS)
    chosen = items[ORDINALS.index(ordinal) if ordinal != "last" else -1]
    numbered = ", ".join(f"{n} {item}" for n, item in enumerate(items, 1))
    return Question("puzzle", 1, f"What is the {ordinal} item of this list: {numbered}?", chosen, items)
