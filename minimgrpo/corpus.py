"""Pages of your own to search: a folder of text, Markdown and HTML files, or a JSON lines file of pages.

    pages, index, name = corpus.load("my/pages")
    tools = Tools(pages, bm25=index)

A folder: every ``.txt``, ``.md``, ``.html`` and ``.htm`` below it is a page; its id is its path in the folder, its
title the HTML title, the first Markdown heading, or the first line. A JSON lines file: one object a line with the
columns ``id``, ``title`` and ``text``. Bytes that are not UTF-8 become "\ufffd".

The index is built once and kept in ``$XDG_CACHE_HOME/minimgrpo/corpus-HASH`` (``~/.cache/minimgrpo/...``), where
HASH is of the pages' content and of how their words are read. Delete that folder whenever you like.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import bm25s

from minimgrpo import log, tasks
from minimgrpo.readers import HTML, html_text
from minimgrpo.tasks import DataError
from minimgrpo.tools import STOP_WORD, WORD, Page, bm25_index

TEXT = (".txt", ".md")


def load(path: str | Path) -> tuple[list[Page], bm25s.BM25, str]:
    """The pages, their index, and a name that says which. Raises DataError: nothing there, or nothing in it."""
    path = Path(path)
    pages = folder_pages(path) if path.is_dir() else tasks.load_pages(path)
    digest = content_hash(pages)
    cache = cache_folder() / f"corpus-{digest}"
    if not cache.is_dir():
        try:
            index = bm25_index(pages)
        except ValueError:
            raise DataError(f"{path} has no page with a word in it.") from None
        log.publish_folder(cache, lambda folder: index.save(folder, show_progress=False))
    try:
        index = bm25s.BM25.load(cache)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the index {cache} is damaged ({error}): delete that folder and run again.") from None
    return pages, index, f"{path.name}, {len(pages)} pages, {digest}"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minimgrpo"


def content_hash(pages: list[Page]) -> str:
    """16 hex digits over every page, and over what else decides the index."""
    whole = hashlib.sha256("\0".join((STOP_WORD.pattern, WORD.pattern, bm25s.__version__)).encode())
    for page in pages:
        for text in (page.id, page.title, page.text):
            data = text.encode("utf-8", "backslashreplace")
            whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()[:16]


def folder_pages(folder: Path) -> list[Page]:
    """The pages of a folder, in the order of their names."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in TEXT + HTML and file.is_file()]
    if not files:
        raise DataError(f"{folder} has no {', '.join(TEXT + HTML)} file in it.")
    return [_page(file, file.relative_to(folder).as_posix()) for file in files]


def _page(file: Path, page_id: str) -> Page:
    text, title = file.read_bytes().decode("utf-8-sig", "replace").strip(), ""
    if file.suffix.lower() in HTML:
        title, text = html_text(text)
    elif file.suffix.lower() == ".md" and (heading := re.search(r"^#{1,6}\s+(.+?)\s*#*$", text, re.MULTILINE)):
        title = heading[1]
    return Page(page_id, title or text.partition("\n")[0][:120].strip() or file.stem, text)
