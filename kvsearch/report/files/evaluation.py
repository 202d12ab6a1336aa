"""The report of an evaluation, read again: all that its tables are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from pydantic import FailFast, Field, model_validator

from kvsearch.evaluation.averages import MACRO, SizeBlock
from kvsearch.evaluation.footprint import Footprint
from kvsearch.evaluation.layer_loss import LayerLoss
from kvsearch.evaluation.statistics import Kind, Row
from kvsearch.plan import Size
from kvsearch.plan.parsing import shown
from kvsearch.plan.protocol import Protocol
from kvsearch.report.files.stored import Stored, require_fit
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.strategies.names import FULL
from kvsearch.tasks.coverage import Coverage
from kvsearch.tasks.longbench.specs import AVERAGES
from kvsearch.tasks.niah import Grid

SECTIONS: dict[Kind, str] = {"task": "tasks", "category": "categories", "average": "averages"}
Scores = dict[str, dict[str, Estimate]]  # by section and row
Differences = dict[str, dict[str, Difference]]


class StoredMethod(Stored):
    """What one method scored, and what it scored more than the subject (None: it is the subject)."""

    name: str
    label: str
    held: Footprint
    scores: Scores
    differences: Differences | None = None


class StoredFull(Stored):
    """What the full cache scored."""

    held: Footprint
    scores: Scores


class StoredBlock(Stored):
    """The methods of one size; `size` is None of plans and their baselines."""

    size: Size | None
    methods: tuple[StoredMethod, ...]
    full_differences: Differences | None = None


class StoredGrid(Stored):
    """Scores of needles by depth (rows) and length in tokens; None where nothing was asked."""

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    scores: Annotated[tuple[Annotated[tuple[float | None, ...], FailFast()], ...], FailFast()]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if [len(row) for row in self.scores] != [len(self.lengths)] * len(self.depths):
            raise ValueError("scores are not those of its depths and lengths")
        return self


class StoredEvaluation(Stored):
    """A finished evaluation, as `report.json` keeps it; what tables read of it is named as in a `Comparison`."""

    model: str
    subject: str
    protocol: Protocol
    phases: str
    seed: int = 0
    coverage: list[Coverage] = Field(alias="tasks")
    averages: dict[str, tuple[str, ...]]
    full: StoredFull
    sizes: tuple[StoredBlock, ...] = Field(alias="blocks", min_length=1)
    notes: tuple[str, ...] = ()
    different: str | None = Field(default=None, alias="different_settings")
    needle: dict[str, StoredGrid] = Field(default_factory=dict)
    losses: list[LayerLoss] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        require_fit(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what tables would look for in vain."""
        if not min(self.full.held.entries, self.full.held.bytes) > 0:
            yield "full.held: the full cache holds nothing"
        rows = {(section, name) for section in SECTIONS.values() for name in self.full.scores.get(section, ())}
        if not self.full.scores.get(SECTIONS["task"]):
            yield "full.scores: has no task"
        if (SECTIONS["average"], MACRO) not in rows:
            yield f"full.scores: has no mean over all tasks, {MACRO!r}"
        for name in {name for section, name in rows if section == SECTIONS["average"]} - self.averages.keys():
            yield f"averages: nothing is said of {shown(name)}, which the full cache has a score of"
        for number, block in enumerate(self.sizes):
            if self.subject not in {FULL, *(one.name for one in block.methods)}:
                yield f"blocks.{number}: has no method {shown(self.subject)}, the subject"
            told: list[tuple[str, Scores | Differences | None]] = []
            for one in block.methods:
                told += [(f"{one.label}: scores", one.scores)]
                told += [(f"{one.label}: differences", one.differences)] * (one.name != self.subject)
            told += [("full_differences", block.full_differences)] * (self.subject != FULL)
            for what, found in told:
                missing = sorted(name for section, name in rows if name not in (found or {}).get(section, ()))
                if missing:
                    yield f"blocks.{number}: {shown(what)} have nothing of {shown(missing[0])}"

    @cached_property
    def blocks(self) -> list[SizeBlock]:
        """Methods of one size side by side, in order."""
        return [self._block(one) for one in self.sizes]

    @cached_property
    def held(self) -> dict[str, Footprint]:
        """What each method (by label) held in the cache, means over the questions."""
        return {FULL: self.full.held, **{one.label: one.held for block in self.sizes for one in block.methods}}

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The needle's grid of every method, where needles were asked for."""
        rows = {name: [[np.nan if one is None else one for one in row] for row in grid.scores]
                for name, grid in self.needle.items()}  # fmt: skip
        return {name: Grid(grid.depths, grid.lengths, np.array(rows[name])) for name, grid in self.needle.items()}

    def _block(self, block: StoredBlock) -> SizeBlock:
        labels = {one.name: one.label for one in block.methods}
        scores = {FULL: self.full.scores, **{one.label: one.scores for one in block.methods}}
        known = {FULL: block.full_differences, **{one.label: one.differences for one in block.methods}}
        differences = {label: found for label, found in known.items() if found is not None}
        rows = [
            Row(
                name, kind, self._questions(name, kind),
                {label: found[SECTIONS[kind]][name] for label, found in scores.items()},
                {label: _reversed(found[SECTIONS[kind]][name]) for label, found in differences.items()},
            )
            for kind, name in self._rows(self.full.scores)
        ]  # fmt: skip
        return SizeBlock(block.size, labels, {**labels, FULL: FULL}[self.subject], rows)

    def _rows(self, scores: Scores) -> Iterator[tuple[Kind, str]]:
        """Yield the rows in the order of a comparison, which a file of sorted keys does not have."""
        wanted: Mapping[Kind, list[str]] = {
            "task": [one.task for one in self.coverage],
            "category": [one.category for one in self.coverage],
            "average": [MACRO, *AVERAGES],
        }
        for kind, order in wanted.items():
            there = scores.get(SECTIONS[kind], {})
            yield from ((kind, name) for name in dict.fromkeys([*order, *sorted(there)]) if name in there)

    def _questions(self, name: str, kind: Kind) -> int:
        """Count the questions of a row; those of a category are of the tasks that are named after it."""
        tasks = self.averages[name] if kind == "average" else (name,)
        return sum(
            one.questions
            for one in self.coverage
            if (one.category == name if kind == "category" else one.task in tasks)
        )


def _reversed(found: Difference) -> Difference:
    """Return the subject minus a method, of a method minus the subject."""
    mean, low, high = (0.0 - value for value in (found.mean, found.high, found.low))
    return Difference(mean, low, high, found.losses, found.ties, found.wins)
