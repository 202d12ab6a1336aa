"""A user's own task file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Query
from kvsearch.tasks.prompts import PLAIN_PROMPT
from kvsearch.tasks.user_files import JsonlTask


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


def test_every_bad_line_is_told_with_its_number(tmp_path: Path) -> None:
    lines = [row(), "{", row(answers=[]), "[1]", row(answers=["a", " "], question=""), row(answer="a")]
    found = [problem.partition(":")[0] for problem in refusal(write(tmp_path, *lines))]
    assert found[0].startswith("line 2 is not valid JSON")
    assert found[2] == "line 4 is not an object"
    assert [found[1], *found[3:]] == [f"line {n}" for n in (3, 5, 5, 6)]


def test_a_long_list_of_bad_lines_is_cut(tmp_path: Path) -> None:
    problems = refusal(write(tmp_path, row(), *["{"] * 25))
    assert len(problems) == 11
    assert problems[-1] == "and 15 more"


def test_rows_have_categories_and_ids_of_their_own(tmp_path: Path) -> None:
    lines = [row(id=7), row(category="b", id="x", context="B"), row(category="b", context="B")]
    task = JsonlTask.load(write(tmp_path, *lines))
    found = [[(query.id, query.category) for query in example.queries] for example in task.rows]
    assert (task.category, found) == ("several", [[("7", "own")], [("x", "b"), ("", "b")]])
    alone = JsonlTask.load(write(tmp_path, *lines[1:]))
    assert (alone.category, alone.rows[0].queries[0].category) == ("b", "")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "no rows"),
        ([{"question": "Q", "answers": ["a"]}], "line 1: context: is missing"),
        ([row(max_new_tokens=0)], "line 1: max_new_tokens: "),
        ([row(metric="f1")], "unknown metric 'f1'; did you mean 'qa_f1'? (known: "),
        ([row(), row(metric="exact")], "the rows name the metrics contains, exact: one file has one metric"),
        ([row(prompt=" {question}"), row(prompt="{question}")], "different prompts"),
        ([row(prompt="nothing")], "lacks {question}"),
        ([row(id=1), row(id="1")], "the id '1' is of 2 rows"),
        ([row(options=["a", ""])], "line 1: options.1: must not be blank"),
        ([row(answers=["a", "\u200b\ufeff"])], "line 1: answers.1: must not be blank"),
        (
            [{"text": "Once upon a time."}],
            "line 1: is plain text: give it as ppl:FILE, or give context, question and answers",
        ),
        (['{"context": "a", "context": "b"}'], "the key 'context' occurs twice"),
        (['{"context": NaN}'], "a number in it is NaN or infinite"),
    ],
)
def test_files_of_no_use(lines: list[Any], problem: str, tmp_path: Path) -> None:
    assert any(problem in line for line in refusal(write(tmp_path, *lines)))


def test_turns_are_an_example_of_their_own(tmp_path: Path) -> None:
    """Also two conversations about one context, and questions about it that see no other."""
    turns = [
        {"question": "Who?", "answers": ["Ann"]},
        {"question": "Since when?", "answers": ["May"], "prefix": "Since"},
    ]
    talk = {"context": "A long text.", "turns": turns}
    task = JsonlTask.load(write(tmp_path, row(), {**talk, "id": 7}, row(question="Why?"), talk))
    alone, first, second = task.examples(10, 0)
    assert [example.turns for example in (alone, first, second)] == [False, True, True]
    assert [query.question for query in alone.queries] == ["Who?", "Why?"]
    assert [query.category for query in (*alone.queries, *first.queries)] == ["own", "own", "turn 1", "turn 2"]
    assert [(query.id, query.prefix) for query in first.queries] == [("7, turn 1", ""), ("7, turn 2", "Since")]
    assert [query.question for query in second.queries] == ["Who?", "Since when?"]


def test_bad_turns(tmp_path: Path) -> None:
    good = {"question": "Who?", "answers": ["Ann"]}
    talks: list[Any] = [[good, {"answers": ["May"]}], [], ["Who?"], [{**good, "context": "b"}]]
    lines = [{"context": "a", "turns": turns} for turns in talks]
    known = "answers, max_new_tokens, options, prefix, question"
    problem = f"turns is a list of objects with question and answers, which alone have {known}"
    assert refusal(write(tmp_path, *lines, row(turns=[good]))) == [
        "line 1, turn 2: question: is missing: add it",
        *(f"line {line}: {problem}" for line in (2, 3, 4, 5)),
    ]
