"""Files as people have them: in other encodings, compressed, as tables, and filled in by hand."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from kvsearch.calibration.data import load_calibration_data
from kvsearch.config.recipes import read_recipe
from kvsearch.core.errors import UsageError
from kvsearch.core.files import read_text
from kvsearch.tasks.given import read_text_argument
from kvsearch.tasks.metrics import SCORERS
from kvsearch.tasks.rows import read_file
from kvsearch.tasks.ruler.needles import read_haystack
from kvsearch.tasks.user_files import JsonlTask, TextTask
from tests.cli.conftest import invoke

TEXT = "Bürgermeister Müller eröffnete die Sitzung um neun.\r\nEr sprach über Brücken: 好 🙂\n" * 3
ROWS: list[dict[str, Any]] = [
    {"context": f"{number} Zeile\u2028zwei, „und“ mehr\nText", "question": "Wer?", "answers": ["Müller", "die, Stadt"]}
    for number in range(4)
]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def write(path: Path, content: str | bytes, encoding: str = "utf-8") -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
    return path


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_text_is_the_same_in_every_encoding_that_says_what_it_is(pack: Any, encoding: str, tmp_path: Path) -> None:
    path = write(tmp_path / "notes", pack(TEXT.encode(encoding)))
    assert read_text_argument(f"@{path}") == TextTask.load(path).text == read_haystack(path) == TEXT
    assert load_calibration_data(path, bare=True).contexts[0].text == TEXT.strip()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("Müller".encode("latin-1"), "is not UTF-8 text: byte 1 is 0xfc, in line 1; if it is in latin1, convert it: "),
        ("a\n“b”".encode("cp1252"), "byte 2 is 0x93, in line 2; if it is in cp1252, convert it: iconv -f cp1252"),
        (b"\xef\xbb\xbfM\xfcller", "is not UTF-8 text: byte 4 is 0xfc"),
        (b"\xff\xfea\0b\0\n", "is not UTF-16 text: byte 6 is 0x0a, though it begins with the byte order mark"),
        ("Rat".encode("utf-16-le"), "looks like utf-16le without a byte order mark: convert it: iconv -f utf-16le"),
        ("Rat".encode("utf-16-be"), "looks like utf-16be without a byte order mark"),
        (b"%PDF-1.7\n%\xe2\xe3", "is a PDF: give its text"),
        (b"PK\x03\x04\x14\0word/document.xml", "is a zip archive, as .docx"),
        (b"\x28\xb5\x2f\xfd\x04\0", "is compressed by zstd: unpack it first, with `zstd -d`"),
        (b"PAR1\x15\0", "Parquet"),
        (b"SQLite format 3\0", "is an SQLite database"),
        (b"ARROW1\0\0\xff\xff", "is an Arrow file"),
        (b"GIF89a\x01\0\x01\0\x80\0\0\xff\xff", "is a picture (GIF)"),
        (b"{\\rtf1\\ansi Text}", "is a document in rich text"),
        (bz2.compress(b"text" * 99)[:-9], "is compressed by bz2 and cannot be unpacked"),
        (b"\x89PNG\r\n\x1a\n\0", "is a picture (PNG)"),
        (b"\x1f\x8bjunk", "is compressed by gzip and cannot be unpacked"),
        (gzip.compress(b"text" * 99, mtime=0)[:-9], "is compressed by gzip and cannot be unpacked"),
        (b"text\0text and more", "is binary, no text: character 4 is zero"),
        (b"\0\xfe\x80", "it is binary, give text"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named_in_one_line(data: bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "notes.txt", data)
    readers = (lambda: read_text_argument(f"@{path}"), lambda: TextTask.load(path), lambda: JsonlTask.load(path))
    for number, read in enumerate((*readers, lambda: load_calibration_data(path, bare=True))):
        with pytest.raises(UsageError) as caught:
            read()
        assert words in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value), number


@pytest.mark.parametrize(
    "text",
    ["BZhou said hello.", "BZh9 is what bzip2 begins with.", "PAR1: the introduction, which ends with PAR1", "PAR1",
     "ARROW1 was a rocket.", "GIF89a has 256 colours.", "Rar!", "SQLite format 3 is a format.", "{\\rtfm} they said."],
)  # fmt: skip
def test_letters_that_a_format_begins_with_are_text(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "notes.txt", text)
    assert read_text_argument(f"@{path}") == TextTask.load(path).text == text
    assert load_calibration_data(path, bare=True).contexts[0].text == text


def test_an_empty_text_may_be_compressed(tmp_path: Path) -> None:
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        assert read_text(write(tmp_path / "notes", pack(b""))) == ""


def test_tables_without_rows_are_parquet(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["one"]})
    for rows, compression in ((frame, "zstd"), (frame[:0], None), (frame[:0], "snappy")):
        path = write(tmp_path / "rows", rows.to_parquet(index=False, compression=compression))
        assert read_file(path) == rows.to_dict("records")


def test_what_is_unpacked_has_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "zeros.gz", gzip.compress(b"0" * (3 << 20)))
    with pytest.raises(UsageError, match="is larger than the 2097152 bytes"):
        read_text(path, max_bytes=2 << 20)


def test_a_pipe_is_read_as_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (lambda: read_text_argument(f"@{pipe}"), lambda: TextTask.load(pipe).text):
        writer = threading.Thread(target=pipe.write_text, args=(TEXT,))
        writer.start()
        assert read() == TEXT
        writer.join()


def test_an_empty_file_is_nothing_to_read(tmp_path: Path) -> None:
    path = write(tmp_path / "empty.txt", "\ufeff \n")
    for read in (
        lambda: read_text_argument(f"@{path}"),
        lambda: TextTask.load(path),
        lambda: load_calibration_data(path),
    ):
        with pytest.raises(UsageError, match="is empty"):
            read()


def test_recipes_and_calibration_files_may_have_a_mark(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        assert read_recipe(write(tmp_path / "mine.yaml", "seed: 3\n", encoding), "evaluate") == {"seed": 3}
        assert read_recipe(write(tmp_path / "mine.json", '{"seed": 3}', encoding), "evaluate") == {"seed": 3}
        content = {"name": "x", "contexts": [{"text": "t", "questions": [{"question": "Wer?", "answer": " Müller "}]}]}
        data = load_calibration_data(write(tmp_path / "data", json.dumps(content), encoding))
        assert data.contexts[0].questions[0].answer == "Müller"


def test_rows_for_a_calibration_are_sent_to_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", LINES)
    with pytest.raises(UsageError, match=r"has rows, .*: give it as --tasks jsonl:") as caught:
        load_calibration_data(path)
    assert "\n" not in str(caught.value)


def test_a_context_file_of_a_command(tmp_path: Path) -> None:
    words = "the code of amber is seven . " * 20

    def ask(encoding: str) -> tuple[int, str, str]:
        path = write(tmp_path / "context.txt", words + "ä", encoding)
        return invoke(
            "generate",
            "bundled",
            "--context",
            f"@{path}",
            "--prompt",
            "? code amber",
            "--max-new-tokens",
            "2",
            "--json",
        )

    right = ask("utf-8")
    assert right[0] == 0
    assert ask("utf-8-sig")[:2] == ask("utf-16")[:2] == right[:2]
    code, out, told = ask("latin-1")
    assert (code, out) == (2, "")
    assert told.startswith("kvsearch: error: ") and told.count("\n") == 1 and "iconv -f latin1" in told


# --- rows -------------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], **options: Any) -> bytes:
    return pandas.DataFrame(rows).to_csv(index=False, **options).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Rows with lists as arrays of NumPy, and with an index, as pandas writes them after a choice."""
    frame = pandas.DataFrame([{**row, "answers": np.array(row["answers"])} for row in rows])
    return bytes(pandas.concat([frame.iloc[:1], frame])[1:].to_parquet())


