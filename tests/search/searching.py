"""Searches without a model: a frame, start plans, and an evaluator whose values follow from the budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.core.arrays import Floats, Ints
from kvsearch.search.loop import Search, SearchOutcome
from kvsearch.search.settings import EvolveSettings
from kvsearch.search.stages import BudgetBounds, SearchStage
from kvsearch.search.trials import JOB_SIZE, Candidate, GenerationRecord, Tables, TrialLog, TrialRunner
from kvsearch.workers.base import SerialExecutor
from tests.runs.notes import read_again

LAYERS, HEADS, BUDGET, SAMPLES = 4, 2, 16, 6
TOKENS = 10  # of one candidate on one sample

Loss = Callable[[Ints, int], float]


def smooth(table: Ints, sample: int) -> float:
    """What a layer lacks costs exponentially; layer 2 needs most, and samples differ a little."""
    weights = np.array([1.0, 0.5, 4.0, 1.0])[: len(table)] + 0.1 * sample
    return float((weights[:, None] * np.exp(-table / 12)).sum())


class Measure:
    """An evaluator of a loss by table and sample; `interrupt` is the number of the call that Ctrl-C cuts short."""

    def __init__(self, loss: Loss = smooth, interrupt: int | None = None) -> None:
        self.loss, self.interrupt = loss, interrupt
        self.tokens_spent, self.jobs = 0, list[Tables]()

    def evaluate(self, job: Tables) -> Floats:
        """See `Evaluator`."""
        if len(self.jobs) == self.interrupt:
            self.interrupt = None
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.tokens_spent += TOKENS * len(job) * SAMPLES
        return np.array([[self.loss(table, sample) for sample in range(SAMPLES)] for table in job])

    def close(self) -> None:
        """Nothing to give back."""

    @property
    def candidates(self) -> list[Ints]:
        """All that were measured, in order."""
        return [table for job in self.jobs for table in job]


class NullReporter:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.stages, self.generations, self.ends = list[str](), list[tuple[str, int, list[float]]](), list[str]()

    def stage(self, name: str, part: SearchStage | None = None) -> None:
        """See `Watcher`."""
        self.stages.append(name)

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:
        """See `Watcher`."""
        self.generations.append((stage, generation, list(values)))

    def ended(self, why: str) -> None:
        """See `Watcher`."""
        self.ends.append(why)


def frame_of(layers: int = LAYERS, heads: int = HEADS, budget: int = BUDGET, most: int = 64) -> BudgetBounds:
    """At least 4 entries in every head."""
    floors = np.full((layers, heads), 4, dtype=np.int64)
    return BudgetBounds(budget, floors, np.full_like(floors, most))


def starts_of(frame: BudgetBounds) -> dict[str, Ints]:
    """Even budgets, and more for the lower half of the layers."""
    uniform = np.full_like(frame.floors, frame.budget)
    lower = uniform + np.where(np.arange(frame.layers) < frame.layers // 2, 4, -4)[:, None]
    return {"uniform": uniform, "lower": lower}


def settings_of(**changes: Any) -> EvolveSettings:
    """Three generations in groups of two layers."""
    return EvolveSettings.model_validate({"group_size": 2, "generations": 3, **changes})


def search_of(
    log: TrialLog,
    measure: Measure,
    allowed: int | None = None,
    starts: Mapping[str, Ints] | None = None,
    frame: BudgetBounds | None = None,
    watcher: NullReporter | None = None,
    name: str = "",
    job_size: int = JOB_SIZE,
    **changes: Any,
) -> Search:
    """A search that is ready to run."""
    settings, frame = settings_of(**changes), frame or frame_of()
    trials = TrialRunner(SerialExecutor(measure), log, settings.objective, allowed, job_size)
    given = starts_of(frame) if starts is None else starts
    return Search(settings, frame, given, trials, watcher or NullReporter(), name)


def run(path: Path, measure: Measure | None = None, allowed: int | None = None, **changes: Any) -> SearchOutcome:
    """Run a search, or go on with it, in the log `path`."""
    with TrialLog(path) as log:
        return search_of(log, measure or Measure(), allowed, **changes).run()


def generations_of(log: TrialLog, stage: str) -> list[GenerationRecord]:
    """The lines of a stage that say what was told."""
    return [line for line in read_again(log) if isinstance(line, GenerationRecord) and line.stage == stage]


def timeless(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger without what time says of them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("at", "seconds")} for line in lines]


def told(outcome: SearchOutcome) -> list[tuple[list[list[int]], float, str]]:
    """What a search found, comparable."""
    return [(one.table.tolist(), one.value, one.where) for one in outcome.pool]


def mean_loss(table: Ints, loss: Loss = smooth) -> float:
    """The value of a table on all samples."""
    return math.fsum(loss(table, sample) for sample in range(SAMPLES)) / SAMPLES
