"""LongBench, its second version and InfiniteBench: settings, prompts, rows and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.tasks.base import Query
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.dataset_task import parse_template
from kvsearch.tasks.longbench import (
    AVERAGES,
    INFINITEBENCH_SPECS,
    INFINITEBENCH_TASKS,
    LONGBENCH_ENGLISH,
    LONGBENCH_SPECS,
    LONGBENCH_TASKS,
    InfiniteBenchTask,
    LongBenchTask,
)
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.rows import load_shared_rows

ASKS_NOTHING = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}  # their rows have an empty input


def row(name: str = "hotpotqa", number: int = 0, **changes: Any) -> dict[str, Any]:
    classes = ["Location", "Date"] if LONGBENCH_SPECS[name.removesuffix("_e")].metric == "classification" else None
    return {
        "input": f"What is {number}?", "context": f"Passage {number}.", "answers": ["Ann", "Anna"], "length": 3999,
        "dataset": name, "language": "en", "all_classes": classes, "_id": f"{number:048x}", **changes,
    }  # fmt: skip


def write(folder: Path, *rows: dict[str, Any], name: str = "hotpotqa") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(item, ensure_ascii=False) for item in rows), encoding="utf-8")
    return path


def load(folder: Path, *rows: dict[str, Any], name: str = "hotpotqa", **options: Any) -> LongBenchTask:
    return LongBenchTask(name, write(folder, *rows, name=name), **options)


def test_the_averages_of_the_papers() -> None:
    assert {name: len(tasks) for name, tasks in AVERAGES.items()} == {
        "polykv": 21, "lukv": 16, "lava-mistral": 20, "lava-qwen": 21, "lava-llama3": 20, "lava-extraction": 12,
        "lava-generation": 8, "evolkv": 16,
    }  # fmt: skip
    assert set(LONGBENCH_TASKS) - set(AVERAGES["lava-mistral"]) == {"passage_count"}
    assert set(LONGBENCH_TASKS) - set(AVERAGES["lava-llama3"]) == {"vcsum"}
    assert {*AVERAGES["lava-extraction"], *AVERAGES["lava-generation"]} == set(AVERAGES["lava-mistral"])
    assert {"gov_report", "samsum", "lcc", "dureader"} < set(AVERAGES["lava-generation"])
    assert AVERAGES["evolkv"] == AVERAGES["lukv"] == LONGBENCH_ENGLISH


def test_every_prompt_adds_up_and_asks_what_its_rows_hold() -> None:
    for name, spec in LONGBENCH_SPECS.items():
        text = spec.prompt
        template = LongBenchTask(name).template
        whole = template.context("CONTEXT") + template.separator + template.question("INPUT")
        assert whole == text.replace("{context}", "CONTEXT").replace("{input}", "INPUT")
        assert template.asks == (name not in ASKS_NOTHING)
        assert not template.separator.strip()
        if spec.chat:  # prompts with a chat template always have a blank line there
            assert template.separator == "\n\n"


def test_an_example(tmp_path: Path) -> None:
    (example,) = load(tmp_path, row(answers=["Ann", " ", "Anna"])).examples(9, 0)
    (query,) = example.queries
    assert (example.task, example.key) == ("hotpotqa", "0")
    assert example.context.endswith("\nPassage 0.")
    assert query.question.endswith("Question: What is 0?\nAnswer:")
    assert (query.answers, query.max_new_tokens, query.prefix, query.options) == (("Ann", "Anna"), 32, "", ())


def test_few_shot_prompts_are_continued(tmp_path: Path) -> None:
    task = load(
        tmp_path, row("trec", input="Question: Where?\nType:", context="Question: When?\nType: Date"), name="trec"
    )
    (example,) = task.examples(1, 0)
    assert task.prompt == "\n" + PLACE
    assert example.queries[0].question == "Question: Where?\nType:"
    assert example.queries[0].options == ("Location", "Date")


def test_code_is_continued_where_it_ends(tmp_path: Path) -> None:
    task = load(tmp_path, row("repobench-p", input="\n    return {x", context="def f():"), name="repobench-p")
    assert task.prompt == PLACE
    (example,) = task.examples(1, 0)
    assert example.context.endswith("\ndef f():")
    assert example.queries[0].question.startswith("\n    return {xThe line")


@pytest.mark.parametrize(
    ("name", "reply", "answers", "score"),
    [
        ("hotpotqa", "The Ann", ["Bob", "Ann"], 1.0),
        ("hotpotqa", "Ann\nBob Carl Dan", ["Ann"], 0.4),
        ("triviaqa", "\n\nAnn\nBob Carl Dan", ["Ann"], 1.0),
        ("trec", "\nDate\nLocation", ["Date"], 1.0),
        ("trec", "Date, Location", ["Date"], 0.5),
        ("trec", " \nDate", ["Date"], 0.0),  # newlines alone are stripped, and end a line
        ("trec", "That\u2028is Date", ["Date"], 1.0),
        ("samsum", "Ann sings.\nDialogue: no", ["Ann sings."], 1.0),
        ("gov_report", "Ann sings.", ["Ann sings."], 1.0),
        ("passage_count", "7 or 8", ["7"], 0.5),
        ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], 1.0),
        ("passage_retrieval_zh", "段落12", ["段落12"], 1.0),
        ("multifieldqa_zh", "北京大学", ["北京大学"], 1.0),
        ("dureader", "北京大学", ["北京大学"], 1.0),
        ("lcc", "# a comment\nreturn x\n", ["return x"], 1.0),
    ],
)
def test_scores(name: str, reply: str, answers: list[str], score: float) -> None:
    query = Query("q", tuple(answers), options=("Date", "Location"))
    assert LongBenchTask(name).score(reply, query) == pytest.approx(score, abs=1e-4)


def test_buckets_of_lengths(tmp_path: Path) -> None:
    rows = [row("trec_e", n, length=length) for n, length in enumerate((0, 3999, 4000, 7999, 8000, 90000))]
    keys = [example.key for example in load(tmp_path, *rows, name="trec_e").examples(9, 0)]
    assert keys == ["0-4k/0", "0-4k/1", "4-8k/2", "4-8k/3", "8k+/4", "8k+/5"]


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    task = load(
        tmp_path, row(), row(context=" "), row(answers=[]), row(answers=["", "\n", "\u200b"]), row(input=""), row()
    )
    with pytest.warns(KvsearchWarning) as caught:
        assert [example.key for example in task.rows] == ["0", "5"]
    assert str(caught[0].message) == (
        f"hotpotqa of {tmp_path / 'hotpotqa.jsonl'}: 4 of 6 rows left out: 1 with an empty context, "
        "2 without an answer, 1 without a question"
    )
    assert len(task.rows) == 2  # read once, warned once


def without(column: str, name: str = "hotpotqa") -> dict[str, Any]:
    return {key: value for key, value in row(name).items() if key != column}


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        ("hotpotqa", [], "has no usable row"),
        ("hotpotqa", [row(answers="x")], "row 1: answers: must be a list, not 'x'"),
        (
            "hotpotqa",
            [row(), without("answers")],
            r"row 2 of .* has no column 'answers' \(found: input, context, length",
        ),
        ("hotpotqa", [row("musique")], "holds rows of 'musique': give the file of 'hotpotqa'"),
        ("trec", [row("trec", all_classes=None)], "rows without all_classes"),
        ("trec_e", [without("length", "trec")], "rows without a length"),
    ],
)
def test_rows_of_no_use(name: str, rows: list[dict[str, Any]], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem):
        _ = load(tmp_path, *rows, name=name).rows


def prompts(folder: Path, content: Any) -> Path:
    path = folder / "prompts.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_prompts_of_the_user(tmp_path: Path) -> None:
    file = prompts(tmp_path, {"trec": "Braces {{}}: {context}\n{input} ...", "nq": 3})
    task = load(tmp_path, row("trec", input="I", context="C {input}"), name="trec", prompts=file)
    (example,) = task.rows
    assert example.context + task.prompt.replace(PLACE, example.queries[0].question) == "Braces {}: C {input}\nI ..."
    assert LongBenchTask("trec_e", prompts=file).template == task.template


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "holds no object of datasets and their prompts"),
        ({"qaspr": "{context} {input}"}, "has no prompt for 'qasper'; did you mean 'qaspr'"),
        ({"qasper": "{context} ?"}, r"has no \{input\}, the place of the question"),
        ({"qasper": "{input} {context}"}, r"after it, at most one \{input\}: found \{input\}, \{context\}"),
        ({"qasper": "{context} {input} {answers}"}, r"found \{context\}, \{input\}, \{answers\}"),
        ({"qasper": "{context} {input"}, "expected '}' before end of string; write literal braces twice"),
    ],
)
def test_prompts_of_no_use(content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        LongBenchTask("qasper", prompts=prompts(tmp_path, content))
    assert "\n" not in str(caught.value)


@given(*(st.text(st.characters(exclude_characters="{}")) for _ in range(5)))
def test_prompts_add_up(head: str, between: str, tail: str, context: str, asked: str) -> None:
    template = parse_template(f"{head}{{context}}{between}{{input}}{tail}", "here")
    whole = template.context(context) + template.separator + template.question(asked)
    assert whole == head + context + between + asked + tail


# --- InfiniteBench ----------------------------------------------------------------------------------------------------

BOOKS = ["Anna", "Ben", "Cleo", "Dora"]


def book_row(**changes: Any) -> dict[str, Any]:
    return {"id": 0, "context": "A long text.", "input": "Who?", "answer": ["Cleo"], "options": [], **changes}


def load_books(folder: Path, name: str, *rows: dict[str, Any], **options: Any) -> InfiniteBenchTask:
    text = "\n".join(json.dumps(item, ensure_ascii=False) for item in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return InfiniteBenchTask(name, folder, **options)


@pytest.mark.parametrize("name", INFINITEBENCH_TASKS)
def test_a_prompt_of_infinitebench_has_context_and_question_once(name: str, tmp_path: Path) -> None:
    options = {"options": BOOKS} if INFINITEBENCH_SPECS[name].options else {}
    task = load_books(tmp_path, name, book_row(answer="7" if name == "math_find" else "Cleo", **options))
    (example,) = task.examples(5, 0)
    (query,) = example.queries
    whole = example.context + task.prompt.replace("{question}", query.question)
    assert (example.task, example.key, query.max_new_tokens) == (name, "0", INFINITEBENCH_SPECS[name].max_new_tokens)
    assert example.context.endswith("A long text.")
    assert whole.count("A long text.") == 1
    assert whole.count("Who?") == ("{input}" in INFINITEBENCH_SPECS[name].prompt)
    assert ("C. Cleo" in query.question) == INFINITEBENCH_SPECS[name].options
    if name not in ("longbook_sum_eng", "passkey", "number_string"):
        assert task.score(query.answers[0], query) == 1


def test_answers_come_in_several_forms(tmp_path: Path) -> None:
    def answers(name: str, **changes: Any) -> tuple[str, ...]:
        return load_books(tmp_path, name, book_row(**changes)).rows[0].queries[0].answers

    assert answers("math_find", answer=[12]) == answers("math_find", answer=12) == ("12",)
    assert answers("math_find", answer=0.5) == ("0.5",)
    assert answers("longbook_qa_eng", answer=["Cleo", "", "Queen Cleo"]) == ("Cleo", "Queen Cleo")
    assert answers("longbook_choice_eng", answer=["Cleo", "C"], options=BOOKS) == ("Cleo",)
    assert answers("code_debug", input="", answer="Ben", options=BOOKS) == ("Ben",)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("passkey", {"answer": []}, "without an answer"),
        ("code_debug", {}, "without 2 to 4 options"),
        ("code_debug", {"options": BOOKS, "answer": "Emil"}, "whose answer is none of the options"),
    ],
)
def test_rows_of_books_that_cannot_be_used(name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    good = book_row(options=BOOKS if INFINITEBENCH_SPECS[name].options else [])
    bad = {**good, **changes} if name == "passkey" else book_row(**changes)
    with pytest.warns(KvsearchWarning, match=f"1 of 2 rows left out: 1 {problem}"):
        assert len(load_books(tmp_path, name, good, bad).rows) == 1


# --- LongBench v2 -----------------------------------------------------------------------------------------------------


def choice_row(**changes: Any) -> dict[str, Any]:
    choices = {f"choice_{letter}": name for letter, name in zip("ABCD", ("Anna", "Ben", "Cleo", "Dora"), strict=True)}
    told = {"domain": "Long-dialogue History Understanding", "sub_domain": "x", "difficulty": "easy", "length": "short"}
    asked = {"_id": "66f3", "question": "Who?", "answer": "C", "context": "A long text."}
    return {**told, **asked, **choices, **changes}


def write_choices(folder: Path, *rows: dict[str, Any]) -> Path:
    load_shared_rows.cache_clear()
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


def test_a_question_has_its_choices_and_is_scored_by_the_letter(tmp_path: Path) -> None:
    write_choices(tmp_path, choice_row(), choice_row(_id="2", length="long", context="Another."))
    (short, medium, long) = find_tasks("longbench:v2", {"data": tmp_path})
    assert [task.name for task in (short, medium, long)] == ["v2_short", "v2_medium", "v2_long"]
    (example,) = short.examples(5, 0, len)
    (query,) = example.queries
    assert example.context.endswith("<text>\nA long text.")
    assert query.question.startswith("</text>\n\nWho?\nChoices:\n(A) Anna\n(B) Ben\n(C) Cleo\n(D) Dora\n\n")
    assert (query.id, query.category, query.max_new_tokens) == ("66f3", "Long-dialogue History Understanding", 128)
    assert short.score(query.right_reply or "", query) == 1
    assert [example.queries[0].id for example in long.examples(5, 0, len)] == ["2"]
    with pytest.raises(UsageError, match=r"v2_medium of .* has no usable row"):
        medium.examples(5, 0, len)
    assert load_shared_rows.cache_info().misses == 1
