"""A user's own examples: one JSON object per line with context, question and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsearch.errors import UsageError
from kvsearch.naming import unknown
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import parse_json, problems_of
from kvsearch.tasks.base import Example, Query, TokenCount
from kvsearch.tasks.fields import Filled, IsList, NotEmpty
from kvsearch.tasks.metrics import METRICS, OF_ALL_ANSWERS, find_metric
from kvsearch.tasks.prompts import PLACE, PLAIN_PROMPT
from kvsearch.tasks.splits import ALL, SHARES, Shares, check_split, draw, part

SHOWN, SHOWN_LINES = 10, 3
CATEGORY, SEVERAL = "own", "several"
PLAIN_TEXT = "is plain text, as for perplexity: a task asks, give context, question and answers"


class JsonlRow(BaseModel):
    """One line of the file. Rows with the same context share one compressed cache.

    `prefix` is how the reply begins, `options` are all classes there are, for metrics that need them. `category` is
    the group that tables average the question in, `id` a name that results carry, of this row alone. `metric` and
    `prompt` (how a question follows a context without a chat template) are those of the whole file.
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
    id: Filled | Annotated[int, Field(strict=True)] | None = None


@dataclass(frozen=True)
class JsonlTask:
    """Examples of one file, which has one metric and prompt. No split divides a context.

    Where the rows have several categories, that of the task says so, and every query has its own.
    """

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
            list(dict.fromkeys(getattr(row, name) for row in rows.values()))
            for name in ("metric", "prompt", "category")
        )
        if not rows and not problems:
            problems.append("no rows")
        if len(metrics) > 1 and not problems:
            problems.append(f"the rows name the metrics {', '.join(sorted(metrics))}: one file has one metric")
        if len(prompts) > 1:
            problems.append("the rows have different prompts: one file has one prompt")
        problems += _doubled(rows)
        problems += [f"prompt {p!r} lacks {PLACE}" for p in prompts if PLACE not in p]
        problems += [unknown("metric", m, list(METRICS)) for m in metrics if m not in METRICS]
        if problems:
            more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise UsageError(f"{path} is not a usable task file:\n  " + "\n  ".join(problems[:SHOWN]) + more)
        name, several = Path(path).stem, len(categories) > 1
        examples = _grouped(name, list(rows.values()), several, metrics[0])
        return cls(name, examples, metrics[0], prompts[0], SEVERAL if several else categories[0], split, shares)

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return up to `samples` contexts, drawn without replacement if the split has more."""
        return draw(part(self.rows, self.split, self.shares, lambda example: example.key, self.name), samples, seed)

    def score(self, reply: str, query: Query) -> float:
        return METRICS[self.metric](reply, query)


def _read(path: str | Path) -> tuple[dict[int, JsonlRow], list[str]]:
    """Return the good rows of a file by their lines, and what is wrong with the others: equal problems as one."""
    rows: dict[int, JsonlRow] = {}
    problems: dict[str, list[int]] = {}  # the lines that have each; none where the words name their line
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, f"line {number}")
            if isinstance(row, dict) and "text" in row and "question" not in row:
                problems.setdefault(PLAIN_TEXT, []).append(number)
            else:
                rows[number] = JsonlRow.model_validate(row)
        except ValidationError as error:
            for problem in problems_of(error):
                problems.setdefault(problem, []).append(number)
        except UsageError as error:
            problems[str(error)] = []
    return rows, [f"{_lines(lines)}: {problem}" if lines else problem for problem, lines in problems.items()]


def _lines(numbers: Sequence[int]) -> str:
    """Name lines, the first few of many."""
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    shown = ", ".join(map(str, numbers[:SHOWN_LINES]))
    return f"{len(numbers)} lines ({shown}{', ...' if len(numbers) > SHOWN_LINES else ''})"


def _doubled(rows: Mapping[int, JsonlRow]) -> list[str]:
    """Return one problem that names the ids of several rows, if there are any."""
    lines: dict[str, list[int]] = {}
    for number, row in rows.items():
        if row.id is not None:
            lines.setdefault(str(row.id), []).append(number)
    found = [f"{name!r} on {_lines(those)}" for name, those in lines.items() if len(those) > 1]
    if not found:
        return []
    more = f" and {len(found) - SHOWN_LINES} more" if len(found) > SHOWN_LINES else ""
    return [f"an id is of one row: {'; '.join(found[:SHOWN_LINES])}{more}"]


def _grouped(task: str, rows: Sequence[JsonlRow], several: bool, metric: str) -> tuple[Example, ...]:
    """Return an example per context; queries name their category where there are `several`."""
    by_context: dict[str, list[Query]] = {}
    for row in rows:
        name, category = "" if row.id is None else str(row.id), row.category if several else ""
        written = ", ".join(row.answers) if metric in OF_ALL_ANSWERS else ""
        query = Query(row.question, row.answers, row.max_new_tokens, row.prefix, row.options, name, category, written)
        by_context.setdefault(row.context, []).append(query)
    return tuple(
        Example(task, str(number), context, tuple(queries))
        for number, (context, queries) in enumerate(by_context.items())
    )
