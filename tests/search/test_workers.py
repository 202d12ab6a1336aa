"""Ray workers draw the same questions, and a search with them ends the same."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kvsearch.core.errors import IncompatibleError
from kvsearch.models.loading import LoadedModel, LoadOptions
from kvsearch.search.evaluators import make_executor, worker_factory
from kvsearch.search.evolve import PreparedSearch
from kvsearch.search.trials import Evaluator
from kvsearch.workers.models import ModelSource
from kvsearch.workers.ray import import_ray
from tests.search.evolving import CONTEXTS, QUESTIONS, prepare


def worker_bank(prepared: PreparedSearch, source: ModelSource) -> Evaluator:
    """Built as in a worker, of what is sent to it."""
    settings = {"batch": 8, "cap": prepared.cap, "objective": prepared.settings.objective, "max_memory": None}
    factory = pickle.loads(import_ray().cloudpickle.dumps(worker_factory(prepared, source, settings)))
    return factory()


@pytest.mark.parametrize(("objective", "phases"), [("nll", "prefill"), ("metric", "prefill"), ("nll", "decode")])
def test_the_bank_of_a_worker_measures_the_same(objective: str, phases: str, loaded: LoadedModel) -> None:
    prepared = prepare(loaded, objective=objective, phases=phases)
    job = tuple(prepared.starts.values())
    evaluator = worker_bank(prepared, ModelSource(loaded, LoadOptions()))
    with make_executor(prepared, prepared.cap) as here:
        [(_, outcome)] = here.run([job])
    values = evaluator.evaluate(job)
    assert values.shape == (len(prepared.starts), CONTEXTS * QUESTIONS)
    np.testing.assert_equal(values, outcome.values)
    assert evaluator.tokens_spent >= outcome.tokens  # those that were read before, too
    evaluator.close()


def test_another_model_is_refused(loaded: LoadedModel) -> None:
    source = ModelSource(loaded, LoadOptions())
    source.fingerprint = source.fingerprint.model_copy(update={"weights_sha256": "0" * 64})
    with pytest.raises(IncompatibleError, match="this job was made for another model"):
        worker_bank(prepare(loaded), source)
