"""GSM8K after worked examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import KvsearchWarning
from kvsearch.tasks.base import Task
from kvsearch.tasks.gsm8k import CUE, INSTRUCTION, SHOTS, Gsm8kTask

ROW = {"question": "Ann has 2 hens and buys 3. How many?", "answer": "Ann has 2 + 3 = <<2+3=5>>5 hens.\n#### 5"}


def write(folder: Path, *rows: dict[str, Any], name: str = "test.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_an_example(tmp_path: Path) -> None:
    task: Task = Gsm8kTask(source=write(tmp_path, ROW))
    (example,) = task.examples(9, 0, len)
    (query,) = example.queries
    assert (task.name, task.category, task.chat, task.stops) == ("gsm8k", "reasoning", True, ("\n\nQuestion:",))
    assert (example.key, query.answers, query.max_new_tokens) == ("0", ("5",), 512)
    assert query.question == f"Question: {ROW['question']}\n{CUE}"
    assert example.context.startswith(
        f"{INSTRUCTION}\n\nQuestion: {SHOTS[0]['question']}\n{CUE}\n{SHOTS[0]['solution']}\nThe answer is"
    )
    assert example.context.endswith("The answer is 18.")
    whole = example.context + task.prompt.replace("{question}", query.question)
    assert whole.count(CUE) == 5
    assert whole.endswith(f"\n{CUE}\n")


@pytest.mark.parametrize("shots", [0, 1, len(SHOTS)])
def test_the_number_of_worked_examples(shots: int, tmp_path: Path) -> None:
    (example,) = Gsm8kTask(source=write(tmp_path, ROW), shots=shots).rows
    assert example.context.count(CUE) == shots
    assert example.context.startswith(INSTRUCTION)


def test_the_worked_examples_are_right() -> None:
    for shot in SHOTS:
        sums = re.findall(r"([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]+)", shot["solution"])
        assert len(sums) >= 2
        for one, sign, two, result in sums:
            value = {"+": float(one) + float(two), "-": float(one) - float(two), "*": float(one) * float(two)}
            assert value.get(sign, float(one) / float(two)) == float(result.rstrip("."))
        assert sums[-1][-1].rstrip(".") == shot["answer"]
    assert len({shot["question"] for shot in SHOTS}) == len(SHOTS)


@pytest.mark.parametrize(
    ("gold", "number"), [("72", "72"), ("1,234,000", "1234000"), ("-3", "-3"), ("2.50", "2.50"), ("5 ", "5")]
)
def test_answers(gold: str, number: str, tmp_path: Path) -> None:
    (example,) = Gsm8kTask(source=write(tmp_path, {"question": "q", "answer": f"Thus.\n#### {gold}"})).rows
    assert example.queries[0].answers == (number,)


def test_the_right_reply_solves_the_problem_as_the_worked_examples_do(tmp_path: Path) -> None:
    gold = "Half of 8 is <<8/2=4>>4.\nWith 2 more that is <<4+2=6>>6.\n#### 6"
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": gold}))
    task = Gsm8kTask(source=path)
    (query,) = task.rows[0].queries
    assert query.right_reply == "Half of 8 is 4.\nWith 2 more that is 6.\nThe answer is 6."
    assert query.answers == ("6",)
    assert task.score(query.right_reply, query) == 1.0


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    task = Gsm8kTask(
        source=write(tmp_path, {"question": "q", "answer": "5"}, ROW, {"question": " ", "answer": "#### 5"})
    )
    with pytest.warns(
        KvsearchWarning, match="2 of 3 rows left out: 1 without a last line '#### number', 1 without a qu"
    ):
        assert [example.key for example in task.rows] == ["1"]
