"""What `headroom` found: as JSON, which is read again, as a table, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from kvsearch.evaluation.statistics import Row
from kvsearch.plan.parsing import shown
from kvsearch.report.asked import asked_words
from kvsearch.report.evaluation import plain_scores
from kvsearch.report.files.stored import Stored, require_fit
from kvsearch.strategies.names import FULL
from kvsearch.tasks.coverage import Coverage

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "kvsearch.headroom/1"
MEANING = (
    "oracle: true importance for the questions to come, which it knows; of several allocations the best for a context",
    "agnostic oracle: the same over its own and up to 24 other questions, for what no method can know",
)


class HeadroomResult(Stored):
    """Scores of the full cache, of oracles and of simple policies: a row per task, the mean of all last."""

    model: str
    ratio: float
    methods: tuple[str, ...]
    rows: tuple[Row, ...] = Field(min_length=1)
    asked: tuple[Coverage, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if FULL not in self.methods:
            raise ValueError("methods: the full cache is not among them")
        require_fit(
            f"rows: {shown(row.task)} has no score of {shown(method)}"
            for row in self.rows
            for method in self.methods
            if method not in row.scores
        )
        return self

    @property
    def shares(self) -> dict[str, float]:
        """The mean score of each method as a share of the full cache's."""
        mean = {method: self.rows[-1].scores[method].mean for method in self.methods}
        return {method: score / mean[FULL] if mean[FULL] else 0.0 for method, score in mean.items()}

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`; the scores are there by task and method, too, without their intervals."""
        scores = {row.task: {method: row.scores[method].mean for method in self.methods} for row in self.rows}
        return {"schema": SCHEMA, **self.model_dump(mode="json"), "scores": scores, "share_of_full": self.shares}

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        title = f"{self.model}: score with {100 * self.ratio:g}% evicted, {asked_words(self.asked)}"
        yield plain_scores(title, self.methods, self.rows)
        yield from MEANING
        listed = "; ".join(f"{method} {share:.2f}" for method, share in self.shares.items())
        yield f"share of the full-cache score: {listed}"
