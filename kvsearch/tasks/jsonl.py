"""A user's own examples: one JSON object per line with context, question and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import parse_json, problems_of
from kvsearch.tasks.base import Example, Query, TokenCount
from kvsearch.tasks.fields import Filled, NotEmpty
from kvsearch.tasks.metrics import METRICS
from kvsearch.tasks.prompts import PLAIN_PROMPT

SHOWN = 10


class JsonlRow(BaseModel):
    """One line of the file. Rows with the same context share one compressed cache; `metric` and `prompt` (how a
    question follows a context without a chat template) are those of the whole file.
    """

    model_config = ConfigDict(extra="forbid")

    context: Filled
    question: Filled
    answers: Annotated[tuple[Filled, ...], NotEmpty]
    max_new_tokens: int = Field(default=64, ge=1)
    metric: str = "contains"
    prompt: str = PLAIN_PROMPT


@dataclass(frozen=True)
class JsonlTask:
    """Examples of one file; metric and prompt are the same for all of its rows."""

    name: str
    rows: tuple[Example, ...]
    metric: str
    prompt: str = PLAIN_PROMPT
    category: ClassVar[str] = "own"
    chat: ClassVar[bool] = True
    stops: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, path: str | Path) -> JsonlTask:
        """Read and check a file; UsageError lists the bad lines."""
        rows, problems = [], []
        for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                rows.append(JsonlRow.model_validate(parse_json(line, f"line {number}")))
            except ValidationError as error:
                problems += [f"line {number}: {problem}" for problem in problems_of(error)]
            except UsageError as error:
                problems.append(str(error))
        metrics = sorted({row.metric for row in rows})
        if not problems and len(metrics) != 1:
            problems.append(
                f"the rows name the metrics {', '.join(metrics)}: one file has one metric" if metrics else "no rows"
            )
        prompts = sorted({row.prompt for row in rows})
        if len(prompts) > 1:
            problems.append("the rows have different prompts: one file has one prompt")
        problems += [f"prompt {p!r} lacks {{question}}" for p in prompts if "{question}" not in p]
        problems += [f"unknown metric {m!r} (known: {', '.join(METRICS)})" for m in metrics if m not in METRICS]
        if problems:
            more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise UsageError(f"{path} is not a usable task file:\n  " + "\n  ".join(problems[:SHOWN]) + more)
        return cls(Path(path).stem, _grouped(Path(path).stem, rows), metrics[0], prompts[0])

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Up to `samples` contexts, drawn without replacement if the file has more."""
        if samples >= len(self.rows):
            return list(self.rows)
        return random.Random(seed).sample(list(self.rows), samples)

    def score(self, reply: str, query: Query) -> float:
        return METRICS[self.metric](reply, query.answers)


def _grouped(task: str, rows: Sequence[JsonlRow]) -> tuple[Example, ...]:
    by_context: dict[str, list[Query]] = {}
    for row in rows:
        by_context.setdefault(row.context, []).append(Query(row.question, row.answers, row.max_new_tokens))
    return tuple(
        Example(task, str(number), context, tuple(queries))
        for number, (context, queries) in enumerate(by_context.items())
    )
