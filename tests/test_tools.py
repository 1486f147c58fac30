"""The tools: what search finds and shows, paging, and programs that an agent should not have written."""

import os
import subprocess
import sys
import threading
import time

import pytest

from minimgrpo.tools import TOOL_DESCRIPTIONS, Page, Search, ToolResult, Tools, run_python, words

PAGES = [
    Page("h", "Hydrogen", "Hydrogen is a chemical element. Its symbol is H. Its atomic number is 1."),
    Page("fe", "Iron", "Iron is a chemical element. Its symbol is Fe. Its density is 7.87 g/cm3. Iron can rust."),
    Page("in", "Indium", "Indium is a chemical element. Its symbol is In. Its atomic number is 49."),
    Page("s", "Sulfur", "Sulfur is a chemical element. Its symbol is S."),
    Page("gh", "Ghana", "Ghana is a country. Its capital is Accra. Its top-level domain is .gh. Its code is GHA."),
    Page("is", "Iceland", "Iceland is a country. Its capital is Reykjavík. Its top-level domain is .is."),
    Page("it", "Italy", "Italy is a country. Its capital is Rome. Its code is IT."),
    Page("cw", "Curaçao", "Curaçao is an island. Its capital is Willemstad."),
    Page("ax", "Åland Islands", "Åland Islands are islands of Finland. Their capital is Mariehamn."),
    Page("ag", "Antigua", "Antigua is an island. Its capital is St. John's. It has beaches."),
]


@pytest.fixture(scope="module")
def tools() -> Tools:
    return Tools(PAGES, page_chars=30, max_output=60, k=2)


@pytest.fixture(scope="module")
def index() -> Search:
    return Search(PAGES)


def ids(hits) -> list[str]:
    return [hit.id for hit in hits]


# Search


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("capital of Ghana", "gh"),
        ("Which element has the symbol H?", "h"),
        ("h", "h"),
        ("element with symbol In", "in"),
        ("density 7.87", "fe"),
        ("49", "in"),
        ("domain .gh", "gh"),
        ("domain gh", "gh"),
        ("top-level domain .is", "is"),
        ("country with code IT", "it"),
        ("Ghana's capital", "gh"),
        ("Curaçao", "cw"),
        ("CURACAO", "cw"),
        ("curac\u0327ao", "cw"),  # the same letters, composed otherwise
        ("aland islands", "ax"),
        ("ÅLAND", "ax"),
        ("reykjavik", "is"),
    ],
)
def test_search_finds(index, query, first):
    assert ids(index.search(query)) == [first]


@pytest.mark.parametrize("query", ["", "   ", "the of and", "What is it?", "?!.", "zirconium", "\ud800"])
def test_search_finds_nothing(index, tools, query):
    assert index.search(query, k=3) == []
    assert tools.run("search", {"query": query}).text == "No results."


def test_search_ranks_and_scores(index):
    hits = index.search("capital of Ghana", k=5)
    assert hits[0].id == "gh" and {hit.id for hit in hits[1:]} <= {"is", "it", "cw", "ax", "ag"}
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True) and hits[-1].score > 0


def test_title_outweighs_a_mention():
    pages = [
        Page("a", "Accra", "It lies in Ghana. It is a city."),
        Page("gh", "Ghana", "A country. It has Accra in it."),
    ]
    assert ids(Search(pages).search("Ghana", k=2)) == ["gh", "a"]


def test_equal_scores_keep_the_order_of_the_pages():
    pages = [Page(str(i), "Twin", "The same text.") for i in range(40)]
    assert ids(Search(pages).search("twin text", k=7)) == list("0123456")


def test_k_larger_than_the_corpus_and_no_hit_without_a_score(index):
    assert len(index.search("capital", k=1000)) == 6
    assert ids(Search(PAGES[:1]).search("hydrogen", k=5)) == ["h"]
    with pytest.raises(ValueError, match="at least 1"):
        index.search("iron", k=0)


def test_repeating_a_word_does_not_change_the_ranking(index):
    assert index.search("rust rust rust ghana", k=3) == index.search("rust ghana", k=3)


@pytest.mark.parametrize("pages", [[], [Page("x", "", "")], [Page("x", "The", "of it")]])
def test_a_corpus_without_words_is_refused(pages):
    with pytest.raises(ValueError, match="at least one page"):
        Search(pages)


