"""The executor's three tools: search a corpus, visit a page, run Python (and a fourth: read an attached file).

Every call gives a ToolResult: a failure is text that the agent reads, and nothing an agent writes raises an exception.
The same call gives the same text in every process, so that a run which was killed and continued sees what it would have
seen (exceptions: a program that reads the clock, or that runs for about as long as it may).

- Search is BM25 (bm25s, no stemmer) with its own tokenizer: one-letter words and numbers stay, since pages about
  elements and countries are full of them; case and accents are folded on both sides, so 'curacao' finds Curaçao.
- A hit shows one sentence of its page: the one that says most of what the query asks beyond the page's name.
- Python runs in pydantic-monty: an interpreter for a subset of the language, in worker processes, without files or
  network, limited in time and memory. It hangs in a forked process: once a program has run, start processes by 'spawn'.
"""

import functools
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import bm25s
import numpy as np
from pydantic_monty import CollectString, Monty, MontyCrashedError, MontyRuntimeError, MontySyntaxError

from minimgrpo import readers

# None of these is the symbol of a chemical element: as (arsenic), at, be, he, i, in, no, am and os are left to BM25,
# which gives next to no weight to a word that most pages have.
STOP_WORD = re.compile(
    "a|an|and|are|by|find|for|from|has|have|is|it|its|of|on|or|that|the|this|to|was|were|what|which|who|whose|with"
)
# A number with its decimals, or a word with a dot in front ('.gh'). A possessive 's is dropped: 's' is sulfur.
WORD = re.compile(r"(\d+\.\d+|(?:(?<!\w)\.)?\w+)(?:['’]s\b)?")
# After a mark and before a space, so that '7.87' and '.gh' stay whole, and so does 'St. John'; or at a line's end.
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\bSt\.)\s+|\n+")
SNIPPET_CHARS = 300

PYTHON_LIMITS = {"max_feed_duration_secs": 1.0, "max_memory": 64 * 2**20, "max_recursion_depth": 200}
PYTHON_POLICY = {"sleep": "zero", "random_start": {"seed": 0}}  # time.sleep returns at once, `random` repeats itself
TOO_SLOW = "TimeoutError: the program ran longer than 1 second"  # monty's own text holds the measured time


def _tool(name: str, description: str, required: str, **properties: dict) -> dict:
    schema = {"type": "object", "properties": properties, "required": [required]}
    return {"name": name, "description": description, "parameters": schema}


TOOL_DESCRIPTIONS = [
    _tool(
        "search",
        "Search the pages. A result is one line: the page's title, the sentence that fits best, the page's id.",
        required="query",
        query={"type": "string", "description": "the words to look for"},
    ),
    _tool(
        "visit",
        "Read a page. A long one comes in parts, and its last line says which part of how many this is.",
        required="id",
        id={"type": "string", "description": "the page's id, as search shows it"},
        page={"type": "integer", "description": "the part, from 1; 1 if left out"},
    ),
    _tool(
        "python",
        "Run a program and read what it prints and the value of its last expression. It is a subset of Python: "
        "no yield, no class inheritance, no del, no numpy, no files, no network. The modules math, re, json, datetime, "
        "itertools and collections are there. A program ends after 1 second, and nothing is kept for the next one.",
        required="code",
        code={"type": "string", "description": "the program"},
    ),
]
READ_FILE = _tool(
    "read_file",
    "Read a file that is attached to the question. A long one comes in parts, like a page.",
    required="file",
    file={"type": "string", "description": "the file's name"},
    page={"type": "integer", "description": "the part, from 1; 1 if left out"},
)
"""A fourth tool, there only where a benchmark has attachments."""


@dataclass(frozen=True)
class Page:
    """One document of the corpus: a unique id, a title, plain text."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Hit:
    """One search result; score is BM25's, above 0."""

    id: str
    title: str
    snippet: str
    score: float


@dataclass(frozen=True)
class ToolResult:
    """What the agent reads after a tool call, and whether the call worked."""

    text: str
    ok: bool


def words(text: str) -> list[str]:
    """The words that search looks at, in order. A stop word that is written as a code ('.is', 'IT') is none.

    >>> words("What is the symbol on Curaçao's coins? H, 7.87")
    ['symbol', 'curacao', 'coins', 'h', '7.87']
    >>> words("Is it .is or IT?")
    ['is', 'it']
    """
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return [folded for word in WORD.findall(text) if (folded := _folded(word))]


@functools.lru_cache(2**17)  # a large corpus has millions of words, few of them different
def _folded(word: str) -> str:
    """A word as the index knows it, '' for a stop word."""
    if STOP_WORD.fullmatch(word.lower()) and not (word.isupper() and len(word) > 1):
        return ""
    return word.lstrip(".").casefold()


