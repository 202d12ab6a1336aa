"""GSM8K: grade-school word problems after worked examples (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import require_known
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetTask, read_shipped
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.rows import Dataset

REPOSITORY = "openai/gsm8k"
GSM8K_METRICS = ("gsm8k", "gsm8k_official")
MAX_NEW_TOKENS = 512
INSTRUCTION = "Solve each problem step by step. End with the answer as a number."
CUE = "Solution, step by step:"
_FINAL = re.compile(r"####\s*(-?[\d.,]*\d)\s*$")
_CALCULATOR = re.compile(r"<<[^>]*>>")  # annotations that only training uses


class Gsm8kRow(BaseModel):
    """A row of GSM8K; the answer is the solution and a last line `#### number`."""

    question: str
    answer: str


SHOTS: tuple[dict[str, str], ...] = tuple(read_shipped("gsm8k"))  # worked examples: question, solution, answer


@dataclass(frozen=True)
class Gsm8kTask(DatasetTask[Gsm8kRow]):
    """The test problems, each after `shots` worked examples: the context is the examples, the question the problem.

    Raises:
        UsageError: an unknown metric or split, or more shots than there are; on reading, unusable rows.
        EnvironmentFault: on reading, the hub cannot be reached.
    """

    name: str = "gsm8k"
    source: str | Path = REPOSITORY
    shots: int = 4
    metric: str = "gsm8k"
    chat: bool = True
    category: ClassVar[str] = "reasoning"
    prompt: ClassVar[str] = f"\n\n{PLACE}\n"
    stops: ClassVar[tuple[str, ...]] = ("\n\nQuestion:",)
    row: ClassVar[type[Gsm8kRow]] = Gsm8kRow

    def __post_init__(self) -> None:
        require_known("GSM8K metric", self.metric, GSM8K_METRICS)
        if not 0 <= self.shots <= len(SHOTS):
            raise UsageError(f"{self.shots} worked examples were asked for: ask for 0 to {len(SHOTS)}")
        super().__post_init__()

    @cached_property
    def context(self) -> str:
        """What all problems follow: the instruction and the worked examples."""
        shots = SHOTS[: self.shots]
        worked = [f"{_asked(shot['question'])}\n{_reply(shot['solution'], shot['answer'])}" for shot in shots]
        return "\n\n".join([INSTRUCTION, *worked])

    @property
    def dataset(self) -> Dataset:
        files = ("test", "test-*", "main/test", "main/test-*", "data/test")
        return Dataset("main", "test", files)

    def fault(self, row: Gsm8kRow) -> str | None:
        if not row.question.strip():
            return "without a question"
        return None if _FINAL.search(row.answer) else "without a last line '#### number'"

    def document(self, row: Gsm8kRow) -> str:
        return row.question

    def example(self, position: int, row: Gsm8kRow) -> Example:
        [number] = _FINAL.findall(row.answer)
        solution = _CALCULATOR.sub("", _FINAL.sub("", row.answer)).strip()
        answer = number.replace(",", "")
        query = Query(_asked(row.question), (answer,), MAX_NEW_TOKENS, written=_reply(solution, answer))
        return Example(self.name, str(position), self.context, (query,))


def _asked(question: str) -> str:
    return f"Question: {question.strip()}\n{CUE}"


def _reply(solution: str, answer: str) -> str:
    return f"{solution}\nThe answer is {answer}."
