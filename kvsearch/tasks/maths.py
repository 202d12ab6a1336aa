"""Problems in mathematics: GSM8K after worked examples, and MATH-500 and AIME, whose replies are long traces.

Sources: Cobbe et al., arXiv 2110.14168; Hendrycks et al., arXiv 2103.03874, with the 500 problems that Lightman et
al., arXiv 2305.20050, picked; the American Invitational Mathematics Examination.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import require_known
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetSpec, DatasetTask, read_shipped, read_specs
from kvsearch.tasks.metrics.maths import extract_boxed
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.rows import check_rows

GSM8K_METRICS = ("gsm8k", "gsm8k_official")
INSTRUCTION = "Solve each problem step by step. End with the answer as a number."
CUE = "Solution, step by step:"
MATHS_SPECS = read_specs("maths")
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

    UsageError, beside what other datasets raise, for an unknown metric, or more shots than there are.
    """

    name: str = "gsm8k"
    shots: int = 4
    metric: str = "gsm8k"
    benchmark: ClassVar[str] = "mathematics"
    specs: ClassVar[dict[str, DatasetSpec]] = {"gsm8k": MATHS_SPECS["gsm8k"]}
    prompt: ClassVar[str] = f"\n\n{PLACE}\n"
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
        worked = [
            f"{_format_problem(shot['question'])}\n{_format_solution(shot['solution'], shot['answer'])}"
            for shot in shots
        ]
        return "\n\n".join([INSTRUCTION, *worked])

    def row_problem(self, row: Gsm8kRow) -> str | None:
        if not row.question.strip():
            return "without a question"
        return None if _FINAL.search(row.answer) else "without a last line '#### number'"

    def document(self, example: Example) -> str:
        return example.queries[0].question

    def example(self, position: int, row: Gsm8kRow) -> Example:
        [number] = _FINAL.findall(row.answer)
        solution = _CALCULATOR.sub("", _FINAL.sub("", row.answer)).strip()
        answer = number.replace(",", "")
        query = Query(
            _format_problem(row.question),
            (answer,),
            self.spec.max_new_tokens,
            written=_format_solution(solution, answer),
        )
        return Example(self.name, str(position), self.context, (query,))


def _format_problem(question: str) -> str:
    return f"Question: {question.strip()}\n{CUE}"


def _format_solution(solution: str, answer: str) -> str:
    return f"{solution}\nThe answer is {answer}."


class ProblemRow(BaseModel):
    """A problem of MATH-500, which has a subject, or of the AIME, whose answers may be numbers; keys in lower case."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    problem: str
    answer: str
    solution: str = ""
    subject: str = ""
    id: str = Field(default="", validation_alias=AliasChoices("unique_id", "id"))


@dataclass(frozen=True)
class TracedTask(DatasetTask[ProblemRow]):
    """Problems whose reply is a trace of up to `max_new_tokens` with the answer in a box; scores are by subject, too.

    The context is the problem, the question what is said of the reply.
    """

    max_new_tokens: int | None = None
    benchmark: ClassVar[str] = "mathematics"
    specs: ClassVar[dict[str, DatasetSpec]] = {name: spec for name, spec in MATHS_SPECS.items() if name != "gsm8k"}
    row: ClassVar[type[ProblemRow]] = ProblemRow
    traced: ClassVar[bool] = True

    def read(self) -> Sequence[ProblemRow]:
        """Return the rows, whatever the case of their columns' names."""
        rows = [{name.lower(): row[name] for name in row} for row in self.load()]
        return check_rows(rows, self.row, self.where)

    def row_problem(self, row: ProblemRow) -> str | None:
        return self.find_missing(row.problem, "", (row.answer,))

    def example(self, position: int, row: ProblemRow) -> Example:
        written = row.solution
        if extract_boxed(written) is None:
            written = f"{written}\nThe answer is \\boxed{{{row.answer}}}.".lstrip()
        about = {"id": row.id, "category": row.subject, "written": written}
        return self.make_example(position, row.problem, "", (row.answer,), self.max_new_tokens, **about)