AS_JSON = [{**row, "answers": json.dumps(row["answers"])} for row in ROWS]
FORMS = {
    "plain.jsonl": LINES.encode(),
    "mark.jsonl": LINES.encode("utf-8-sig"),
    "windows.jsonl": LINES.replace("\n", "\r\n\r\n").encode("utf-16"),
    "mac.jsonl": LINES.replace("\n", "\r").encode(),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "array.json": json.dumps(ROWS, indent=2).encode(),
    "table.parquet": parquet(ROWS),
    "python.csv": table(ROWS),
    "json.csv": table(AS_JSON),
    "excel.csv": table(AS_JSON, sep=";").decode().encode("utf-8-sig"),
    "tabs.tsv": table(AS_JSON, sep="\t"),
    "index.csv": pandas.DataFrame(AS_JSON).to_csv().encode(),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_the_same_in_every_form_and_under_every_name(name: str, tmp_path: Path) -> None:
    right = JsonlTask.load(write(tmp_path / "right.jsonl", LINES)).rows
    for called in (name, "rows"):
        found = JsonlTask.load(write(tmp_path / called, FORMS[name])).rows
        assert [(one.context, one.queries) for one in found] == [(one.context, one.queries) for one in right]
    texts = [{"text": row["context"]} for row in ROWS]
    assert TextTask.load(write(tmp_path / "texts", json.dumps(texts))).text == "\n\n".join(row["text"] for row in texts)
    if not name.endswith("sv"):
        assert read_file(tmp_path / "rows") == ROWS


def test_one_row_over_several_lines(tmp_path: Path) -> None:
    (example,) = JsonlTask.load(write(tmp_path / "one.json", json.dumps(ROWS[0], indent=1))).rows
    assert example.context == ROWS[0]["context"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Once upon\na time, there\nwas a fox.", "has no rows: line 1 is not valid JSON"),
        ('{"context":\n"a",\n"question"', "has no rows: line 1 is not valid JSON"),
        ("context,question,answers\na,b,c,d\n", "begins as CSV does, and is none: "),
        ('[{"context": "a"},\n{"context"', "is not valid JSON at line 2"),
    ],
)
def test_what_holds_no_rows_is_told_once(content: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        JsonlTask.load(write(tmp_path / "rows.jsonl", content))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prose_with_commas_is_text(tmp_path: Path) -> None:
    for text in (
        "Well, then\nShe left, and he, too, went.",
        "[Intro] Once",
        "{ not json",
        "text\nmore",
        "text, he said",
        "text, he said\nand left.\n\nThen, at last, he came.",
        "{name} was there, and left.\nSo, [x].",
        "[1, 2]\nText",
    ):
        for name in ("prose.txt", "notes.md", "prose"):
            path = write(tmp_path / name, text)
            assert TextTask.load(path).text == text
            assert load_calibration_data(path, bare=True).contexts[0].text == text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'text\n"He said, ""well"", and left."\n\nSo did she\n'),
        ("ROWS.CSV", 'text\r\n"He said, ""well"", and left."\r\nSo did she\r\n'),
        ("rows.tsv", 'text\nHe said, "well", and left.\nSo did she\n'),
        ("rows.csv", 'who (name);text\na;"He said, ""well"", and left."\nb;So did she\n'),
        ("rows", 'id,text\n1,"He said, ""well"", and left."\n2,So did she\n'),
        ("rows.txt", '[{"text": "He said, \\"well\\", and left."}, {"text": "So did she"}]'),
    ],
)
def test_a_table_of_texts_is_no_prose(name: str, content: str, tmp_path: Path) -> None:
    text = 'He said, "well", and left.\n\nSo did she'
    assert TextTask.load(write(tmp_path / name, content)).text == text
    packed = write(tmp_path / f"{name}.gz", gzip.compress(content.encode()))
    assert TextTask.load(packed).text == text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", "text\nHe said, well.\n", "begins as CSV does, and is none: "),
        ("rows.tsv", "text\ttext\na\tb\n", "has a column twice in its header, line 1"),
        ("rows.csv", "quote\na\n", "has rows without a text"),
        ("rows.csv", "text\n", "is empty"),
        ("rows.jsonl", "{name} was there.", "is not valid JSON"),
        ("rows.json.gz", "{name} was there.", "is not valid JSON"),
    ],
)
def test_a_name_of_rows_is_kept_to(name: str, content: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        TextTask.load(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mine.jsonl", "{name} was there.", "is not valid JSON at line 1 column 2"),
        ("mine.json", '{\n"name": "x"\n"contexts": []}', "is not valid JSON at line 3 column 1"),
        ("mine.json", '{"name": "x", "contexts": [\n{"text": "a"}\n{"text": "b"}]}', "is not valid JSON at line 3"),
        ("mine.csv", "text\n", "is not valid JSON at line 1"),
        ("mine.csv", "text\nOnce\n", "has rows, .* or ppl:"),
        ("mine", "id,text\n1,Once\n", "has rows, .* or ppl:"),
    ],
)
def test_what_is_no_calibration_file_is_not_taken_for_text(name: str, content: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load_calibration_data(write(tmp_path / name, content), bare=True)
    assert "\n" not in str(caught.value)


# --- fields that are filled in by hand --------------------------------------------------------------------------------

REPLIES = {
    "exact": "mayor", "contains": "it was the mayor", "string_match_all": "mayor", "string_match_part": "mayor",
    "niah_recall": "mayor", "niah_recall_lava": "mayor", "qa_f1": "mayor", "classification": "mayor",
    "contains_word": "mayor", "first_integer": "12", "first_number": "12", "gsm8k": "12", "gsm8k_official": "12",
    "math_boxed": r"\boxed{12}", "integer_boxed": r"\boxed{12}", "longbench_v2": "The correct answer is (A)",
    "count": "12", "retrieval": "Paragraph 12", "choice": "mayor", "choice_of_function": "mayor",
}  # fmt: skip
ANSWERS = {"longbench_v2": "A", "retrieval": "Paragraph 12"}


@pytest.mark.parametrize("metric", REPLIES)
def test_blanks_around_an_answer_change_no_score(metric: str, tmp_path: Path) -> None:
    reply = REPLIES[metric]
    answer = ANSWERS.get(metric, "12" if "12" in reply else "mayor")
    row = {"context": "c", "question": "Who?", "answers": [f" {answer}\u200b \n"], "options": [f" {answer} ", "guard"]}
    task = JsonlTask.load(write(tmp_path / "mine.jsonl", json.dumps({**row, "metric": f" {metric} "})))
    assert task.metric == metric
    assert task.score(reply, task.rows[0].queries[0]) == SCORERS[metric](reply, task.rows[0].queries[0]) == 1


def test_blanks_of_code_are_part_of_the_answer(tmp_path: Path) -> None:
    row = {"context": "c", "question": "next", "answers": ["    return x"], "metric": "edit_similarity"}
    task = JsonlTask.load(write(tmp_path / "mine.jsonl", json.dumps(row)))
    assert task.rows[0].queries[0].answers == ("    return x",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question ": "Who?"}, "question : unknown key: remove it or correct its spelling; did you mean 'question'?"),
        ({"answer": "x"}, "answer: unknown key: remove it or correct its spelling; did you mean 'answers'?"),
        ({"answers": "mayor"}, "line 1: answers: must be a list, not 'mayor'"),
        ({"answers": None}, "line 1: answers: is missing: add it"),
        ({"answers": [""]}, "line 1: answers.0: must not be blank"),
        ({"answers": [None]}, "line 1: answers.0: must be text"),
        ({"max_new_tokens": "four"}, "line 1: max_new_tokens: must be a whole number"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_used_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        JsonlTask.load(write(tmp_path / "mine.jsonl", json.dumps({**ROWS[0], **changes})))
    assert words in str(caught.value)


def test_what_a_table_leaves_empty_is_not_given(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "category": "a ", "max_new_tokens": "4"}, {**ROWS[1], "prefix": "It"}]
    told = [("own", 64, "It"), ("a", 4, "")]
    whole = pandas.DataFrame(rows).astype({"max_new_tokens": float})
    contents = [
        whole.to_parquet(),
        whole.to_json(orient="records", lines=True).encode(),
        whole.assign(answers=whole.answers.map(json.dumps)).to_csv(index=False).encode(),
    ]
    for content in contents:
        task = JsonlTask.load(write(tmp_path / "rows", content))
        queries = [query for example in task.rows for query in example.queries]
        assert sorted((query.category, query.max_new_tokens, query.prefix) for query in queries) == sorted(told)


def test_a_cell_has_one_answer_or_a_list(tmp_path: Path) -> None:
    def load(cell: str) -> tuple[str, ...]:
        content = io.StringIO()
        csv.writer(content).writerows([["context ", "question", "answers"], ["c", "Who?", cell]])
        return JsonlTask.load(write(tmp_path / "rows.csv", content.getvalue())).rows[0].queries[0].answers

    assert load(" the mayor, or so ") == ("the mayor, or so",)
    assert load('["a", " b"]') == load("['a', 'b']") == load('["a","b"]') == ("a", "b")
    with pytest.raises(UsageError, match=r"row 1: answers: begins with \[ and is no list"):
        load("['a' 'b']")  # as NumPy writes it, which Python would read as one text


@pytest.mark.parametrize("content", [{"data": ROWS}, {"train": ROWS, "test": ROWS}, {"context": {"0": "a"}}])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_of_tables_is_named_as_one(content: dict[str, Any], indent: int | None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is one object of '\w+'.*: give the rows alone") as caught:
        JsonlTask.load(write(tmp_path / "mine.json", json.dumps(content, indent=indent)))
    assert "\n" not in str(caught.value)
