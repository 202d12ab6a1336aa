"""GSM8K after worked examples; MATH-500 and AIME in the formats that the hub has them in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.tasks.base import Task
from kvsearch.tasks.maths import CUE, INSTRUCTION, SHOTS, Gsm8kTask, TracedTask

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


def test_the_worked_examples_are_right() -> None:
    for shot in SHOTS:
        sums = re.findall(r"([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]+)", shot["solution"])
        assert len(sums) >= 2
        for one, sign, two, result in sums:
            value = {"+": float(one) + float(two), "-": float(one) - float(two), "*": float(one) * float(two)}
            assert value.get(sign, float(one) / float(two)) == float(result.rstrip("."))
        assert sums[-1][-1].rstrip(".") == shot["answer"]
    assert len({shot["question"] for shot in SHOTS}) == len(SHOTS)


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


# --- MATH-500 and AIME -----------------------------------------------------------------------------------------------

MATH = {
    "problem": "Compute $\\dfrac{1}{2} + \\dfrac{1}{3}$.", "solution": "This is $\\boxed{\\frac{5}{6}}$.",
    "answer": "\\frac{5}{6}", "subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json",
}  # fmt: skip
AIME = {"ID": "2024-I-1", "Problem": "How many?", "Solution": "There are 73.", "Answer": 73}
ASKED = "Please reason step by step, and put your final answer within \\boxed{}."


def test_a_problem_of_math(tmp_path: Path) -> None:
    write(tmp_path, MATH)
    (example,) = TracedTask("math500", tmp_path).examples(9, 0)
    (query,) = example.queries
    assert (example.key, example.context, query.question) == ("0", MATH["problem"], ASKED)
    assert (query.id, query.category, query.max_new_tokens) == ("test/prealgebra/1.json", "Prealgebra", 16384)
    assert query.right_reply == MATH["solution"]
    (shorter,) = TracedTask("math500", tmp_path, max_new_tokens=9).rows
    assert shorter.queries[0].max_new_tokens == 9


@pytest.mark.parametrize(
    "row", [AIME, {"id": 60, "problem": "How many?", "answer": "073", "url": "u", "year": "2024", "solution": ""}]
)
def test_a_problem_of_aime(row: dict[str, Any], tmp_path: Path) -> None:
    task = TracedTask("aime24", write(tmp_path, row))
    (example,) = task.rows
    (query,) = example.queries
    assert (example.context, query.id, query.category) == ("How many?", str(row.get("ID", 60)), "")
    assert task.score(query.right_reply or "", query) == 1
    assert task.score("\\boxed{73.0}", query) == 1


def test_problems_that_cannot_be_asked(tmp_path: Path) -> None:
    task = TracedTask("math500", write(tmp_path, {**MATH, "answer": " "}, MATH, {**MATH, "problem": ""}))
    with pytest.warns(KvsearchWarning, match="2 of 3 rows left out: 1 without an answer, 1 with an empty context"):
        assert [example.key for example in task.rows] == ["1"]
    for missing in ("problem", "answer"):
        row = {name: value for name, value in MATH.items() if name != missing}
        with pytest.raises(UsageError, match=f"row 1 of math500 of .* has no column '{missing}'"):
            _ = TracedTask("math500", write(tmp_path, row)).rows
