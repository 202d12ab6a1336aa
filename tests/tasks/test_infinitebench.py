"""InfiniteBench's datasets: settings, prompts and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import KvsearchWarning
from kvsearch.tasks.longbench import INFINITEBENCH_SPECS, INFINITEBENCH_TASKS, InfiniteBenchTask

BOOKS = ["Anna", "Ben", "Cleo", "Dora"]


def row(**changes: Any) -> dict[str, Any]:
    return {"id": 0, "context": "A long text.", "input": "Who?", "answer": ["Cleo"], "options": [], **changes}


def load(folder: Path, name: str, *rows: dict[str, Any], **options: Any) -> InfiniteBenchTask:
    text = "\n".join(json.dumps(item, ensure_ascii=False) for item in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return InfiniteBenchTask(name, folder, **options)


@pytest.mark.parametrize("name", INFINITEBENCH_TASKS)
def test_a_prompt_has_context_and_question_once(name: str, tmp_path: Path) -> None:
    options = {"options": BOOKS} if INFINITEBENCH_SPECS[name].options else {}
    task = load(tmp_path, name, row(answer="7" if name == "math_find" else "Cleo", **options))
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
        return load(tmp_path, name, row(**changes)).rows[0].queries[0].answers

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
def test_rows_that_cannot_be_used(name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    good = row(options=BOOKS if INFINITEBENCH_SPECS[name].options else [])
    with pytest.warns(KvsearchWarning, match=f"1 of 2 rows left out: 1 {problem}"):
        rows = load(tmp_path, name, good, {**good, **row(options=good["options"]), **changes} if name == "passkey"
                    else row(**changes)).rows  # fmt: skip
    assert len(rows) == 1
