"""Questions from files in SQuAD's and HotpotQA's formats."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Example
from kvsearch.tasks.ruler import RulerTask
from tests.tasks.ruler.helpers import hotpot, squad, words, written


def task(folder: Path, name: str = "qa_1", **options: Any) -> RulerTask:
    return RulerTask(name, qa_file=squad(folder) if name == "qa_1" else hotpot(folder), **options)


def documents(example: Example) -> list[str]:
    _, *told = example.context.split("\n\n")
    assert [text.split("\n")[0] for text in told] == [f"Document {place}:" for place in range(1, len(told) + 1)]
    return [text.partition("\n")[2].strip() for text in told]


def number_of(text: str) -> int:
    found = re.search(r"Place(\d+)", text)
    assert found
    return int(found[1])


@pytest.mark.parametrize("length", [512, 2048])
def test_squad_examples(length: int, tmp_path: Path) -> None:
    """The question's paragraph, then the rest of its article, then others, each once."""
    for example in task(tmp_path, length=length).examples(20, 0, words):
        (query,) = example.queries
        asked = number_of(query.question)
        told = [number_of(text) for text in documents(example)]
        assert asked in told
        assert len(set(told)) == len(told)
        article = set(range(asked - asked % 8, asked - asked % 8 + 8))
        assert set(told) <= article or article <= set(told)
        assert query.answers == (str(1000 + asked),)
        assert sum(query.answers[0] in text for text in documents(example)) == 1
        assert query.question.endswith(f"\n\nQuestion: When did Place{asked} build?")
        assert (query.prefix, query.max_new_tokens) == ("Answer:", 32)


@pytest.mark.parametrize("length", [512, 1024])
def test_hotpot_examples(length: int, tmp_path: Path) -> None:
    for example in task(tmp_path, "qa_2", length=length).examples(20, 0, words):
        (query,) = example.queries
        own = number_of(query.answers[0])
        told = [number_of(text) for text in documents(example)]
        assert set(range(own, own + 4)) <= set(told)
        assert len(set(told)) == len(told)


def test_a_file_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"qa_1 has material for 2\d+ of 4096 tokens: ask for a smaller length"):
        task(tmp_path, length=4096).examples(1, 0, words)


HOTPOT = {"question": "Q?", "answer": "A", "context": [["T", ["S."]]]}


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("qa_1", [HOTPOT], "is not valid, 1 problem"),
        (
            "qa_1",
            {"data": [{"paragraphs": [{"context": " ", "qas": []}]}]},
            "data.0.paragraphs.0.context: must not be blank",
        ),
        ("qa_2", [{**HOTPOT, "context": []}], "0.context: must not be empty"),
        ("qa_2", [{**HOTPOT, "answer": ""}], "0.answer: must not be blank"),
    ],
)
def test_files_of_no_use(name: str, data: Any, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.json", data)
    with pytest.raises(UsageError, match=r"bad\.json") as caught:
        RulerTask(name, qa_file=path).examples(1, 0, words)
    assert problem in str(caught.value)
