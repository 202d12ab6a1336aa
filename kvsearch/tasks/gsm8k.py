"""GSM8K: grade-school word problems after worked examples (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.tasks.base import Example, Query, TokenCount
from kvsearch.tasks.hub import Dataset, checked, load_rows, usable
from kvsearch.tasks.metrics import METRICS
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.splits import ALL, SHARES, Shares, check_split, draw, part

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
        return cls(row.question.strip(), solution, _final(row.answer))

    @property
    def reply(self) -> str:
        """The solution as a reply tells it, up to the answer."""
        return f"{self.solution}\nThe answer is {self.answer}."

    def __str__(self) -> str:
        return f"{_asked(self.question)}\n{self.reply}"


SHOTS = (
    Shot(
        "A baker fills 6 trays with 8 rolls each and sells 29 rolls before noon. How many rolls are left?",
        "There are 6 * 8 = 48 rolls. After the sale 48 - 29 = 19 rolls are left.",
        "19",
    ),
    Shot(
        "Mira has 45 euros. She buys 3 notebooks for 4 euros each and a pen for 6 euros. How much money is left?",
        "The notebooks cost 3 * 4 = 12 euros. With the pen she pays 12 + 6 = 18 euros. So 45 - 18 = 27 euros are left.",
        "27",
    ),
    Shot(
        "A train runs at 60 kilometres an hour for 2 hours and at 80 kilometres an hour for 3 hours. How far is that?",
        "The first part is 60 * 2 = 120 kilometres long, the second 80 * 3 = 240. Together that is 120 + 240 = 360.",
        "360",
    ),
    Shot(
        "In a choir of 40, a quarter sing bass, 12 sing alto and the others soprano. How many sing soprano?",
        "Bass is sung by 40 / 4 = 10. Bass and alto are 10 + 12 = 22 singers. The others are 40 - 22 = 18.",
        "18",
    ),
    Shot(
        "A shirt of 30 dollars is sold for 20% less. What does Joel pay for two of them?",
        "The price drops by 30 * 0.2 = 6 dollars to 30 - 6 = 24 dollars. Two shirts cost 24 * 2 = 48 dollars.",
        "48",
    ),
    Shot(
        "Ben is 9. Nadia is 4 years older than twice his age. How old is she in 5 years?",
        "Twice Ben's age is 9 * 2 = 18, so Nadia is 18 + 4 = 22 now. In 5 years she is 22 + 5 = 27.",
        "27",
    ),
    Shot(
        "A tank holds 600 litres and is a third full. A pump adds 20 litres a minute. When is the tank full?",
        "The tank holds 600 / 3 = 200 litres, so 600 - 200 = 400 are missing. That takes 400 / 20 = 20 minutes.",
        "20",
    ),
    Shot(
        "Three friends share a meal of 48 dollars and a taxi of 12, and each tips 5 dollars. What does each pay?",
        "Meal and taxi cost 48 + 12 = 60 dollars, so each pays 60 / 3 = 20 dollars, and 20 + 5 = 25 with the tip.",
        "25",
    ),
)


@dataclass(frozen=True)
class Gsm8kTask:
    """The test problems, each after `shots` worked examples: the context is the examples, the question the problem.

    The examples are ours, or the first of `train` (a file, a folder or a dataset id of the hub), without the
    calculator annotations. `source` is where the test problems are. Rows are read when they are first needed.

    Raises:
        UsageError: an unknown metric or split, or more shots than there are; on reading, unusable rows.
        EnvironmentFault: on reading, the hub cannot be reached.
    """

    source: str | Path = REPOSITORY
    revision: str | None = None
    shots: int = 4
    train: str | Path | None = None
    metric: str = "gsm8k"
    chat: bool = True
    split: str = ALL
    shares: Shares = SHARES
    name: ClassVar[str] = "gsm8k"
    category: ClassVar[str] = "reasoning"
    prompt: ClassVar[str] = f"\n\n{PLACE}\n"
    stops: ClassVar[tuple[str, ...]] = ("\n\nQuestion:",)

    def __post_init__(self) -> None:
        if self.metric not in GSM8K_METRICS:
            raise UsageError(f"unknown GSM8K metric {self.metric!r}{suggest(self.metric, GSM8K_METRICS)}")
        if self.shots < 0 or (self.train is None and self.shots > len(SHOTS)):
            raise UsageError(
                f"{self.shots} worked examples were asked for, {len(SHOTS)} are shipped: ask for 0 to {len(SHOTS)}, "
                "or name the file of training rows to take them from"
            )
        check_split(self.split, self.shares)

    @cached_property
    def context(self) -> str:
        """What all problems follow: the instruction and the worked examples."""
        examples = SHOTS if self.train is None else self._trained(self.train)
        return "\n\n".join([INSTRUCTION, *map(str, examples[: self.shots])])

    @cached_property
    def rows(self) -> tuple[Example, ...]:
        """All examples of the split."""
        where = f"{self.name} of {self.source}"
        rows = _read(self.source, "test", self.revision, where)
        kept = part(rows, self.split, self.shares, lambda item: item[1].question, where)
        return tuple(self._example(position, row) for position, row in kept)

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return up to `samples` problems, drawn without replacement if the split has more."""
        return draw(self.rows, samples, seed)

    def score(self, reply: str, query: Query) -> float:
        """Return 1 if the reply's number is the answer."""
        return METRICS[self.metric](reply, query)

    def _example(self, position: int, row: Gsm8kRow) -> Example:
        solved = Shot.of(row)
        query = Query(_asked(row.question), (solved.answer,), MAX_NEW_TOKENS, written=solved.reply)
        return Example(self.name, str(position), self.context, (query,))

    def _trained(self, source: str | Path) -> Sequence[Shot]:
        where = f"{self.name} training rows of {source}"
        rows = _read(source, "train", self.revision if str(source) == str(self.source) else None, where)
        if len(rows) < self.shots:
            raise UsageError(f"{self.shots} worked examples were asked for, {where} has {len(rows)}")
        return [Shot.of(row) for _, row in rows]


def _read(source: str | Path, split: str, revision: str | None, where: str) -> list[tuple[int, Gsm8kRow]]:
    files = (split, f"{split}-*", f"main/{split}", f"main/{split}-*", f"data/{split}")
    rows = load_rows(Dataset(REPOSITORY, "main", split, files), source, revision)
    return usable(checked(rows, Gsm8kRow, where), _fault, where)


def _fault(row: Gsm8kRow) -> str | None:
    if not row.question.strip():
        return "without a question"
    return None if _FINAL.search(row.answer) else "without a last line '#### number'"


def _final(answer: str) -> str:
    found = _FINAL.search(answer)
    return found.group(1).replace(",", "") if found else ""


def _asked(question: str) -> str:
    return f"Question: {question.strip()}\n{CUE}"
