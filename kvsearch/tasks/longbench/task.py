"""One dataset of LongBench as a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.dataset_task import DatasetTask
from kvsearch.tasks.fields import IsList
from kvsearch.tasks.hub import Dataset, checked, load_rows, usable
from kvsearch.tasks.longbench.specs import LONGBENCH_E, LONGBENCH_TASKS, SPECS, Spec
from kvsearch.tasks.longbench.templates import TEMPLATES
from kvsearch.tasks.means import Scored, mean_by
from kvsearch.tasks.metrics import first_line
from kvsearch.tasks.splits import part
from kvsearch.tasks.templates import Template, find_template
from kvsearch.tasks.texts import is_blank

REPOSITORY = "zai-org/LongBench"
BUCKETS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}  # LongBench-E: the length each ends before, in words


class LongBenchRow(BaseModel):
    """A row of LongBench; `length` is in words (characters of Chinese)."""

    context: str
    input: str
    answers: Annotated[tuple[str, ...], IsList]
    length: int | None = None
    dataset: str | None = None
    all_classes: Annotated[tuple[str, ...], IsList] | None = None


@dataclass(frozen=True)
class LongBenchTask(DatasetTask):
    """A dataset of LongBench ("qasper") or LongBench-E ("qasper_e").

    `source` is a file, a folder with the unpacked data.zip, or a dataset id of the hub; `prompts` a JSON file of
    prompts to use in place of ours. Rows are read when they are first needed.

    Raises:
        UsageError: an unknown dataset or split, or prompts that cannot be used; on reading, unusable rows.
        EnvironmentFault: a package that the metric needs is missing; on reading, the hub cannot be reached.
    """

    source: str | Path = REPOSITORY

    def __post_init__(self) -> None:
        known = (*LONGBENCH_TASKS, *LONGBENCH_E)
        if self.name not in known:
            raise UsageError(f"unknown LongBench dataset {self.name!r}{suggest(self.name, known)}")
        super().__post_init__()

    @property
    def dataset(self) -> str:
        """The name without LongBench-E's ending."""
        return self.name.removesuffix("_e")

    @property
    def spec(self) -> Spec:
        return SPECS[self.dataset]

    @property
    def chat(self) -> bool:
        return self.spec.chat

    @property
    def stops(self) -> tuple[str, ...]:
        return self.spec.stops

    @cached_property
    def template(self) -> Template:
        return find_template(self.dataset, TEMPLATES, self.prompts)

    @cached_property
    def rows(self) -> tuple[Example, ...]:
        """All examples of the split; those of LongBench-E have keys that begin with their bucket."""
        name = self.name
        files = (name, f"data/{name}", f"{name}/test", f"{name}/test-*")
        members = (f"data/{name}.jsonl", f"{name}.jsonl")
        dataset = Dataset(REPOSITORY, name, "test", files, "data.zip", members)
        rows = checked(load_rows(dataset, self.source, self.revision), LongBenchRow, self._where)
        self._refuse_others(rows)
        kept = part(
            usable(rows, self._fault, self._where), self.split, self.shares, lambda item: item[1].context, self._where
        )
        return tuple(self._example(position, row) for position, row in kept)

    def score(self, reply: str, query: Query) -> float:
        """Return the dataset's metric, best of the answers; few-shot replies count up to their first line's end."""
        if self.spec.first_line:
            reply = first_line(reply)
        return super().score(reply, query)

    def _fault(self, row: LongBenchRow) -> str | None:
        if not row.context.strip():
            return "with an empty context"
        if self.template.asks and not row.input.strip():
            return "without a question"
        return None if any(not is_blank(answer) for answer in row.answers) else "without an answer"

    def _refuse_others(self, rows: list[LongBenchRow]) -> None:
        """Refuse rows of another dataset: files are named by the user, and must not be scored as what they are not."""
        for row in rows:
            found = (row.dataset or "").removesuffix("_e")
            if found != self.dataset and found in LONGBENCH_TASKS:
                raise UsageError(f"{self._where} holds rows of {found!r}: give the file of {self.dataset!r}")
            if self.name in LONGBENCH_E and row.length is None:
                raise UsageError(f"{self._where} has rows without a length, which LongBench-E needs")
            if self.spec.metric == "classification" and not row.all_classes:
                raise UsageError(f"{self._where} has rows without all_classes, the classes to choose from")

    def _example(self, position: int, row: LongBenchRow) -> Example:
        answers = tuple(answer for answer in row.answers if not is_blank(answer))
        question = self.template.question(row.input)
        query = Query(question, answers, self.spec.max_new_tokens, options=row.all_classes or ())
        key, length = str(position), row.length
        if self.name in LONGBENCH_E and length is not None:
            bucket = next(bucket for bucket, end in BUCKETS.items() if end is None or length < end)
            key = f"{bucket}/{position}"
        return Example(self.name, key, self.template.context(row.context), (query,))


def by_bucket(samples: Iterable[Scored]) -> dict[str, float]:
    """Return the mean score of the replies to LongBench-E per bucket of context lengths, shortest first."""
    means = mean_by(samples, lambda sample: sample.key.partition("/")[0])
    return {bucket: means[bucket] for bucket in BUCKETS if bucket in means}
