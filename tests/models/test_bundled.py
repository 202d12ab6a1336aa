"""The bundled models: both answer from the full cache."""

from __future__ import annotations

from statistics import fmean

import pytest

from kvsearch.evaluation.runner import run_encoded
from kvsearch.models.loading import BUNDLED, LoadedModel, load
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.runtime.program import make_full_program
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.encode import encode_tasks
from scripts.train_bundled import tokenizer


@pytest.fixture(scope="module", params=BUNDLED)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load(request.param)


def test_the_full_cache_answers(loaded: LoadedModel) -> None:
    encoded = encode_tasks(loaded, find_tasks("synthetic", {"length": (512,)}), samples=1, seed=5)
    assert loaded.tokenizer("the calm fox .")["input_ids"] == tokenizer()("the calm fox .")["input_ids"]
    samples = run_encoded(loaded, {"full": make_full_program(loaded.model)}, encoded, QUESTION_AGNOSTIC)
    assert fmean(sample.score for sample in samples) >= 0.95
