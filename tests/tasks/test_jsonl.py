"""A user's own task file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.errors import UsageError
from kvsearch.tasks.base import Query
from kvsearch.tasks.jsonl import JsonlTask
from kvsearch.tasks.prompts import PLAIN_PROMPT


def row(**changes: Any) -> dict[str, Any]:
    return {"context": "A long text.", "question": "Who?", "answers": ["Ann", "Anna"], **changes}


def write(folder: Path, *lines: Any, name: str = "mine.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def refusal(path: Path) -> list[str]:
    with pytest.raises(UsageError) as caught:
        JsonlTask.load(path)
    head, *problems = str(caught.value).splitlines()
    assert head == f"{path} is not a usable task file:"
    return [problem.strip() for problem in problems]


def test_a_good_file(tmp_path: Path) -> None:
    other = row(context="Another.", question="When?", answers=["1999"], max_new_tokens=5)
    task = JsonlTask.load(write(tmp_path, row(), "", other, row(question="Why?"), "  "))
    assert (task.name, task.metric, task.prompt) == ("mine", "contains", PLAIN_PROMPT)
    first, second = task.examples(10, 0)
    assert (first.key, first.task, first.context) == ("0", "mine", "A long text.")
    assert first.queries == (Query("Who?", ("Ann", "Anna")), Query("Why?", ("Ann", "Anna")))
    assert second.queries == (Query("When?", ("1999",), 5),)
    assert task.score("it was anna", first.queries[0]) == 1.0


def test_the_metric_of_the_file(tmp_path: Path) -> None:
    task = JsonlTask.load(write(tmp_path, row(metric="exact")))
    assert task.score("it was Anna", Query("who?", ("Anna",))) == 0.0
    assert task.score("Anna it was", Query("who?", ("Anna",))) == 1.0


def test_every_bad_line_is_told_with_its_number(tmp_path: Path) -> None:
    lines = [
        row(),
        "{",
        row(answers=[]),
        "[1]",
        {"question": "Q", "answers": ["a"]},
        row(context=" "),
        row(answers=["a", " "], question=""),
        row(max_new_tokens=0),
        row(answer="a"),
    ]
    problems = refusal(write(tmp_path, *lines))
    found = [problem.partition(":")[0] for problem in problems]
    assert found[0].startswith("line 2 is not valid JSON")
    assert found[1:] == [f"line {n}" for n in (3, 4, 5, 6, 7, 7, 8, 9)]
    text = "\n".join(problems)
    for expected in (
        "line 3: answers: must not be empty",
        "line 5: context: is missing",
        "line 6: context: must not be blank",
        "line 7: question: must not be blank",
        "line 7: answers.1: must not be blank",
        "line 8: max_new_tokens: ",
        "line 9: answer: unknown key",
    ):
        assert expected in text


def test_a_long_list_of_bad_lines_is_cut(tmp_path: Path) -> None:
    problems = refusal(write(tmp_path, *["{"] * 25))
    assert len(problems) == 11
    assert problems[-1] == "and 15 more"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "no rows"),
        (["", "   "], "no rows"),
        ([row(metric="f1")], "unknown metric 'f1' (known: exact, contains)"),
        ([row(), row(metric="exact")], "the rows name the metrics contains, exact: one file has one metric"),
        (['{"context": "a", "context": "b"}'], "the key 'context' occurs twice"),
        (['{"context": NaN}'], "NaN is not a number"),
    ],
)
def test_files_of_no_use(lines: list[Any], problem: str, tmp_path: Path) -> None:
    assert any(problem in line for line in refusal(write(tmp_path, *lines)))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        JsonlTask.load(tmp_path / "nothing.jsonl")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, row())
    path.write_bytes(path.read_bytes() + b'\n{"context": "M\xfcller"}\n')
    assert refusal(path) == ["line 2 is not UTF-8 text: byte 14 is 0xfc"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u001c", "\x0b"])
def test_only_line_feeds_end_a_line(separator: str, tmp_path: Path) -> None:
    """JSON may hold other separators of Unicode as they are, and writers that keep non-ASCII text write them so."""
    context = f"one{separator}two"
    line = json.dumps(row(context=context), ensure_ascii=False)
    (example,) = JsonlTask.load(write(tmp_path, line)).examples(1, 0)
    assert example.context == context


def test_carriage_returns_are_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "dos.jsonl"
    path.write_bytes("\r\n".join([json.dumps(row()), json.dumps(row(context="B")), ""]).encode())
    assert len(JsonlTask.load(path).rows) == 2


def test_sampling(tmp_path: Path) -> None:
    task = JsonlTask.load(write(tmp_path, *(row(context=f"text {i}") for i in range(20))))
    assert [example.key for example in task.examples(20, 3)] == [str(i) for i in range(20)]
    some = task.examples(5, 3)
    assert len({example.key for example in some}) == 5
    assert task.examples(5, 3) == some
    assert task.examples(5, 4) != some
    assert set(some) <= set(task.rows)


def test_one_prompt_per_file(tmp_path: Path) -> None:
    row = {"context": "c", "question": "q", "answers": ["a"]}
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({**row, "prompt": " {question}"}))
    assert JsonlTask.load(file).prompt == " {question}"
    for prompts, words in (([" {question}", "{question}"], "different prompts"), (["nothing"], "lacks {question}")):
        file.write_text("\n".join(json.dumps({**row, "prompt": prompt}) for prompt in prompts))
        with pytest.raises(UsageError, match=words):
            JsonlTask.load(file)
