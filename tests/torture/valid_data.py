"""Questions, texts and datasets."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from typing import Any

import pandas


def _rows(*rows: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def tasks() -> list[bytes]:
    """Questions of one's own."""
    one = {"context": "the code of amber is seven .", "question": "code amber", "answers": ["seven", "7"]}
    more = {"max_new_tokens": 8, "prefix": "It is", "category": "codes", "id": "a-1"}
    choice = {"question": "which ?", "answers": ["red"], "options": ["red", "blue"], "context": "the red fox ."}
    return [
        _rows(one, {**one, **more}, {**one, "question": "code of\nwhat"}),
        _rows(*({**choice, "id": number, "metric": "exact", "prompt": "\n{question}\n"} for number in (6, 7))),
        _rows({**one, "metric": "qa_f1"}),
    ]


def task_tables() -> list[bytes]:
    """The same as a table, compressed, and in UTF-16."""
    table = 'context;question;answers;max_new_tokens\n"the code; of amber is seven .";code amber;seven;4\n'
    listed = """,context,question,answers\n0,a fox .,who ?,"['fox', ""it's""]"\n1,a bear .,who ?,bear\n"""
    plain = tasks()[0]
    return [table.encode(), listed.encode(), gzip.compress(plain, mtime=0), plain.decode().encode("utf-16")]


def calibrations() -> list[bytes]:
    """Calibration data: with questions, with all that a question may have, and of a file beside it."""
    ask = {"question": "code amber", "answer": "seven ."}
    more = {**ask, "prefix": "it", "max_new_tokens": 4, "kind": "k"}
    contexts = [
        {"text": "the code of amber is seven .", "questions": [ask, more]},
        {"text_file": "beside.txt", "kind": "story", "questions": [ask]},
    ]
    return [
        json.dumps({"name": "mine", "prompt": "\n{question}\n", "contexts": contexts}).encode(),
        json.dumps({"name": "mine", "contexts": contexts[:1]}).encode(),
    ]


def texts() -> list[bytes]:
    """Plain text."""
    return ["The keeper of Orrin Light eats rye bread. “So it is,” he said.\n\nNobody asked – 好。\n".encode() * 3]


def squad() -> list[bytes]:
    """A file in the format of SQuAD."""
    asked = [
        {"question": "who?", "answers": [{"text": "fox"}], "is_impossible": False},
        {"question": "x", "answers": [], "is_impossible": True},
    ]
    parts = [
        {"context": "the fox ran " * 250, "qas": asked},
        {"context": "the bear slept " * 250, "qas": [{"question": "what?", "answers": [{"text": "bear"}]}]},
    ]
    return [json.dumps({"version": "2.0", "data": [{"title": "t", "paragraphs": parts}]}).encode()]


def hotpot() -> list[bytes]:
    """A file in the format of HotpotQA."""
    context = [["A", ["one. "] * 400 + ["two."]], ["B", ["three. "] * 400]]
    return [json.dumps([{"_id": "1", "question": "what?", "answer": "two", "context": context, "type": "x"}]).encode()]


def templates() -> list[bytes]:
    """Prompts of datasets."""
    prompts = {"narrativeqa": "Read this.\n{context}\n\nQ: {input}\nA:", "qasper": "{context} {{x}} {input}"}
    return [json.dumps(prompts).encode()]


def longbench() -> list[bytes]:
    """Rows of LongBench."""
    asked = {"input": "who?", "context": "the fox ran", "answers": ["fox"], "all_classes": None}
    row = {**asked, "length": 3, "dataset": "narrativeqa", "language": "en", "_id": "a"}
    return [_rows(row, {**row, "_id": "b", "context": "a bear", "answers": ["bear", "a bear"]})]


def gsm8k() -> list[bytes]:
    """Rows of GSM8K."""
    first = {"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    return [_rows(first, {"question": "10?", "answer": "It is 1,000\n#### 1,000"})]


def parquet() -> list[bytes]:
    """Rows as Parquet."""
    rows = [{"question": "2?", "answer": "a\n#### 4"}, {"question": "3?", "answer": "b\n#### 5"}]
    return [pandas.DataFrame(rows).to_parquet()]


def archives() -> list[bytes]:
    """Rows of LongBench in a zip archive."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/narrativeqa.jsonl", longbench()[0])
    return [data.getvalue()]
