"""One dataset of InfiniteBench as a task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetTask
from kvsearch.tasks.fields import IsList
from kvsearch.tasks.hub import Dataset, checked, load_rows, usable
from kvsearch.tasks.infinitebench.specs import INFINITEBENCH_TASKS, SPECS, TEMPLATES, Spec
from kvsearch.tasks.metrics.infinitebench import LETTERS
from kvsearch.tasks.splits import part
from kvsearch.tasks.templates import Template, find_template
from kvsearch.tasks.texts import is_blank

REPOSITORY = "xinrongzhang2022/InfiniteBench"


def _texts(value: object) -> object:
    """Read one answer or several, texts or numbers, as a list of texts."""
    items = value if isinstance(value, list | tuple) else [value]
    return [str(item) if type(item) in (int, float) else item for item in items]


class InfiniteBenchRow(BaseModel):
    """A row of InfiniteBench; `options` are empty where there is nothing to choose from."""

    context: str
    answer: Annotated[tuple[str, ...], IsList, BeforeValidator(_texts)]
    input: str = ""
    options: Annotated[tuple[str, ...], IsList] = ()


@dataclass(frozen=True)
class InfiniteBenchTask(DatasetTask):
    """A dataset of InfiniteBench ("longbook_sum_eng").

    `source` is a file, a folder with the unpacked files, or a dataset id of the hub; `prompts` a JSON file of prompts
    to use in place of ours. Rows are read when they are first needed. Contexts beyond a model's positions lose their
    middle, as in the official scripts.

    Raises:
        UsageError: an unknown dataset or split, or prompts that cannot be used; on reading, unusable rows.
        EnvironmentFault: a package that the metric needs is missing; on reading, the hub cannot be reached.
    """

    source: str | Path = REPOSITORY

    chat: ClassVar[bool] = True
    stops: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.name not in INFINITEBENCH_TASKS:
            raise UsageError(f"unknown InfiniteBench dataset {self.name!r}{suggest(self.name, INFINITEBENCH_TASKS)}")
        super().__post_init__()

    @property
    def spec(self) -> Spec:
        return SPECS[self.name]

    @cached_property
    def template(self) -> Template:
        return find_template(self.name, TEMPLATES, self.prompts)

    @cached_property
    def rows(self) -> tuple[Example, ...]:
        """All examples of the split."""
        dataset = Dataset(REPOSITORY, "default", self.name, (self.name, f"data/{self.name}"), file=f"{self.name}.jsonl")
        rows = checked(load_rows(dataset, self.source, self.revision), InfiniteBenchRow, self._where)
        kept = part(
            usable(rows, self._fault, self._where), self.split, self.shares, lambda item: item[1].context, self._where
        )
        return tuple(self._example(position, row) for position, row in kept)

    def _fault(self, row: InfiniteBenchRow) -> str | None:
        if not row.context.strip():
            return "with an empty context"
        if self.spec.options:
            if not 2 <= len(row.options) <= len(LETTERS):
                return f"without 2 to {len(LETTERS)} options to choose from"
            return None if row.answer and row.answer[0] in row.options else "whose answer is none of the options"
        if self.template.asks and not row.input.strip():
            return "without a question"
        return None if any(not is_blank(answer) for answer in row.answer) else "without an answer"

    def _example(self, position: int, row: InfiniteBenchRow) -> Example:
        asked, answers = row.input, tuple(answer for answer in row.answer if not is_blank(answer))
        if self.spec.options:  # rows may name the letter of the answer after its text
            listed = (f"{letter}. {option}" for letter, option in zip(LETTERS, row.options, strict=False))
            asked, answers = "\n".join([*[asked] * bool(asked.strip()), *listed]), answers[:1]
        query = Query(self.template.question(asked), answers, self.spec.max_new_tokens, options=row.options)
        return Example(self.name, str(position), self.template.context(row.context), (query,))