class Search:
    """A BM25 index over pages, in which a title counts twice beside the text. ValueError if there is no word at all.

    >>> iron = Page("fe", "Iron", "Iron is a metal. Its density is 7.87 g/cm3.")
    >>> index = Search([iron, Page("gh", "Ghana", "Ghana is a country. Its domain is .gh.")])
    >>> [(hit.id, hit.snippet) for hit in index.search("density of iron")]
    [('fe', 'Its density is 7.87 g/cm3.')]
    """

    def __init__(self, pages: list[Page], bm25: bm25s.BM25 | None = None):
        self.pages = pages
        self.bm25 = bm25 or bm25_index(pages)
        self._page_words = functools.lru_cache(4096)(self._words_of)  # of pages that were found; a corpus may be large

    def search(self, query: str, k: int = 1, sentences: int = 1) -> list[Hit]:
        """The best k pages, best first, equal scores in the order of the pages; only pages that share a word.

        A hit shows ``sentences`` of its page: the one that fits best and those around it.
        """
        if k < 1 or sentences < 1:
            raise ValueError(f"k and sentences must be at least 1, not {k} and {sentences}.")
        asked = list(dict.fromkeys(words(query)))
        ids = self.bm25.get_tokens_ids(asked)
        if not ids:
            return []
        scores = self.bm25.get_scores_from_ids(ids)  # [pages]; bm25s' retrieve() is slower, and its ties in any order
        found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")[:k]].tolist()
        snippets = [self._snippet(i, asked, sentences) for i in best]
        return [
            Hit(self.pages[i].id, self.pages[i].title, snippet, float(scores[i]))
            for i, snippet in zip(best, snippets, strict=True)
        ]

    def _snippet(self, i: int, asked: list[str], count: int) -> str:
        """The sentence of page i that shares most words with the query, without the title's; the first of several.

        With those around it if ``count`` asks for more than one.
        """
        title, sentences = self._page_words(i)
        wanted = set(asked) - title
        shared = [len(wanted & words) for _, words in sentences]
        return passage([text for text, _ in sentences], shared.index(max(shared)), count)[: count * SNIPPET_CHARS]

    def _words_of(self, i: int) -> tuple[set[str], list[tuple[str, set[str]]]]:
        """The words of page i's title, and its sentences with theirs."""
        page = self.pages[i]
        return set(words(page.title)), [(s, set(words(s))) for s in SENTENCE_END.split(page.text.strip())]


def passage(sentences: list[str], best: int, count: int) -> str:
    """``count`` sentences in a row, number ``best`` in their middle, or as near to it as the page's ends allow.

    >>> [passage(["A.", "B.", "C.", "D."], best, 3) for best in (0, 2, 3)]
    ['A. B. C.', 'B. C. D.', 'B. C. D.']
    """
    start = max(0, min(best - count // 2, len(sentences) - count))
    return " ".join(sentences[start : start + count])


def bm25_index(pages: list[Page]) -> bm25s.BM25:
    """The index of Search. ValueError if there is no word at all."""
    vocabulary: dict[str, int] = {}
    corpus = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in 2 * words(page.title) + words(page.text)]
        for page in pages
    ]
    if not vocabulary:
        raise ValueError("Search needs at least one page with a word in it.")
    bm25 = bm25s.BM25()
    bm25.index((corpus, vocabulary), show_progress=False, create_empty_token=False)
    return bm25


@functools.cache
def _python_workers() -> Monty:
    """Monty's worker processes: started by the first program, shared by all, ending with this process."""
    return Monty(feed_duration_limit_grace=0.25).__enter__()


def run_python(code: str, max_output: int = 500) -> ToolResult:
    """Run a program in an interpreter of its own: what it prints, then its last expression's value, as in a notebook.

    An error is one line. A text of more than max_output characters is cut.

    >>> run_python("print('a')\\n0.1 + 0.2").text
    'a\\n0.30000000000000004'
    >>> run_python("1 / 0")
    ToolResult(text='ZeroDivisionError: division by zero', ok=False)
    """
    printed = CollectString()
    try:
        with _python_workers().checkout(limits=PYTHON_LIMITS, os_policy=PYTHON_POLICY) as session:
            value = _show(session.feed_run(code, print_callback=printed))
    except (MontyRuntimeError, MontySyntaxError) as error:
        text = " ".join(error.display("type-msg").split())
        return ToolResult(TOO_SLOW if "feed time limit exceeded" in text else _cut(text, max_output), ok=False)
    except MontyCrashedError as error:  # the worker was stuck inside one long operation and was ended, or it died
        return ToolResult(TOO_SLOW if error.timed_out else _cut(f"The interpreter died: {error}", max_output), ok=False)
    except ValueError as error:  # the value holds an integer with more digits than Python will write out
        return ToolResult(_cut(f"ValueError: {error}", max_output), ok=False)
    text = "\n".join(part for part in (printed.output.rstrip("\n"), value) if part)
    return ToolResult(_cut(text or "No output.", max_output), ok=True)


