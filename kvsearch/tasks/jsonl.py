"""A user's own examples: one JSON object per line with context, question and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import parse_json, problems_of
from kvsearch.tasks.base import Example, Query, TokenCount
from kvsearch.tasks.fields import Filled, IsList, NotEmpty
from kvsearch.tasks.metrics import METRICS, find_metric
from kvsearch.tasks.prompts import PLACE, PLAIN_PROMPT
from kvsearch.tasks.splits import ALL, SHARES, Shares, check_split, draw, part

SHOWN = 10
CATEGORY = "own"
PLAIN_TEXT = "is plain text, as for perplexity: a task asks, give context, question and answers"


class JsonlRow(BaseModel):
    """One line of the file. Rows with the same context share one compressed cache.

    `prefix` is how the reply begins, `options` are all classes there are, for metrics that need them. `metric`,
    `category` (the group that tables average the file in) and `prompt` (how a question follows a context without a
    chat template) are those of the whole file.
    """

    model_config = ConfigDict(extra="forbid")

    context: Filled
    question: Filled
    answers: Annotated[tuple[Filled, ...], IsList, NotEmpty]
    max_new_tokens: int = Field(default=64, ge=1)
    prefix: str = ""
    options: Annotated[tuple[Filled, ...], IsList] = ()
    metric: str = "contains"
    prompt: str = PLAIN_PROMPT
    category: Filled = CATEGORY


@dataclass(frozen=True)
class JsonlTask:
    """Examples of one file, which has one metric, prompt and category. No split divides a context."""

    name: str
    rows: tuple[Example, ...]
    metric: str
    prompt: str = PLAIN_PROMPT
    category: str = CATEGORY
    split: str = ALL
    shares: Shares = SHARES
    chat: ClassVar[bool] = True
    stops: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        find_metric(self.metric)
        check_split(self.split, self.shares)

    @classmethod
    def load(cls, path: str | Path, split: str = ALL, shares: Shares = SHARES) -> JsonlTask:
        """Read and check a file.

        Raises:
            UsageError: there is no such file, or rows are bad; the message lists them.
            EnvironmentFault: a package that the metric needs is missing.
        """
        rows, problems = _read(path)
        metrics, prompts, categories = (
            list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("metric", "prompt", "category")
        )
        if not rows and not problems:
            problems.append("no rows")
        if len(metrics) > 1 and not problems:
            problems.append(f"the rows name the metrics {', '.join(sorted(metrics))}: one file has one metric")
        if len(prompts) > 1:
            problems.append("the rows have different prompts: one file has one prompt")
        if len(categories) > 1:
            problems.append(f"the rows name the categories {', '.join(sorted(categories))}: one file has one category")
        problems += [f"prompt {p!r} lacks {PLACE}" for p in prompts if PLACE not in p]
        problems += [f"unknown metric {m!r}{suggest(m, list(METRICS))}" for m in metrics if m not in METRICS]
        if problems:
            more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise UsageError(f"{path} is not a usable task file:\n  " + "\n  ".join(problems[:SHOWN]) + more)
        name = Path(path).stem
        return cls(name, _grouped(name, rows), metrics[0], prompts[0], categories[0], split, shares)

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return up to `samples` contexts, drawn without replacement if the split has more."""
        return draw(part(self.rows, self.split, self.shares, lambda example: example.key), samples, seed)

    def score(self, reply: str, query: Query) -> float:
        return METRICS[self.metric](reply, query)


def _read(path: str | Path) -> tuple[list[JsonlRow], list[str]]:
    """Return the good rows of a file, and what is wrong with the others."""
    rows, problems = [], []
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, f"line {number}")
            if isinstance(row, dict) and "text" in row and "question" not in row:
                problems.append(f"line {number}: {PLAIN_TEXT}")
            else:
                rows.append(JsonlRow.model_validate(row))
        except ValidationError as error:
            problems += [f"line {number}: {problem}" for problem in problems_of(error)]
        except UsageError as error:
            problems.append(str(error))
    return rows, problems


def _grouped(task: str, rows: Sequence[JsonlRow]) -> tuple[Example, ...]:
    by_context: dict[str, list[Query]] = {}
    for row in rows:
        query = Query(row.question, row.answers, row.max_new_tokens, row.prefix, row.options)
        by_context.setdefault(row.context, []).append(query)
    return tuple(
        Example(task, str(number), context, tuple(queries))
        for number, (context, queries) in enumerate(by_context.items())
    )
