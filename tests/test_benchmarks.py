"""Benchmark files in every published format, each a few invented rows written here; and files that must be refused."""

import base64
import csv
import hashlib
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from minimgrpo import benchmarks, tasks
from minimgrpo.tasks import DataError

GAIA = [
    {"task_id": "0-0-0-0-0", "Question": "none", "Level": 1, "Final answer": "?", "file_name": ""},
    {
        "task_id": "aa-1",
        "Question": "How many oars?",
        "Level": 1,
        "Final answer": "12",
        "file_name": "",
        "Annotator Metadata": {"Steps": "SECRET NOTE"},
    },
    {"task_id": "aa-2", "Question": "Sum the sheet.", "Level": 3, "Final answer": "7", "file_name": "sheet.csv"},
]


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def encrypted(text, key):
    data = text.encode()
    return base64.b64encode(bytes(c ^ key[i % len(key)] for i, c in enumerate(data))).decode()


def table(path, rows, bom=True):
    with open(path, "w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


# ---------------------------------------------------------------------------------------------------------------- GAIA


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("where", ["2023/validation", "validation", ""])
def test_gaia_in_both_formats_and_every_folder(tmp_path, kind, where):
    folder = tmp_path / where
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sheet.csv").write_text("a\n7\n")
    if kind == "jsonl":
        lines(folder / "metadata.jsonl", GAIA)
    else:  # there the level is a text
        rows = [{"Annotator Metadata": None, **row, "Level": str(row["Level"])} for row in GAIA]
        parquet.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")
    found = benchmarks.load("gaia", "validation", tmp_path)
    assert [(t.task_id, t.level, t.answers) for t in found.tasks] == [("aa-1", "1", ("12",)), ("aa-2", "3", ("7",))]
    assert found.grader == "gaia" and found.files == {"sheet.csv": folder / "sheet.csv"}
    assert found.tasks[0].question == "How many oars?"
    assert "sheet.csv" in found.tasks[1].question and str(tmp_path) not in found.tasks[1].question
    assert "SECRET" not in repr(found.tasks) and "12" not in repr(found.tasks[0])


def test_parquet_is_read_before_jsonl(tmp_path):
    lines(tmp_path / "metadata.jsonl", [GAIA[1]])
    row = {"task_id": "new", "Question": "Which?", "Level": "2", "Final answer": "x", "file_name": ""}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "metadata.parquet")
    assert [t.task_id for t in benchmarks.load("gaia", data=tmp_path).tasks] == ["new"]


@pytest.mark.parametrize("gold", ["?", "", " ", None])
def test_a_hidden_answer_is_no_answer(tmp_path, gold):
    path = lines(tmp_path / "metadata.jsonl", [GAIA[1] | {"Final answer": gold}])
    assert benchmarks.load("gaia", "test", path).tasks[0].answers == ()


# ------------------------------------------------------------------------------------------------------ the other files


def test_xbench_is_decrypted_with_the_canary(tmp_path):
    canary = "canary-ü-4711"
    rows = [
        {
            "id": i,
            "prompt": encrypted(f"谁 wrote book {i}?", canary.encode()),
            "answer": encrypted(f"Ana {i}", canary.encode()),
            "reference_steps": encrypted("SECRET", canary.encode()),
            "canary": canary,
        }
        for i in (1, 2)
    ]
    found = benchmarks.load("xbench", data=table(tmp_path / "x.csv", rows))
    assert [(t.question, t.answers) for t in found.tasks] == [
        ("谁 wrote book 1?", ("Ana 1",)),
        ("谁 wrote book 2?", ("Ana 2",)),
    ]
    for bad in ({"canary": "another key"}, {"canary": ""}, {"prompt": "no base64!"}):
        with pytest.raises(DataError, match=r"row 2 (cannot be decrypted|lacks)"):
            benchmarks.load("xbench", data=table(tmp_path / "y.csv", [rows[0], rows[1] | bad]))


def test_browsecomp_is_decrypted_with_the_hash_of_the_canary(tmp_path):
    canary = "another canary"
    key = hashlib.sha256(canary.encode()).digest()
    long = "Which river, of all that flow north, freezes first? " * 3  # longer than the key
    row = {"problem": encrypted(long, key), "answer": encrypted("Lena", key), "problem_topic": "x", "canary": canary}
    [task] = benchmarks.load("browsecomp", data=table(tmp_path / "b.csv", [row], bom=False)).tasks
    assert task.question == long and task.answers == ("Lena",)
    with pytest.raises(DataError, match="decrypted"):  # XBench's cipher is not this one
        swapped = {"id": "1", "prompt": row["problem"], "answer": row["answer"], "canary": canary}
        benchmarks.load("xbench", data=table(tmp_path / "c.csv", [swapped]))


@pytest.mark.parametrize("spell", [str, str.capitalize])
def test_webwalker_open_and_closed(tmp_path, spell):
    row = {"question": "When?", "answer": "June", "root_url": "https://x.test/", "info": {"difficulty_level": "Hard"}}
    path = lines(tmp_path / "w.jsonl", [{spell(key): value for key, value in row.items()}])
    [free] = benchmarks.load("webwalker", data=path).tasks
    [closed] = benchmarks.load("webwalker-closed", data=path).tasks
    assert (free.question, free.level, free.answers) == ("When?", "hard", ("June",))
    assert "https://x.test/" in closed.question and "https" not in free.question


