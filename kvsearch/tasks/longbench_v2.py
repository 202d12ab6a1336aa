"""LongBench v2: questions with four choices about texts of 8,000 to 2 million words (Bai et al., arXiv 2412.15204)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetSpec, DatasetTask, read_specs
from kvsearch.tasks.metrics.infinitebench import LETTERS

SPECS = read_specs("longbench_v2")
LONGBENCH_V2 = tuple(SPECS)


class LongBenchV2Row(BaseModel):
    """A row of LongBench v2, whose answer is the letter of a choice."""

    id: str = Field(default="", alias="_id")
    domain: str
    length: str
    question: str
    choice_A: str  # noqa: N815
    choice_B: str  # noqa: N815
    choice_C: str  # noqa: N815
    choice_D: str  # noqa: N815
    answer: Literal["A", "B", "C", "D"]
    context: str

    @property
    def choices(self) -> list[str]:
        return [self.choice_A, self.choice_B, self.choice_C, self.choice_D]


@dataclass(frozen=True)
class LongBenchV2Task(DatasetTask[LongBenchV2Row]):
    """The questions of LongBench v2 about texts of one length ("v2_short"); scores are by domain, too."""

    benchmark: ClassVar[str] = "LongBench v2"
    specs: ClassVar[dict[str, DatasetSpec]] = SPECS
    row: ClassVar[type[LongBenchV2Row]] = LongBenchV2Row

    def read(self) -> Sequence[LongBenchV2Row]:
        """Return the rows of this length."""
        return [row for row in super().read() if self.name.endswith(f"_{row.length}")]

    def fault(self, row: LongBenchV2Row) -> str | None:
        if not all(choice.strip() for choice in row.choices):
            return "with a choice that is empty"
        return self.missing(row.context, row.question, (row.answer,))

    def example(self, position: int, row: LongBenchV2Row) -> Example:
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, row.choices, strict=True))
        query = Query(
            self.template.question(f"{row.question}\nChoices:\n{choices}"),
            (row.answer,),
            self.spec.max_new_tokens,
            id=row.id,
            category=row.domain,
            written=f"The correct answer is ({row.answer})",
        )
        return Example(self.name, str(position), self.template.context(row.context), (query,))
