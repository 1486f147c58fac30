"""Attached files as an agent reads them: every kind made here, damaged ones, and names that lead elsewhere."""

import json

import pytest

from minimgrpo import benchmarks, loop, protocol, readers
from minimgrpo.agents import Limits
from minimgrpo.chat import Chat
from minimgrpo.loop import Settings
from minimgrpo.protocol import Call, call_text
from minimgrpo.readers import Unreadable, html_text, text_of
from minimgrpo.tools import Page, Tools


def pdf(text):
    """A whole PDF of one page by hand."""
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
    ]
    data, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    start = len(data)
    data += f"xref\n0 5\n0000000000 65535 f \n{table}trailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return data.encode()


def test_texts(tmp_path):
    for name, data, text in (
        ("a.txt", "Zürich\n".encode(), "Zürich\n"),
        ("b.CSV", b"\xef\xbb\xbfx,y\n1,2\n", "x,y\n1,2\n"),
        ("c.json", b'{"a": 1}', '{"a": 1}'),
        ("d.html", b"<p>One</p><p>Two</p>", "One\nTwo"),
        ("e.txt", b"caf\xe9", "caf\ufffd"),
    ):
        (tmp_path / name).write_bytes(data)
        assert text_of(tmp_path / name) == text


def test_a_workbook_sheet_by_sheet(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.title = "Oars"
    for row in (("boat", "oars"), ("Ann", 4), ("Bo", None), (None, 2.5)):
        book.active.append(row)
    book.create_sheet("Empty")
    book.save(tmp_path / "b.xlsx")
    assert text_of(tmp_path / "b.xlsx") == "Sheet Oars\nboat\toars\nAnn\t4\nBo\n\t2.5\nSheet Empty"


def test_a_pdf_page_by_page(tmp_path):
    pytest.importorskip("pypdf")
    (tmp_path / "p.pdf").write_bytes(pdf("Twelve oars"))
    assert text_of(tmp_path / "p.pdf") == "Page 1\nTwelve oars"
    (tmp_path / "scan.pdf").write_bytes(pdf(""))
    with pytest.raises(Unreadable, match="no text"):
        text_of(tmp_path / "scan.pdf")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.mp3", b"ID3", r"A .mp3 file cannot be read as text. Readable are .txt"),
        ("noname", b"x", "A nameless file"),
        ("a.xlsx", b"not a zip", "cannot be read as .xlsx"),
        ("a.pdf", b"not a pdf", "cannot be read as .pdf"),
        ("a.txt", b" \n", "no text in it"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, data, says):
    if name.endswith((".xlsx", ".pdf")):
        pytest.importorskip("openpyxl"), pytest.importorskip("pypdf")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Unreadable, match=says):
        text_of(tmp_path / name)
    result = Tools([], files={name: tmp_path / name}).run("read_file", {"file": name})
    assert not result.ok and "\n" not in result.text


def test_html_as_the_reader_sees_it():
    source = "<TITLE>A\nb</TITLE><!-- no --><p>1 &lt; 2</p><br>x<b>y</b><script>if (a<b) c()</script><svg>n</svg>"
    assert html_text(source) == ("A b", "1 < 2\nxy")
    assert html_text("<p>never <i>closed <script>gone") == ("", "never closed")
    assert html_text("") == ("", "")


def test_the_tool_pages_and_opens_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 3)
    (tmp_path / "gold.txt").write_text("SECRET")
    tools = Tools([], page_chars=20, files={"a.txt": tmp_path / "a.txt"})
    assert tools.run("read_file", {"file": "a.txt"}).text == "01234567890123456789\n[part 1 of 2]"
    assert tools.run("read_file", {"file": "a.txt", "page": 2}).text == "0123456789\n[part 2 of 2]"
    for name in ("gold.txt", "../gold.txt", str(tmp_path / "gold.txt"), "A.TXT", ""):
        result = tools.run("read_file", {"file": name})
        assert not result.ok and "no attached file" in result.text
    assert "no argument 'id'" in tools.run("read_file", {"file": "a.txt", "id": "x"}).text
    assert Tools([Page("p", "P", "x")]).run("read_file", {"file": "a.txt"}).text.startswith("There is no such tool.")


def test_a_missing_library_is_one_sentence_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(readers.importlib.util, "find_spec", lambda name: None)
    assert "a.pdf needs pypdf: pip install pypdf" in readers.lacking({"a.pdf": tmp_path / "a.pdf"})
    assert readers.lacking({"a.txt": tmp_path / "a.txt"}) == ""


def test_the_grammar_and_the_prompts_know_it():
    said = call_text("read_file", file="a.csv")
    assert protocol.parse("executor", said) == Call("read_file", {"file": "a.csv"})
    assert "read_file" in protocol.PROMPTS["files"]["executor"]


def test_a_team_reads_an_attachment(scripted, tokenizer, tmp_path, monkeypatch):
    """From GAIA's file to the answer: the planner reads the name in the question, the executor reads the file."""
    row = {"task_id": "x", "Question": "How many?", "Level": 1, "Final answer": "12", "file_name": "boats.csv"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    (tmp_path / "boats.csv").write_text("boat,oars\nAnn,12\n")
    benchmark = benchmarks.load("gaia", data=tmp_path)

    def say(role, user, _row, turn):
        if role == "planner":
            assert "boats.csv" in user
            return call_text("executor", task="Read boats.csv") if turn == 0 else "FINAL ANSWER: 12"
        return call_text("read_file", file="boats.csv") if turn == 0 else "12 oars"

    monkeypatch.setattr(loop, "open_evaluation", lambda *a: {"grader": "g", "config_hash": "c"})
    config = {"task_ids": ["x"], "config_hash": "c"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    tools = Tools([], files=benchmark.files)
    found = loop.evaluate(scripted(say), tools, benchmark, Settings(), Limits(length=90), {}, tmp_path / "out")
    record = found.records["x", 0]
    assert record["correct"] and "Ann,12" in record["messages"]["executor"][0][3]["content"]
    assert "read_file" in Chat(tokenizer, "files").prompts["executor"]
