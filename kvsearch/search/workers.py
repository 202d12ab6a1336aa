"""Who evaluates the candidates of a search: a bank in this process, or one in each of several Ray workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvsearch.core.progress import Progress
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.samples import BankSample
from kvsearch.search.evolve import PreparedSearch
from kvsearch.search.plan_runs import PlanRuns
from kvsearch.search.start_plans import Base
from kvsearch.search.trials import Evaluator, Executor
from kvsearch.workers.base import SerialExecutor
from kvsearch.workers.models import ModelSource, ModelWorkers
from kvsearch.workers.ray import RayExecutor


def make_executor(
    search: PreparedSearch, cap: int, max_memory: int | None = None, progress: Progress | None = None
) -> Executor:
    """Return an executor for a search: here, or in each of the model's workers, if it has any.

    `cap` is the largest budget of any candidate.

    Raises:
        KvsearchError: see `CandidateBank`.
    """
    objective = search.settings.objective
    settings: dict[str, Any] = {
        "batch": search.asked.batch,
        "cap": cap,
        "objective": objective,
        "max_memory": max_memory,
    }
    if isinstance(workers := search.base.loaded.workers, ModelWorkers):
        return RayExecutor(worker_factory(search, workers.source, settings), workers.pool)
    return SerialExecutor(make_evaluator(search.base, search.samples, **settings, progress=progress))


def worker_factory(search: PreparedSearch, source: ModelSource, settings: Mapping[str, Any]) -> partial[Evaluator]:
    """Return what builds the evaluator of a worker: questions are sent, the model is loaded there."""
    nobody: Any = None
    tasks = {id(sample.task): replace(sample.task, prompts=()) for sample in search.samples}  # its questions alone
    samples = [replace(sample, task=tasks[id(sample.task)]) for sample in search.samples]
    return partial(make_evaluator, replace(search.base, loaded=nobody), samples, source=source, **settings)


def make_evaluator(
    base: Base,
    samples: Sequence[BankSample],
    *,
    batch: int,
    cap: int,
    objective: str,
    max_memory: int | None,
    source: ModelSource | None = None,
    progress: Progress | None = None,
) -> Evaluator:
    """Return what measures candidates: a bank where the prompt alone is evicted, else runs of their plans.

    The model is that of `base`, or loaded from its `source`.
    """
    if source is not None:
        base = replace(base, loaded=source.load())
    if base.in_prefill:
        return CandidateBank(
            base.loaded, base.by_layer, samples, cap, objective=objective, max_memory=max_memory, progress=progress
        )
    return PlanRuns(base, samples, objective=objective, batch=batch, max_memory=max_memory)
