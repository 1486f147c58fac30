"""A corpus of one's own: what becomes a page, the kept index, and (slow, by hand) 100,000 pages."""

import json
import os
import random
import time

import pytest

from minimgrpo import corpus
from minimgrpo.tasks import DataError
from minimgrpo.tools import Page, Tools


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "minimgrpo"


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_of_text_markdown_and_html(tmp_path):
    folder = write(
        tmp_path / "pages",
        a_txt="The river Ob\nIt flows north.",
        b_md="Intro\n\n## The Lena ##\nIt freezes.",
        c_html="<html><head><title> Yenisei\nriver</title><style>p {x}</style></head>"
        "<body><nav>Home</nav><p>It is <i>long</i>&nbsp;&lt;very&gt;.</p><script>alert(1)</script><p>Wide</body>",
        d_pdf="ignored",
    )
    (folder / "sub").mkdir()
    (folder / "sub" / "e.HTM").write_bytes(b"<p>caf\xe9")  # not UTF-8, no title
    pages, index, name = corpus.load(folder)
    assert [(p.id, p.title) for p in pages] == [
        ("a.txt", "The river Ob"),
        ("b.md", "The Lena"),
        ("c.html", "Yenisei river"),
        ("sub/e.HTM", "caf\ufffd"),
    ]
    assert pages[2].text == "Home\nIt is long <very>.\nWide"
    assert name.startswith("pages, 4 pages, ")
    assert "[id b.md]" in Tools(pages, bm25=index).run("search", {"query": "freezes"}).text


def test_the_index_is_built_once_and_again_when_a_page_changes(tmp_path, cache, monkeypatch):
    built, build = [], corpus.bm25_index
    monkeypatch.setattr(corpus, "bm25_index", lambda pages: built.append(len(pages)) or build(pages))
    folder = write(tmp_path / "pages", a_txt="One apple", b_txt="Two pears")
    first, second = corpus.load(folder), corpus.load(folder)
    assert built == [2] and first[2] == second[2] and len(list(cache.iterdir())) == 1
    os.rename(folder, tmp_path / "moved")  # what counts is what is in it
    corpus.load(tmp_path / "moved")
    assert built == [2]
    write(tmp_path / "moved", b_txt="Two plums")
    pages, index, name = corpus.load(tmp_path / "moved")
    assert built == [2, 2] and name.partition(", ")[2] != first[2].partition(", ")[2]
    tools = Tools(pages, bm25=index)
    assert tools.run("search", {"query": "plums"}).text == "Two plums: Two plums [id b.txt]"
    assert tools.run("search", {"query": "pears"}).text == "No results."


def test_a_kept_index_finds_what_a_fresh_one_finds(tmp_path):
    draw = random.Random(0)
    words = [f"w{n}" for n in range(50)]
    rows = [{"id": str(n), "title": draw.choice(words), "text": " ".join(draw.choices(words, k=20))} for n in range(80)]
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus.load(path)
    pages, index, _ = corpus.load(path)
    fresh, kept = Tools(pages, k=5), Tools(pages, k=5, bm25=index)
    for query in ("w1", "w2 w3", "w4 w4 w49", "nothing", "", "the"):
        assert fresh.run("search", {"query": query}) == kept.run("search", {"query": query})


def test_the_hash_tells_pages_apart():
    same = [Page("a", "b", "c")]
    assert corpus.content_hash(same) == corpus.content_hash(list(same))
    others = ([Page("ab", "", "c")], [Page("a", "bc", "")], [*same, *same], [Page("a", "b", "\ud800")], [])
    assert len({corpus.content_hash(pages) for pages in (same, *others)}) == 6


def test_what_is_no_corpus(tmp_path, cache):
    for path, says in (
        (tmp_path / "none", "does not exist"),
        (write(tmp_path / "empty", x_pdf="x"), "no .txt"),
        (write(tmp_path / "blank", x_txt=" \n"), "no page with a word"),
    ):
        if path.name == "blank":
            (path / "x.txt").rename(path / "---.txt")
        with pytest.raises(DataError, match=says):
            corpus.load(path)
    folder = write(tmp_path / "pages", a_txt="One apple")
    corpus.load(folder)
    [kept] = cache.iterdir()
    (kept / "params.index.json").write_text("{")
    with pytest.raises(DataError, match="delete that folder"):
        corpus.load(folder)


@pytest.mark.skipif("MINIMGRPO_SLOW" not in os.environ, reason="a minute: set MINIMGRPO_SLOW=1")
def test_a_hundred_thousand_pages(tmp_path):
    """Words by Zipf's law, 150 a page; prints what it took."""
    import numpy as np

    draws = np.random.default_rng(0)
    words = [f"{stem}{n}" for n in range(20_000) for stem in ("ka", "lo", "mi", "ru", "se")]
    texts = (draws.zipf(1.2, (100_000, 150)) - 1) % len(words)
    pages = [Page(str(n), f"page {words[row[0]]}", " ".join(words[i] for i in row)) for n, row in enumerate(texts)]
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps(vars(page)) + "\n" for page in pages))
    took = {}
    for when in ("the first time", "from the cache"):
        started, cpu = time.perf_counter(), time.process_time()
        pages, index, _ = corpus.load(path)
        took[when] = f"{time.perf_counter() - started:.1f} s ({time.process_time() - cpu:.1f} s of CPU)"
    tools, queries = Tools(pages, bm25=index), [" ".join(words[i] for i in row[:6]) for row in texts[:200]]
    started, cpu = time.perf_counter(), time.process_time()
    for query in queries:
        assert tools.run("search", {"query": query}).text != "No results."
    each = (time.process_time() - cpu) / len(queries)
    took["a search"] = f"{1000 * (time.perf_counter() - started) / len(queries):.1f} ms ({1000 * each:.1f} ms of CPU)"
    print("\n", took)
    assert each < 0.05
