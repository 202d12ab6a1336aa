"""Who evaluates the candidates of a search: a bank in this process, or one in each of several Ray workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsearch.arrays import Floats
from kvsearch.errors import IncompatibleError
from kvsearch.evaluation.compare import Settings
from kvsearch.plan import Phase
from kvsearch.policies import Policy
from kvsearch.progress import Progress
from kvsearch.runtime.forced_answers import Asked, ForcedAnswer
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.samples import BankSample, bank_samples, kept_of
from kvsearch.search.evolve import PreparedSearch, questions_hash
from kvsearch.search.jobs import Evaluator, Executor, Job
from kvsearch.search.plan_runs import PlanRuns
from kvsearch.search.start_plans import Base
from kvsearch.tasks.base import Task
from kvsearch.tasks.encode import encode_tasks
from kvsearch.workers.models import ModelSource, ModelWorkers
from kvsearch.workers.ray import RayExecutor
from kvsearch.workers.serial import SerialExecutor


@dataclass(frozen=True)
class WorkerBank:
    """Builds the bank of a search in a worker, which loads the model and draws the same questions again.

    `source` says how to load it, `drawn` (see `questions_hash`) which questions, with the `answers` that are
    teacher-forced after them.
    """

    source: ModelSource
    policies: tuple[Policy, ...]
    phases: tuple[Phase, ...]
    choices: int
    tasks: tuple[Task, ...]
    asked: Settings
    drawn: str
    kept: frozenset[str] | None
    answers: Mapping[Asked, ForcedAnswer] | None
    cap: int
    full: bool
    max_memory: int | None

    @classmethod
    def of(cls, prepared: PreparedSearch, source: ModelSource, cap: int, max_memory: int | None = None) -> WorkerBank:
        """Return what a worker needs for the bank of a search."""
        return cls(
            source=source,
            policies=prepared.base.policies,
            phases=prepared.base.phases,
            choices=prepared.base.choices,
            tasks=tuple(prepared.splits.search),
            asked=prepared.asked,
            drawn=prepared.data_sha256,
            kept=prepared.kept,
            answers=prepared.answers,
            cap=cap,
            full=prepared.settings.objective == "kl",
            max_memory=max_memory,
        )

    def __call__(self) -> Evaluator:
        """Load, draw, read all prompts.

        Raises:
            IncompatibleError: the model or the questions are others on this machine.
            KvsearchError: see `ModelSource.load`, `encode_tasks` and `CandidateBank`.
        """
        loaded, asked = self.source.load(), self.asked
        samples = bank_samples(
            encode_tasks(loaded, self.tasks, asked.samples, asked.seed, asked.max_length, asked.used),
            asked.protocol,
            self.answers,
        )
        samples = kept_of(samples, self.kept)
        if questions_hash(samples) != self.drawn:
            raise IncompatibleError(
                "a worker draws other questions than the search: give all machines the same data and kvsearch"
            )
        base = Base(loaded, self.policies, self.phases, self.choices)
        return evaluator_of(base, samples, asked.batch, self.cap, self.full, self.max_memory)


def evaluator_of(
    base: Base,
    samples: Sequence[BankSample],
    batch: int,
    cap: int,
    full: bool,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Evaluator:
    """Return what measures candidates: a bank where the prompt alone is evicted, else runs of their plans."""
    if base.in_prefill:
        return CandidateBank(
            base.loaded, base.by_layer, samples, cap, full=full, max_memory=max_memory, progress=progress
        )
    return PlanRuns(base, samples, full=full, batch=batch, max_memory=max_memory, progress=progress)


def make_executor(
    prepared: PreparedSearch, cap: int | None = None, max_memory: int | None = None, progress: Progress | None = None
) -> Executor:
    """Build an executor with the bank of a search: here, or in each of the model's workers, if it has any.

    `cap` is the largest budget of the bank, by default that of the search.

    Raises:
        KvsearchError: see `CandidateBank`.
    """
    base, most = prepared.base, prepared.cap if cap is None else cap
    if isinstance(workers := base.loaded.workers, ModelWorkers):
        factory: Any = WorkerBank.of(prepared, workers.source, most, max_memory)
        return RayExecutor[Job, Floats](factory, workers.pool)
    full, batch = prepared.settings.objective == "kl", prepared.asked.batch
    return SerialExecutor(evaluator_of(base, prepared.samples, batch, most, full, max_memory, progress))
