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


@dataclass(frozen=True)
class Shot:
    """A worked example."""

    question: str
    solution: str
    answer: str

    @classmethod
    def of(cls, row: Gsm8kRow) -> Shot:
        """Return a row as an example, without the calculator annotations."""
        solution = _CALCULATOR.sub("", _FINAL.sub("", row.answer)).strip()
        final = _FINAL.search(row.answer)
        return cls(row.question.strip(), solution, final.group(1).replace(",", "") if final else "")

    @property
    def reply(self) -> str:
        """The solution as a reply tells it, up to the answer."""
        return f"{self.solution}\nThe answer is {self.answer}."

    def __str__(self) -> str:
        return f"{_asked(self.question)}\n{self.reply}"


SHOTS = tuple(Shot(**shot) for shot in read_shipped("gsm8k"))


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
        return "\n\n".join([INSTRUCTION, *map(str, SHOTS[: self.shots])])

    @property
    def dataset(self) -> Dataset:
        files = ("test", "test-*", "main/test", "main/test-*", "data/test")
        return Dataset(REPOSITORY, "main", "test", files)

    def fault(self, row: Gsm8kRow) -> str | None:
        if not row.question.strip():
            return "without a question"
        return None if _FINAL.search(row.answer) else "without a last line '#### number'"

    def document(self, row: Gsm8kRow) -> str:
        return row.question

    def example(self, position: int, row: Gsm8kRow) -> Example:
        solved = Shot.of(row)
        query = Query(_asked(row.question), (solved.answer,), MAX_NEW_TOKENS, written=solved.reply)
        return Example(self.name, str(position), self.context, (query,))


def _asked(question: str) -> str:
    return f"Question: {question.strip()}\n{CUE}"