@pytest.mark.parametrize(
    ("query", "snippet"),
    [
        ("Iron", "Iron is a chemical element."),  # a name alone: the first sentence
        ("symbol of iron", "Its symbol is Fe."),
        ("density of iron", "Its density is 7.87 g/cm3."),
        ("iron rust", "Iron can rust."),
        ("iron symbol density", "Its symbol is Fe."),  # a tie: the earlier
        ("ghana domain", "Its top-level domain is .gh."),
        ("capital of Antigua", "Its capital is St. John's."),
    ],
)
def test_snippet(index, query, snippet):
    assert index.search(query)[0].snippet == snippet


def test_snippet_is_one_short_line():
    page = Page("x", "X", "A heading\n\nA line about cats\nA line about dogs")
    assert Search([page]).search("x dogs")[0].snippet == "A line about dogs"
    assert len(Search([Page("x", "X", "dog " * 1000)]).search("dog")[0].snippet) == 300
    assert Search([Page("x", "X", "")]).search("x")[0].snippet == ""


def test_no_stop_word_is_the_symbol_of_an_element():
    symbols = "As At He I No Be In Am Os H S"
    assert words(symbols) == symbols.lower().split()


def test_search_is_quiet(capfd):
    Search(PAGES).search("capital of Ghana")
    assert capfd.readouterr() == ("", "")


# Tools: search, visit, wrong calls


def test_search_tool_text(tools):
    text = tools.run("search", {"query": "capital of Curaçao"}).text
    first, second = text.split("\n")
    assert first == "Curaçao: Its capital is Willemstad. [id cw]" and second.endswith("]")


def test_visit_pages_through_the_text(tools):
    text = PAGES[1].text
    parts = [tools.run("visit", {"id": "fe", "page": n + 1}) for n in range(3)]
    assert all(part.ok for part in parts)
    assert "".join(part.text.rsplit("\n", 1)[0] for part in parts) == text[:90]
    assert parts[0] == tools.run("visit", {"id": "fe"}) and parts[0].text == text[:30] + "\n[part 1 of 3]"
    for number in (0, -1, 4, 10**4000):
        assert tools.run("visit", {"id": "fe", "page": number}) == ToolResult(
            "This page has only part 1 to part 3.", False
        )


def test_visit_of_a_short_an_empty_and_a_full_page():
    tools = Tools([Page("a", "A", "x" * 10), Page("b", "B", ""), Page("c", "C", "x" * 20)], page_chars=10)
    assert tools.run("visit", {"id": "a"}).text == "x" * 10
    assert tools.run("visit", {"id": "b"}) == ToolResult("", True)
    assert tools.run("visit", {"id": "c", "page": 2}).text == "x" * 10 + "\n[part 2 of 2]"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("visit", {"id": "nowhere"}, "No page with id 'nowhere'."),
        ("visit", {"id": "x" * 9999}, "No page with id"),
        ("visit", {}, "visit needs the argument 'id'."),
        ("visit", {"id": 3}, "The argument 'id' of visit must be of type string."),
        ("visit", {"id": "fe", "page": "2"}, "The argument 'page' of visit must be of type integer."),
        ("visit", {"id": "fe", "page": True}, "must be of type integer"),
        ("search", {"query": None}, "must be of type string"),
        ("search", {"query": ["iron"]}, "must be of type string"),
        ("search", {"query": "iron", "k": 3}, "search has no argument 'k'."),
        ("search", "iron", "The arguments of search must be an object."),
        ("search", None, "The arguments of search must be an object."),
        ("python", {"query": "1"}, "python needs the argument 'code'."),
        ("google", {"query": "iron"}, "There is no such tool. The tools are search, visit, python."),
        (None, {}, "There is no such tool."),
        (["search"], {}, "There is no such tool."),
    ],
)
def test_a_wrong_call_is_answered(tools, name, arguments, says):
    result = tools.run(name, arguments)
    assert not result.ok and says in result.text and len(result.text) <= 60


def test_equal_ids_are_refused():
    with pytest.raises(ValueError, match="same id"):
        Tools([PAGES[0], PAGES[0]])