def test_hotpotqa_json_and_parquet_say_the_same(tmp_path):
    row = {"_id": "h1", "question": "Is it?", "answer": "yes", "level": "medium", "type": "bridge"}
    (tmp_path / "h.json").write_text(json.dumps([row | {"context": [["Oslo", ["A city. ", "It is cold."]]]}]))
    other = {k.replace("_id", "id"): v for k, v in row.items()}
    other["context"] = {"title": ["Oslo"], "sentences": [["A city. ", "It is cold."]]}
    parquet.write_table(pa.Table.from_pylist([other]), tmp_path / "h.parquet")
    first, second = (benchmarks.load("hotpotqa", data=tmp_path / name) for name in ("h.json", "h.parquet"))
    assert first.tasks == second.tasks and first.pages == second.pages
    assert first.tasks[0].level == "medium" and first.grader == "hotpotqa"
    assert [(p.title, p.text) for p in first.pages] == [("Oslo", "A city. It is cold.")]
    wiki = benchmarks.load("2wiki", data=tmp_path / "h.json")
    assert wiki.tasks[0].level == "bridge" and wiki.grader == "squad"


def test_musique_has_aliases_hops_and_each_paragraph_once(tmp_path):
    paragraph = {"idx": 0, "title": "Lima", "paragraph_text": "Lima is old.", "is_supporting": True}
    rows = [
        {"id": f"{n}hop__{n}_1", "question": "Who?", "answer": "Ann Lee", "paragraphs": [paragraph], "answerable": True}
        for n in (2, 3)
    ]
    rows[0]["answer_aliases"] = ["A. Lee"]
    found = benchmarks.load("musique", data=lines(tmp_path / "m.jsonl", rows))
    assert [t.level for t in found.tasks] == ["2hop", "3hop"] and len(found.pages) == 1
    assert found.tasks[0].answers == ("Ann Lee", "A. Lee")
    assert benchmarks.grade("squad", "a lee", found.tasks[0].answers) == {"correct": True, "f1": 1.0}
    with pytest.raises(DataError, match="row 2 cannot be answered"):
        benchmarks.load("musique", data=lines(tmp_path / "n.jsonl", [rows[0], rows[1] | {"answerable": False}]))


def test_the_atlas_is_the_one_of_tasks():
    found = benchmarks.load("atlas", "test")
    assert [t.question for t in found.tasks] == [q.question for q in tasks.load_questions("test")]
    assert len(found.pages) == len(tasks.load_pages()) and {t.level for t in found.tasks} == {"1", "2", "3"}


# -------------------------------------------------------------------------------------------------------------- grading


def test_each_grader_is_its_own():
    assert benchmarks.grade("gaia", "1,500", ("1500",)) == {"correct": True}
    assert benchmarks.grade("exact", "1,500", ("1500",)) == {"correct": True}  # punctuation goes
    assert benchmarks.grade("gaia", "the Nile", ("Nile",)) == {"correct": False}
    assert benchmarks.grade("exact", "the Nile", ("Nile",)) == {"correct": True}
    assert benchmarks.grade("hotpotqa", "yes it is", ("yes",)) == {"correct": False, "f1": 0.0}
    assert benchmarks.grade("squad", "yes it is", ("yes",)) == {"correct": False, "f1": 0.5}


# ------------------------------------------------------------------------------------------------------------ bad files


@pytest.mark.parametrize("name", sorted(benchmarks.READERS))
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_no_rows(tmp_path, name, text):
    for path in (tmp_path / "metadata.jsonl", tmp_path / "x.csv"):
        path.write_text(text)
        with pytest.raises(DataError, match="no rows"):
            benchmarks.load(name, data=path)


@pytest.mark.parametrize("name", sorted(benchmarks.READERS))
def test_wrong_columns_are_named(tmp_path, name):
    path = lines(tmp_path / "metadata.jsonl", [{"text": "What?"}])
    with pytest.raises(DataError, match=r"row 1 lacks .*; it has text"):
        benchmarks.load(name, data=path)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([GAIA[0]], "no rows"),  # the sentinel is no task
        ([GAIA[1], GAIA[1]], "second time"),
        ([GAIA[1] | {"Level": "hard"}], "whole number"),
        ([GAIA[1] | {"Question": " "}], "has no question"),
        ([GAIA[1] | {"file_name": "gone.pdf"}], "gone.pdf"),
        ([GAIA[1] | {"file_name": "../metadata.jsonl"}], "attachment"),  # nothing outside the folder
        ([["a", "list"]], "not an object"),
    ],
)
def test_a_gaia_file_that_is_wrong(tmp_path, rows, says):
    with pytest.raises(DataError, match=says):
        benchmarks.load("gaia", data=lines(tmp_path / "a" / "metadata.jsonl", rows))


@pytest.mark.parametrize(
    ("file", "content"), [("m.jsonl", b"{"), ("m.jsonl", b"\xff\xfe"), ("m.parquet", b"PAR1"), ("m.json", b"[1")]
)
def test_a_file_that_is_damaged(tmp_path, file, content):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match="not readable as"):
        benchmarks.load("hotpotqa", data=tmp_path / file)


def test_a_place_where_nothing_is(tmp_path):
    for name, data, says in (
        ("gaia", tmp_path, "neither metadata.parquet nor"),
        ("gaia", tmp_path / "none.jsonl", "does not exist"),
        ("xbench", None, "--data"),
        ("gaja", tmp_path, "no benchmark 'gaja'"),
    ):
        with pytest.raises(DataError, match=says):
            benchmarks.load(name, data=data)
