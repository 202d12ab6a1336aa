"""Tasks made of the rows of a public dataset, which are put into the template of a prompt."""

from __future__ import annotations

import string
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic

import yaml

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import delegate, require_known, suggest
from kvsearch.core.parsing import read_json
from kvsearch.core.resources import find_resource
from kvsearch.tasks.base import Example, Query, Task, TokenCount
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.metrics import find_metric
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.rows import Checked, Dataset, Row, check_rows, keep_usable_rows, load_rows, load_shared_rows
from kvsearch.tasks.splits import ALL, check_split, draw_items, select_split


@dataclass(frozen=True)
class DatasetSpec:
    """Settings of a dataset in a benchmark.

    `first_line`: of a reply only that line is scored. `options`: questions have answers to choose from. `chat` off: the
    prompt is text that is continued, also by models with a chat template. `rows` is where its rows are.
    """

    category: str
    metric: str
    max_new_tokens: int
    prompt: str
    rows: Dataset
    chat: bool = True
    first_line: bool = False
    stops: Sequence[str] = ()
    chinese: bool = False
    options: bool = False


def read_shipped(name: str) -> Any:
    """Return what a file of data/tasks describes."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(find_resource(f"data/tasks/{name}.yaml").read_text(encoding="utf-8"), loader)


def read_specs(benchmark: str) -> dict[str, DatasetSpec]:
    """Return the datasets of a benchmark, which may state `rows` for those that do not."""
    shipped = read_shipped(benchmark)
    shared = shipped.pop("rows", {})
    rows = {name: Dataset(**settings.get("rows", shared)) for name, settings in shipped.items()}
    return {name: DatasetSpec(**{**settings, "rows": rows[name]}) for name, settings in shipped.items()}


def read_texts(value: object) -> object:
    """Read one answer or several, texts or numbers, as a list of texts."""
    items = value if isinstance(value, list | tuple) else [value]
    return [str(item) if type(item) in (int, float) else item for item in items]


@dataclass(frozen=True)
class Template:
    """A prompt in the parts that are compressed (up to the context's end) and those that come after.

    `separator` is the white space between the two. `asks` says whether the row's question is part of the prompt.
    """

    head: str
    separator: str
    lead: str
    tail: str
    asks: bool

    def context(self, text: str) -> str:
        return self.head + text

    def question(self, text: str) -> str:
        return self.lead + text + self.tail if self.asks else self.lead


@dataclass(frozen=True)
class DatasetTask(Task, Generic[Checked]):
    """Rows of `source`, a file, a folder or a dataset id of the hub, which are read when they are first needed.

    Without a source they are the hub's. `prompts` is a JSON file of datasets and prompts to use in place of ours.

    Raises:
        UsageError: an unknown dataset or split, or prompts that cannot be used; on reading, unusable rows.
        EnvironmentFault: a package that the metric needs is missing; on reading, the hub cannot be reached.
    """

    name: str
    source: str | Path | None = None
    revision: str | None = None
    split: str = ALL
    prompts: Path | None = None
    benchmark: ClassVar[str]
    specs: ClassVar[Mapping[str, DatasetSpec]]
    shared: ClassVar[bool] = False  # several tasks have their rows in one file
    reads: ClassVar[Mapping[str, str]] = {
        "data": "source", "data_revision": "revision", "split": "split", "prompts": "prompts",
    }  # fmt: skip

    def __post_init__(self) -> None:
        """Check metric and template before any row is read."""
        require_known(f"{self.benchmark} dataset", self.name, [*self.specs])
        check_split(self.split)
        find_metric(self.metric)
        _ = self.template

    @property
    def dataset(self) -> Dataset:
        """Where the rows are."""
        return self.spec.rows.with_name(self.name)

    @property
    @abstractmethod
    def row(self) -> type[Checked]:
        """What the rows hold."""

    @abstractmethod
    def row_problem(self, row: Checked) -> str | None:
        """Return why a row cannot be used; None if it can."""

    @abstractmethod
    def example(self, position: int, row: Checked) -> Example:
        """Make the example of a row: its context, questions and answers."""

    def document(self, example: Example) -> str:
        """Return the text that no split divides."""
        return example.context

    @cached_property
    def rows(self) -> tuple[Example, ...]:
        """All examples of the split."""
        examples = [
            self.example(position, row) for position, row in keep_usable_rows(self.read(), self.row_problem, self.where)
        ]
        return tuple(select_split(examples, self.split, self.document, self.where))

    def read(self) -> Sequence[Checked]:
        """Return all rows; UsageError if columns or values are not the dataset's."""
        return check_rows(self.load(), self.row, self.where)

    def load(self) -> list[Row]:
        """Return all rows as they are."""
        load = load_shared_rows if self.shared else load_rows
        return load(self.dataset, self.source or self.dataset.hub, self.revision)

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return up to `samples` rows, drawn without replacement if the split has more."""
        return draw_items(self.rows, samples, seed)

    @property
    def where(self) -> str:
        """The task and its source, for messages."""
        return f"{self.name} of {self.source or self.dataset.hub}"

    @property
    def base_name(self) -> str:
        """The name that a prompt goes by, which variants of a dataset share."""
        return self.name

    @property
    def spec(self) -> DatasetSpec:
        return self.specs[self.name]

    @cached_property
    def template(self) -> Template:
        """The prompt of the dataset."""
        template = parse_template(self.spec.prompt, self.base_name)
        return template if self.prompts is None else read_template(self.prompts, self.base_name, template.asks)

    @property
    def prompt(self) -> str:
        return self.template.separator + PLACE

    metric = delegate("spec.metric")
    category = delegate("spec.category")
    chat = delegate("spec.chat")

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.spec.stops)

    def make_example(
        self,
        key: str | int,
        text: str,
        question: str,
        answers: Sequence[str],
        max_new_tokens: int | None = None,
        **details: Any,
    ) -> Example:
        """Make an example of one question in the template, by default with replies as long as the dataset's.

        Blank answers are left out; `details` are other fields of the `Query`.
        """
        kept = tuple(answer for answer in answers if not is_blank(answer))
        query = Query(self.template.question(question), kept, max_new_tokens or self.spec.max_new_tokens, **details)
        return Example(self.name, str(key), self.template.context(text), (query,))

    def find_missing(self, context: str, question: str, answers: Sequence[str]) -> str | None:
        """Return which of its texts a row lacks; None if it has all."""
        if not context.strip():
            return "with an empty context"
        if self.template.asks and not question.strip():
            return "without a question"
        return None if any(not is_blank(answer) for answer in answers) else "without an answer"


def parse_template(text: str, where: str) -> Template:
    """Split a prompt with `{context}` and, after it, at most one `{input}`.

    Raises:
        UsageError: other or misplaced fields, or nothing after the context.
    """
    fields = []
    literals = [""]
    try:
        for literal, name, form, conversion in string.Formatter().parse(text):
            literals[-1] += literal  # a literal brace ends a piece, too
            if name is not None:
                fields.append(name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else ""))
                literals.append("")
    except ValueError as error:
        raise UsageError(f"{where}: {error}; write literal braces twice") from error
    if fields not in (["context"], ["context", "input"]):
        listed = ", ".join(f"{{{name}}}" for name in fields) or "none"
        raise UsageError(f"{where} needs the fields {{context}} and, after it, at most one {{input}}: found {listed}")
    head, between, tail = [*literals, ""][:3]
    lead = between.lstrip()
    if len(fields) == 1 and not lead:
        raise UsageError(f"{where} ends with {{context}}: add what is asked, or the cue that starts the reply")
    return Template(head, between[: len(between) - len(lead)], lead, tail, len(fields) == 2)


def read_template(path: Path, name: str, asks: bool) -> Template:
    """Return the prompt of a dataset from a user's file.

    Raises:
        UsageError: there is no such file, it has no such prompt, or one without the question that the dataset asks.
    """
    prompts = read_json(path)
    if not isinstance(prompts, dict):
        raise UsageError(f"{path} holds no object of datasets and their prompts")
    if name not in prompts:
        raise UsageError(f"{path} has no prompt for {name!r}{suggest(name, list(prompts))}")
    where = f"{path}: the prompt for {name!r}"
    if not isinstance(prompts[name], str):
        raise UsageError(f"{where} is not text")
    template = parse_template(prompts[name], where)
    if asks and not template.asks:
        raise UsageError(f"{where} has no {{input}}, the place of the question")
    return template
