"""Files as text that an agent can read: the attachments of a question, and the HTML of a corpus.

Text, CSV, JSON and the like are shown as they are, HTML without its tags, a workbook sheet by sheet with a tab between
cells (the values that were saved, not the formulas), a PDF page by page. Workbooks and PDFs need
``pip install -e ".[files]"`` (openpyxl, pypdf). Pictures, sound and archives are not read, and the agent is told so.
"""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

HTML = (".html", ".htm")
TEXT = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".jsonld", ".xml", ".py", ".pdb")
LIBRARIES = {".xlsx": "openpyxl", ".pdf": "pypdf"}
MAX_CHARS = 1_000_000  # of one file; what follows is left out
UNSEEN = {"script", "style", "noscript", "template", "svg"}
INLINE = set(re.findall(r"\w+", "a abbr b cite code em font i mark q s small span strong sub sup u wbr"))


class Unreadable(ValueError):
    """The file cannot be shown; the message is for the agent."""


def lacking(files: dict[str, Path]) -> str:
    """A sentence about the first of ``files`` that could be read but for a library that is not installed, or ''."""
    for name, path in files.items():
        library = LIBRARIES.get(path.suffix.lower())
        if library and importlib.util.find_spec(library) is None:
            return f"The attachment {name} needs {library}: pip install {library}."
    return ""


def text_of(path: Path) -> str:
    """The file's text. Raises Unreadable: another kind of file, a damaged one, or one without text."""
    kind = path.suffix.lower()
    try:
        if kind == ".xlsx":
            text = _workbook(path)
        elif kind == ".pdf":
            text = _pdf(path)
        elif kind in TEXT + HTML:
            text = path.read_bytes().decode("utf-8-sig", "replace")
            text = html_text(text)[1] if kind in HTML else text
        else:
            readable = " ".join((*TEXT, *HTML, *LIBRARIES))
            raise Unreadable(f"A {kind or 'nameless'} file cannot be read as text. Readable are {readable}.")
    except Unreadable:
        raise
    except Exception as error:  # the file is from anywhere, and on a damaged one the parsers raise whatever they like
        raise Unreadable(f"The file cannot be read as {kind}: {type(error).__name__}.") from None
    if not text.strip():
        raise Unreadable("The file has no text in it.")
    return text[:MAX_CHARS]


def _workbook(path: Path) -> str:
    from openpyxl import load_workbook

    book = load_workbook(path, read_only=True, data_only=True)
    try:
        lines, length = [], 0
        for sheet in book.worksheets:
            lines.append(f"Sheet {sheet.title}")
            for row in sheet.iter_rows(values_only=True):
                lines.append("\t".join("" if cell is None else str(cell) for cell in row).rstrip("\t"))
                length += len(lines[-1])
                if length > MAX_CHARS:
                    break
        return "\n".join(lines)
    finally:
        book.close()


def _pdf(path: Path) -> str:
    from pypdf import PdfReader

    pages = PdfReader(path).pages
    texts = [page.extract_text() for page in pages]
    if not any(text.strip() for text in texts):
        raise Unreadable("The PDF has no text in it (scanned pages, perhaps).")
    return "\n".join(f"Page {number}\n{text}" for number, text in enumerate(texts, 1))


def html_text(source: str) -> tuple[str, str]:
    """(title, visible text) of an HTML page, a line for each block.

    >>> html_text("<title>Oslo</title><h1>Oslo</h1><p>A <b>cold</b> city &amp; port.<script>1 < 2</script></p>")
    ('Oslo', 'Oslo\\nA cold city & port.')
    """
    reader = _Reader()
    reader.feed(source)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.text).split("\n"))
    return " ".join("".join(reader.title).split()), "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.title, self.text, self.unseen, self.in_title = [], [], 0, False

    def handle_starttag(self, tag, attributes):
        self.unseen += tag in UNSEEN
        self.in_title = tag == "title" and not self.title
        if tag not in INLINE:
            self.text.append("\n")

    def handle_endtag(self, tag):
        self.unseen = max(0, self.unseen - (tag in UNSEEN))
        self.in_title = False
        if tag not in INLINE:
            self.text.append("\n")

    def handle_data(self, data):
        if self.in_title:
            self.title.append(data)
        elif not self.unseen:
            self.text.append(data.replace("\n", " "))
