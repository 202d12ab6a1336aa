"""Ray workers draw the same questions, and a search with them ends the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsearch.errors import IncompatibleError
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.search.evolve import PreparedSearch
from kvsearch.search.jobs import Job
from kvsearch.search.workers import WorkerBank, make_executor
from kvsearch.workers.cluster import RayWorkers
from kvsearch.workers.models import ModelSource, ModelWorkers
from kvsearch.workers.serial import SerialExecutor
from tests.search.evolving import CONTEXTS, QUESTIONS, evolve, prepare
from tests.search.searching import timeless, told
from tests.workers.fakes import AGES


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("bundled")


def worker_bank(prepared: PreparedSearch) -> WorkerBank:
    return WorkerBank.of(prepared, ModelSource.of(prepared.base.loaded, LoadOptions()), prepared.cap)


@pytest.mark.parametrize(
    ("objective", "phases"), [("nll", "prefill"), ("kl", "prefill"), ("metric", "prefill"), ("kl", "decode")]
)
def test_the_bank_of_a_worker_measures_the_same(objective: str, phases: str, loaded: LoadedModel) -> None:
    prepared = prepare(loaded, objective=objective, phases=phases)
    job = Job(0, tuple(prepared.starts.values()), None, objective)
    made = worker_bank(prepared)()
    with make_executor(prepared) as here:
        here.submit(job)
        (outcome,) = here.poll()
    assert isinstance(here, SerialExecutor)
    values = made.evaluate(job)
    assert values.shape == (len(prepared.starts), CONTEXTS * QUESTIONS)
    np.testing.assert_equal(values, outcome.values)
    assert made.tokens_spent > outcome.tokens  # those that were read before, too
    made.close()


def test_threads_are_those_of_the_search(loaded: LoadedModel) -> None:
    before = torch.get_num_threads()
    try:
        replace(ModelSource.of(loaded, LoadOptions()), threads=before + 1).load()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_other_questions_are_refused(loaded: LoadedModel) -> None:
    made = worker_bank(prepare(loaded))
    with pytest.raises(IncompatibleError, match="a worker draws other questions than the search"):
        replace(made, asked=replace(made.asked, samples=CONTEXTS - 1))()


def test_another_model_is_refused(loaded: LoadedModel) -> None:
    made = worker_bank(prepare(loaded))
    other = made.source.fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    with pytest.raises(IncompatibleError, match="this job was made for another model"):
        replace(made, source=replace(made.source, fingerprint=other))()


@pytest.mark.slow
@pytest.mark.usefixtures("kept_workers")
def test_two_workers_find_what_this_process_finds(loaded: LoadedModel, tmp_path: Path) -> None:
    alone = evolve(prepare(loaded, generations=1, together=2), tmp_path / "alone")
    workers = ModelWorkers(loaded, LoadOptions(), RayWorkers(2, cpus=0.5, start_timeout=AGES))
    with closing(workers):
        prepared = prepare(replace(loaded, workers=workers), generations=1, together=2)
        both = evolve(prepared, tmp_path / "both")
    assert told(both.outcome) == told(alone.outcome)
    assert both.choice.plan == alone.choice.plan
    # jobs of a generation end in any order
    both_lines, alone_lines = (
        sorted(str({**line, "line": None}) for line in timeless(tmp_path / name)) for name in ("both", "alone")
    )
    assert both_lines == alone_lines
