"""InfiniteBench: tasks on texts of 100,000 tokens and more, English and Chinese (Zhang et al., arXiv 2402.13718)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator

from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetSpec, DatasetTask, read_specs, read_texts
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.metrics.infinitebench import LETTERS

INFINITEBENCH_SPECS = read_specs("infinitebench")
INFINITEBENCH_TASKS = tuple(INFINITEBENCH_SPECS)
INFINITEBENCH_LAVA = ("longbook_sum_eng", "longbook_choice_eng", "longdialogue_qa_eng")  # LAVa, Table 12


class InfiniteBenchRow(BaseModel):
    """A row of InfiniteBench; `options` are empty where there is nothing to choose from."""

    context: str
    answer: Annotated[tuple[str, ...], BeforeValidator(read_texts)]
    input: str = ""
    options: tuple[str, ...] = ()


class InfiniteBenchTask(DatasetTask[InfiniteBenchRow]):
    """A dataset of InfiniteBench ("longbook_sum_eng").

    Contexts beyond a model's positions lose their middle, as in the official scripts.
    """

    benchmark: ClassVar[str] = "InfiniteBench"
    specs: ClassVar[dict[str, DatasetSpec]] = INFINITEBENCH_SPECS
    row: ClassVar[type[InfiniteBenchRow]] = InfiniteBenchRow

    def row_problem(self, row: InfiniteBenchRow) -> str | None:
        if not self.spec.options or not row.context.strip():
            return self.find_missing(row.context, row.input, row.answer)
        if not 2 <= len(row.options) <= len(LETTERS):
            return f"without 2 to {len(LETTERS)} options to choose from"
        return None if row.answer and row.answer[0] in row.options else "whose answer is none of the options"

    def example(self, position: int, row: InfiniteBenchRow) -> Example:
        question = row.input
        answers = tuple(answer for answer in row.answer if not is_blank(answer))
        if self.spec.options:
            options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, row.options, strict=False))
            question = f"{question}\n{options}" if question.strip() else options
            answers = answers[:1]  # rows may name the letter of the answer after its text
        query = Query(self.template.question(question), answers, self.spec.max_new_tokens, options=row.options)
        return Example(self.name, str(position), self.template.context(row.context), (query,))
