"""Tasks that a YAML file describes: a public dataset, its columns, the prompt around them, and a metric.

# mine.yaml
category: extraction
metric: qa_f1                 # a name of kvsearch.tasks.metrics
max_new_tokens: 32
prompt: |-
{context}

Question: {input}
Answer:
rows: {hub: me/my-questions, split: test}
columns: {context: passage, input: question, answers: answer}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import list_problems, list_validation_problems
from kvsearch.core.yaml_document import read_yaml
from kvsearch.tasks.base import Example
from kvsearch.tasks.dataset_task import DatasetSpec, DatasetTask, read_texts
from kvsearch.tasks.rows import Dataset, Row

COLUMNS = ("context", "input", "answers")  # of a row, as prompts and metrics call them


class TaskDescription(BaseModel):
    """The content of the file; `columns` are what the dataset calls ours, where it calls them otherwise."""

    model_config = ConfigDict(extra="forbid")

    category: str
    metric: str
    max_new_tokens: int
    prompt: str
    rows: dict[str, Any]
    columns: dict[str, str] = {}
    chat: bool = True
    stops: tuple[str, ...] = ()


class DescribedRow(BaseModel):
    """A row: its context, the question about it, and the right answers, one or several."""

    context: str
    answers: Annotated[tuple[str, ...], BeforeValidator(read_texts)]
    input: str = ""


@dataclass(frozen=True)
class DescribedTask(DatasetTask[DescribedRow]):
    """Base of the tasks that `read_task` makes."""

    benchmark: ClassVar[str] = "described"
    columns: ClassVar[Mapping[str, str]] = {}
    row: ClassVar[type[DescribedRow]] = DescribedRow

    def load(self) -> list[Row]:
        """Return all rows, with the columns that ours are called by."""
        return [{**row, **{ours: row.get(theirs) for ours, theirs in self.columns.items()}} for row in super().load()]

    def row_problem(self, row: DescribedRow) -> str | None:
        return self.find_missing(row.context, row.input, row.answers)

    def example(self, position: int, row: DescribedRow) -> Example:
        return self.make_example(position, row.context, row.input, row.answers)


def read_task(path: str | Path, name: str | None = None) -> type[DescribedTask]:
    """Make the task that a YAML file describes, by default with the name of the file.

    Raises:
        UsageError: there is no such file, or it does not describe a task; all problems in one message.
    """
    path = Path(path)
    name = name or path.stem
    try:
        about = TypeAdapter(TaskDescription).validate_python(read_yaml(path))
        rows = Dataset(**about.rows)
    except (ValidationError, TypeError) as error:
        problems = list_validation_problems(error) if isinstance(error, ValidationError) else [f"rows: {error}"]
        raise UsageError(list_problems(problems, str(path))) from error
    if unknown := sorted(set(about.columns) - set(COLUMNS)):
        raise UsageError(f"{path}: columns: {unknown[0]!r} is none of {', '.join(COLUMNS)}")
    spec = DatasetSpec(**about.model_dump(exclude={"rows", "columns"}), rows=rows)
    members = {"__annotations__": {"name": "str"}, "name": name, "specs": {name: spec}, "columns": about.columns}
    made: type[DescribedTask] = dataclass(frozen=True)(type(name, (DescribedTask,), members))
    return made
