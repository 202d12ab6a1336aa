"""Results of an evaluation and of `headroom`: several methods on the same questions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import FailFast, Field, PlainSerializer, model_validator

from kvsearch.core.fields import is_none
from kvsearch.core.items import group_by_key
from kvsearch.evaluation.names import FULL
from kvsearch.evaluation.samples import Footprint, LayerLoss
from kvsearch.evaluation.statistics import MACRO, RETAINED, Kind, Row, TraceLength
from kvsearch.plan import Size
from kvsearch.plan.origin import Guarantee
from kvsearch.plan.schema import Protocol
from kvsearch.results import Result, Stored
from kvsearch.runs.estimates import Difference, Estimate, TextLoss, find_doubt
from kvsearch.tasks.base import Coverage, Sampling
from kvsearch.tasks.longbench import AVERAGES
from kvsearch.tasks.niah import GridCell, NiahTask

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.samples import Sample
    from kvsearch.evaluation.statistics import SizeBlock

SECTIONS: dict[Kind, str] = {"task": "tasks", "category": "categories", "average": "averages"}
Scores = dict[str, dict[str, Estimate]]  # by section and row
Differences = dict[str, dict[str, Difference]]
Found = TypeVar("Found")
LossField = Annotated[LayerLoss, PlainSerializer(lambda loss: {**asdict(loss), "ratio": loss.ratio})]
TracesField = Annotated[dict[str, TraceLength], Field(exclude_if=lambda traces: not traces)]  # by task
# by section and row, of rows whose tasks are all teacher-forced
NatsField = Annotated[dict[str, dict[str, TextLoss]], Field(exclude_if=lambda nats: not nats)]
SizeField = Annotated[Size, PlainSerializer(lambda size: size.as_json())]


class ScoreRow(NamedTuple):
    """A task, a category or an average on which every method has a score."""

    kind: Kind
    name: str
    questions: int

    def of(self, sections: Mapping[str, Mapping[str, Found]]) -> Found:
        """Return the score or the difference of this row."""
        return sections[SECTIONS[self.kind]][self.name]

    def is_in(self, sections: Mapping[str, Mapping[str, object]]) -> bool:
        """Tell whether there is something of this row."""
        return self.name in sections.get(SECTIONS[self.kind], {})


class FullScores(Stored):
    """What the full cache scored."""

    held: Footprint
    scores: Scores
    traces: TracesField = Field(default_factory=dict)
    nats: NatsField = Field(default_factory=dict)


class MethodScores(FullScores):
    """What one method scored, and what it scored more than the subject (None: it is the subject)."""

    name: str
    label: str
    definition: dict[str, Any]
    phases: str
    differences: Differences | None
    contexts: dict[str, Any] | None  # what the method knew of the contexts that were asked
    tasks_won: dict[str, int] | None  # on how many it won, tied and lost


class SizeScores(Stored):
    """The methods of one size; `size` is None of plans and their baselines."""

    size: SizeField | None
    methods: tuple[MethodScores, ...]
    full_differences: Differences | None

    def method(self, name: str) -> MethodScores | None:
        """Return the method of a name; None if it is the full cache."""
        return next((method for method in self.methods if method.name == name), None)

    @property
    def heading(self) -> str:
        """The size in words; nothing of plans."""
        return "" if self.size is None else self.size.words


class NeedleGrid(Stored):
    """Scores of needles by depth (rows) and length in tokens; None where nothing was asked."""

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    scores: Annotated[tuple[Annotated[tuple[float | None, ...], FailFast()], ...], FailFast()]
    mean: float

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> NeedleGrid:
        """Return the mean score of every cell, from the samples of one method."""
        replies = group_by_key(samples, lambda sample: GridCell.parse(sample.key))
        depths = tuple(sorted({cell.depth for cell in replies}))
        lengths = tuple(sorted({cell.length for cell in replies}))
        means = {cell: math.fsum(reply.score for reply in mine) / len(mine) for cell, mine in replies.items()}
        rows = tuple(tuple(means.get(GridCell(length, depth)) for length in lengths) for depth in depths)
        mean = float(np.mean([score for row in rows for score in row if score is not None]))
        return cls(lengths=lengths, depths=depths, scores=rows, mean=mean)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if [len(row) for row in self.scores] != [len(self.lengths)] * len(self.depths):
            raise ValueError("scores are not those of its depths and lengths")
        return self


class ShownLoss(Stored):
    """What a plan was shown to lose at most; `holds` says whether it was shown to lose no more than was `wished`."""

    guarantee: Guarantee
    wished: float | None = Field(default=None, exclude_if=is_none)
    holds: bool | None = Field(default=None, exclude_if=is_none)


class EvaluationResult(Result):
    """Scores in [0, 1] of several methods, differences to one of them (the subject), and what each held.

    docs/evaluation.md describes every field. Single replies and the machine's speed are not in it.
    """

    SCHEMA: ClassVar[str] = "kvsearch.evaluation/1"

    model: str
    samples: int
    protocol: Protocol
    seed: int
    batch: int | None
    max_memory: int | None
    max_length: int | None
    sampling: Sampling | None = Field(default=None, exclude_if=is_none)
    subject: str
    phases: str
    environment: dict[str, Any]
    most_tokens: int | None
    tasks: tuple[Coverage, ...]
    averages: dict[str, tuple[str, ...]]
    full: FullScores
    blocks: tuple[SizeScores, ...] = Field(min_length=1)
    notes: tuple[str, ...]
    different: str | None = Field(alias="different_settings")
    needle: dict[str, NeedleGrid] | None = Field(default=None, exclude_if=lambda needle: not needle)
    losses: tuple[LossField, ...] | None = Field(default=None, exclude_if=is_none)
    guarantees: dict[str, ShownLoss] = Field(default_factory=dict, exclude_if=lambda guarantees: not guarantees)

    @classmethod
    def of(
        cls,
        evaluation: Evaluation,
        losses: Sequence[LayerLoss] | None = None,
        guarantees: Mapping[str, ShownLoss] | None = None,
    ) -> EvaluationResult:
        """Make the result of an evaluation; output losses of layers and guarantees of plans where they were wanted."""
        tasks = [replace(task, metric=evaluation.metrics[task.task]) for task in evaluation.coverage]
        block = evaluation.blocks[0]
        full = FullScores(
            held=evaluation.held[FULL], scores=_scores(block, FULL), traces=evaluation.traces.get(FULL, {}),
            nats=_nats(block, FULL),
        )  # fmt: skip
        averages = evaluation.averages | ({RETAINED: evaluation.retained} if evaluation.retained else {})
        return cls(
            model=evaluation.loaded.name, **evaluation.split.as_json(), subject=evaluation.subject,
            phases=evaluation.phases, environment=evaluation.environment, most_tokens=evaluation.most_tokens,
            tasks=tuple(tasks),
            averages=averages, full=full, blocks=tuple(_size(block, evaluation) for block in evaluation.blocks),
            notes=tuple(evaluation.notes), different_settings=evaluation.different,
            needle=make_needle_grids(evaluation.samples),
            losses=None if losses is None else tuple(losses), guarantees=dict(guarantees or {}),
        )  # fmt: skip

    @cached_property
    def rows(self) -> tuple[ScoreRow, ...]:
        """Tasks, then categories if there are several, then the named averages, as they were asked."""
        order: Mapping[Kind, list[str]] = {
            "task": [task.task for task in self.tasks],
            "category": [task.category for task in self.tasks],
            "average": [MACRO, RETAINED, *AVERAGES],
        }
        rows = []
        for kind, names in order.items():
            section = self.full.scores.get(SECTIONS[kind], {})
            for name in dict.fromkeys([*names, *section]):
                if name in section:
                    questions = self._questions(kind, name)
                    rows.append(ScoreRow(kind, name, questions))
        return tuple(rows)

    @property
    def overall(self) -> ScoreRow:
        """The mean over all tasks."""
        return {row.name: row for row in self.rows if row.kind == "average"}[MACRO]

    @property
    def on_text(self) -> bool:
        """Whether all tasks are teacher-forced, so that losses say everything."""
        return self.overall.is_in(self.full.nats)

    def measured(self, scores: FullScores) -> Estimate:
        """Return what is compared, the mean over all tasks: the score, or on text the loss above the full cache."""
        return self.overall.of(scores.nats).excess if self.on_text else self.overall.of(scores.scores)

    @property
    def doubt(self) -> str | None:
        """Why the evaluation may say little, if it does."""
        return find_doubt(self.overall.of(self.full.scores))

    def _questions(self, kind: Kind, name: str) -> int:
        """Return the questions of a row: those that any of its differences has won, tied and lost."""
        block = self.blocks[0]
        for differences in (block.full_differences, *(method.differences for method in block.methods)):
            difference = (differences or {}).get(SECTIONS[kind], {}).get(name)
            if difference is not None:
                return difference.wins + difference.ties + difference.losses
        return 0


class HeadroomResult(Result):
    """Scores of the full cache, by true importance and of simple policies: a row per task, the mean of all last."""

    SCHEMA: ClassVar[str] = "kvsearch.headroom/1"

    model: str
    ratio: float
    methods: tuple[str, ...]
    rows: tuple[Row, ...] = Field(min_length=1)
    asked: tuple[Coverage, ...]

    @property
    def shares(self) -> dict[str, float]:
        """The mean score of each method as a share of the full cache's."""
        mean = {method: self.rows[-1].scores[method].mean for method in self.methods}
        return {method: score / mean[FULL] if mean[FULL] else 0.0 for method, score in mean.items()}

    def as_json(self) -> dict[str, Any]:
        """Return what is written; the scores are there by task and method, too, without their intervals."""
        scores = {row.task: {method: row.scores[method].mean for method in self.methods} for row in self.rows}
        return {**super().as_json(), "scores": scores, "share_of_full": self.shares}