def _show(value: object) -> str:
    """repr, and '' for None. A set is sorted, since the order of one with strings changes from process to process."""
    if isinstance(value, set) and value:
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    return "" if value is None else repr(value)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def _fault(name: str, arguments: dict, descriptions: list[dict]) -> str:
    """What is wrong with a call by the tools' descriptions, as a sentence for the agent; '' if nothing is."""
    schemas = {tool["name"]: tool["parameters"] for tool in descriptions}
    if not isinstance(name, str) or name not in schemas:
        return f"There is no such tool. The tools are {', '.join(schemas)}."
    if not isinstance(arguments, dict):
        return f"The arguments of {name} must be an object."
    for key in schemas[name]["required"]:
        if key not in arguments:
            return f"{name} needs the argument {key!r}."
    for key, value in arguments.items():
        if key not in schemas[name]["properties"]:
            return f"{name} has no argument {key!r}."
        kind = schemas[name]["properties"][key]["type"]
        if type(value) is not {"string": str, "integer": int}[kind]:  # `is`: True is no integer here
            return f"The argument {key!r} of {name} must be of type {kind}."
    return ""


class Tools:
    """The three tools over one corpus; without pages search finds nothing. ValueError if two pages have the same id.

    page_chars: characters of a page in one visit; max_output: characters of a Python result; k: hits of one search;
    sentences: what is shown of each; bm25: the pages' index, if there is one already (``corpus.load``); files:
    attachments by name, which a fourth tool reads; nothing else on the disk can be named.
    """

    def __init__(
        self,
        pages: list[Page],
        page_chars: int = 2000,
        max_output: int = 500,
        k: int = 1,
        sentences: int = 1,
        bm25: bm25s.BM25 | None = None,
        files: dict[str, Path] | None = None,
    ):
        self.descriptions = [*TOOL_DESCRIPTIONS, READ_FILE] if files else TOOL_DESCRIPTIONS
        self.files, self._file_text = files or {}, functools.lru_cache(64)(readers.text_of)
        self.index = Search(pages, bm25) if pages else None
        self.by_id = {page.id: page for page in pages}
        if len(self.by_id) < len(pages):
            raise ValueError("Two pages have the same id, so that visit cannot tell them apart.")
        self.page_chars, self.max_output, self.k, self.sentences = page_chars, max_output, k, sentences

    def run(self, name: str, arguments: dict) -> ToolResult:
        """One call, such as run("visit", {"id": "gh"})."""
        fault = _fault(name, arguments, self.descriptions)
        if fault:
            return ToolResult(_cut(fault, self.max_output), ok=False)
        if name == "search":
            hits = self.index.search(arguments["query"], self.k, self.sentences) if self.index else []
            lines = [f"{hit.title}: {hit.snippet} [id {hit.id}]" for hit in hits]
            return ToolResult("\n".join(lines) or "No results.", ok=True)
        if name == "visit":
            return self._visit(arguments["id"], arguments.get("page", 1))
        if name == "read_file":
            return self._read_file(arguments["file"], arguments.get("page", 1))
        return run_python(arguments["code"], self.max_output)

    def run_many(self, calls: list[tuple[str, dict]]) -> list[ToolResult]:
        """The calls of a whole batch of rollouts, in order."""
        return [self.run(name, arguments) for name, arguments in calls]

    def _visit(self, page_id: str, number: int) -> ToolResult:
        if page_id not in self.by_id:
            return ToolResult(_cut(f"No page with id {page_id!r}.", self.max_output), ok=False)
        return self._part(self.by_id[page_id].text, number)

    def _read_file(self, name: str, number: int) -> ToolResult:
        if name not in self.files:
            text = f"There is no attached file {name!r}. The files are named in the question."
            return ToolResult(_cut(text, self.max_output), ok=False)
        try:
            return self._part(self._file_text(self.files[name]), number)
        except readers.Unreadable as error:
            return ToolResult(_cut(str(error), self.max_output), ok=False)

    def _part(self, text: str, number: int) -> ToolResult:
        count = max(1, -(-len(text) // self.page_chars))
        if not 1 <= number <= count:
            return ToolResult(f"This page has only part 1 to part {count}.", ok=False)
        part = text[(number - 1) * self.page_chars : number * self.page_chars]
        return ToolResult(part if count == 1 else f"{part}\n[part {number} of {count}]", ok=True)
