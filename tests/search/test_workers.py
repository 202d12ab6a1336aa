"""Ray workers draw the same questions, and a search with them ends the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsearch.errors import IncompatibleError
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.search.executors import Job, SerialExecutor
from kvsearch.search.executors.cluster import RayWorkers
from kvsearch.search.workers import WorkerBank, make_executor
from tests.search.evolving import CONTEXTS, QUESTIONS, evolve, prepare
from tests.search.searching import timeless, told


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("bundled")


@pytest.mark.parametrize(
    ("objective", "phases"), [("nll", "prefill"), ("kl", "prefill"), ("metric", "prefill"), ("kl", "decode")]
)
def test_the_bank_of_a_worker_measures_the_same(objective: str, phases: str, loaded: LoadedModel) -> None:
    prepared = prepare(loaded, objective=objective, phases=phases)
    job = Job(0, tuple(prepared.starts.values()), None, objective)
    made = WorkerBank.of(prepared, LoadOptions(), prepared.cap)()
    with make_executor(prepared, LoadOptions()) as here:
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
        made = replace(WorkerBank.of(prepare(loaded), LoadOptions(), 12), threads=before + 1)
        made().close()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_other_questions_are_refused(loaded: LoadedModel) -> None:
    made = WorkerBank.of(prepare(loaded), LoadOptions(), 12)
    with pytest.raises(IncompatibleError, match="a worker draws other questions than the search"):
        replace(made, asked=replace(made.asked, samples=CONTEXTS - 1))()


def test_another_model_is_refused(loaded: LoadedModel) -> None:
    made = WorkerBank.of(prepare(loaded), LoadOptions(), 12)
    other = made.fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    with pytest.raises(IncompatibleError, match="the search was made for another model"):
        replace(made, fingerprint=other)()


@pytest.mark.slow
def test_two_workers_find_what_this_process_finds(loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    prepared = prepare(loaded, generations=1, together=2)
    alone = evolve(prepared, tmp_path / "alone")
    wanted = RayWorkers(2, cpus=0.5, start_timeout=36_000)
    both = evolve(prepared, tmp_path / "both", wanted)
    assert told(both.outcome) == told(alone.outcome)
    assert both.choice.plan == alone.choice.plan
    # jobs of a generation end in any order
    both_lines, alone_lines = (
        sorted(str({**line, "line": None}) for line in timeless(tmp_path / name)) for name in ("both", "alone")
    )
    assert both_lines == alone_lines