def count_tasks_won(differences: Differences) -> dict[str, int] | None:
    """Return on how many tasks a method's mean is above, at and below the subject's; None if the tasks are one.

    Source: LAVa, Fig. 5 (winning rates).
    """
    tasks = differences[SECTIONS["task"]].values()
    if len(tasks) == 1:
        return None
    signs = Counter(int(np.sign(difference.mean)) for difference in tasks)
    return {"wins": signs[1], "ties": signs[0], "losses": signs[-1]}


def make_needle_grids(samples: Sequence[Sample]) -> dict[str, NeedleGrid]:
    """Return the grid of every method, from its replies to the task `niah`; other samples are left out."""
    mine = [sample for sample in samples if sample.task == NiahTask.name]
    return {method: NeedleGrid.of(replies) for method, replies in group_by_key(mine, attrgetter("method")).items()}


def _size(block: SizeBlock, evaluation: Evaluation) -> SizeScores:
    """Return the methods of one size."""
    by_label = {method.label: method for method in evaluation.methods}
    methods = []
    for name, label in block.methods.items():
        differences = _differences(block, label)
        method = MethodScores(
            name=name, label=label, definition=by_label[label].definition, phases=by_label[label].phases,
            held=evaluation.held[label], scores=_scores(block, label), traces=evaluation.traces.get(label, {}),
            nats=_nats(block, label), differences=differences,
            contexts=evaluation.seen[name].as_json() if name in evaluation.seen else None,
            tasks_won=None if differences is None else count_tasks_won(differences),
        )  # fmt: skip
        methods.append(method)
    return SizeScores(size=block.size, methods=tuple(methods), full_differences=_differences(block, FULL))


def _scores(block: SizeBlock, label: str) -> Scores:
    return _by_section(block, lambda row: row.scores[label])


def _nats(block: SizeBlock, label: str) -> NatsField:
    """Return the losses of a method; the full cache's without differences, as each size has a subject of its own."""
    by_section: NatsField = {}
    for row in block.rows:
        if label in row.nats:
            losses = row.nats[label]
            by_section.setdefault(SECTIONS[row.kind], {})[row.task] = (
                replace(losses, difference=None) if label == FULL else losses
            )
    return by_section


def _differences(block: SizeBlock, label: str) -> Differences | None:
    return None if label == block.subject else _by_section(block, lambda row: block.difference(row, label))


def _by_section(block: SizeBlock, value: Callable[[Row], Found]) -> dict[str, dict[str, Found]]:
    by_section: dict[str, dict[str, Found]] = {section: {} for section in SECTIONS.values()}
    for row in block.rows:
        by_section[SECTIONS[row.kind]][row.task] = value(row)
    return by_section