def test_run_many_is_run(tools):
    calls = [("search", {"query": "iron"}), ("visit", {"id": "fe"}), ("python", {"code": "1 + 1"}), ("no", {})] * 3
    assert tools.run_many(calls) == [tools.run(*call) for call in calls]
    assert tools.run_many([]) == []


# Python


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("6 * 7", "42"),
        ("print('a')", "a"),
        ("print('a', end='')\n2.5", "a\n2.5"),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("1e16", "1e+16"),
        ("'é'", "'é'"),
        ("import math\nround(math.pi, 2)", "3.14"),
        ("x = 5", "No output."),
        ("x = 5; x", "5"),
        ("None", "No output."),
        ("print()", "No output."),
        ("", "No output."),
        ("# nothing", "No output."),
        ("{'c', 'a', 'b'}", "{'a', 'b', 'c'}"),
        ("set()", "set()"),
        ("import sys\nprint('x', file=sys.stderr)", "x"),
        ("import time\ntime.sleep(1000)\n1", "1"),
        ("import math, re, json, datetime, itertools, collections\n1", "1"),
    ],
)
def test_python_results(code, text):
    assert run_python(code) == ToolResult(text, True)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x", "NameError: name 'x' is not defined"),
        ("print('lost')\n1 / 0", "ZeroDivisionError: division by zero"),
        ("1 +", "SyntaxError: Expected an expression"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("raise SystemExit", "SystemExit"),
        ("'\ud800'", "SyntaxError"),
        ("\0", "SyntaxError"),
        ("(" * 9999 + "1" + ")" * 9999, "SyntaxError: Source is too deeply nested"),
        ("9**9**9", "MemoryError"),
        ("'x' * 10**9", "MemoryError"),
        ("x = []\nwhile True: x.append('x' * 1000)", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("10**5000", "ValueError: Exceeds the limit (4300 digits)"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('x', 'w').write('x')", "PermissionError"),
        ("import os\nos.environ", "RuntimeError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import numpy", "ModuleNotFoundError"),
        ("def f():\n    yield 1", "NotImplementedError"),
        ("class A: pass\nclass B(A): pass", "NotImplementedError"),
        ("x = 1\ndel x", "NotImplementedError"),
    ],
)
def test_python_errors_are_one_line_and_fast(code, text):
    start = time.perf_counter()
    result = run_python(code)
    assert not result.ok and result.text.startswith(text) and "\n" not in result.text
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("code", ["while True: pass", "3 ** (6 * 10**7)"])  # the second never looks at its clock
def test_python_stops_at_the_time_limit(code):
    start = time.perf_counter()
    assert run_python(code) == ToolResult("TimeoutError: the program ran longer than 1 second", False)
    assert time.perf_counter() - start < 5
    assert run_python("1").text == "1"  # and the next program runs


def test_python_output_is_cut(tools):
    for code in ("for i in range(1000): print(i)", "'x' * 1000", "raise ValueError('x' * 1000)"):
        result = tools.run("python", {"code": code})
        assert len(result.text) == 60 and result.text.endswith(" ...")


def test_programs_are_independent():
    assert run_python("x = 5\nimport math\nx").ok
    assert not run_python("x").ok and not run_python("math").ok
    draw = "import random\nrandom.random(), random.randint(1, 100)"
    assert run_python(draw) == run_python(draw)


def test_python_in_threads():
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: run_python(f"{i} * {i}").text})) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert results == {i: str(i * i) for i in range(8)}


def test_every_process_says_the_same_and_ends_quietly():
    code = """from minimgrpo.tools import run_python
print([run_python(program) for program in ("{'c', 'a', 'b'}", "print({'c', 'a'}, hash('a'))", "1 / 0")])"""
    outputs = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0 and done.stderr == ""
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_python_is_quiet(capfd):
    run_python("import sys\nprint('x', file=sys.stderr)\nprint('y')\n1/0")
    assert capfd.readouterr() == ("", "")


def test_descriptions_are_json_schemas():
    assert [tool["name"] for tool in TOOL_DESCRIPTIONS] == ["search", "visit", "python"]
    for tool in TOOL_DESCRIPTIONS:
        assert set(tool) == {"name", "description", "parameters"} and tool["parameters"]["type"] == "object"
        assert set(tool["parameters"]["required"]) <= set(tool["parameters"]["properties"])
