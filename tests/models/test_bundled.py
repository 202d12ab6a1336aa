"""The bundled models: both answer from the full cache, one retrieves in one layer, one in three."""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch.nn.functional import kl_div

from kvsearch.calibration.data import find_default_data, load_calibration_data
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.prompts import encode_prompts
from kvsearch.core.resources import find_resource
from kvsearch.evaluation.runner import run_encoded
from kvsearch.models.loading import BUNDLED, LoadedModel, load
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.program import make_full_program
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.encode import encode_tasks
from scripts.train_bundled import tokenizer

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module", params=BUNDLED)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load(request.param)


@pytest.mark.parametrize("name", BUNDLED)
def test_it_is_shipped_with_its_card_and_its_training_and_small(name: str) -> None:
    files = {path.name: path.stat().st_size for path in find_resource(f"data/{name}").iterdir()}
    assert set(files) == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "training.jsonl",
    }  # fmt: skip
    assert sum(files.values()) < 1_500_000
    wheel = tomllib.loads(PYPROJECT.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["data"] == "kvsearch/_resources/data"


def test_both_have_one_vocabulary() -> None:
    one, other = (find_resource(f"data/{name}") / "tokenizer.json" for name in BUNDLED)
    assert one.read_bytes() == other.read_bytes()


def test_the_full_cache_answers(loaded: LoadedModel) -> None:
    encoded = encode_tasks(loaded, find_tasks("synthetic", {"length": (512,)}), samples=1, seed=5)
    assert loaded.tokenizer("the calm fox .")["input_ids"] == tokenizer()("the calm fox .")["input_ids"]
    samples = run_encoded(loaded, {"full": make_full_program(loaded.model)}, encoded, QUESTION_AGNOSTIC)
    assert fmean(sample.score for sample in samples) >= 0.95


@pytest.mark.nightly
@torch.no_grad()
def test_how_many_layers_retrieve(loaded: LoadedModel) -> None:
    """Nats that answers lose when one layer sees nothing but the ends of the context, and when none sees more."""
    data = load_calibration_data(find_default_data(loaded.name)).limit_questions(4)
    single, joint = torch.zeros(loaded.model.config.num_hidden_layers), 0.0
    with run_attention(loaded.model):
        for prompt in encode_prompts(loaded, data):
            passed = ImportancePass(loaded.model, [], prompt.ids)
            ends = torch.zeros(loaded.model.config.num_key_value_heads, prompt.length, dtype=torch.bool)
            ends[:, :4] = ends[:, -8:] = True
            keep = dict.fromkeys(range(len(single)), ends)
            for after in prompt.continuations:
                full = passed.logits_seeing(after.tokens, {})[after.predicting].log_softmax(-1)
                changed = [
                    passed.logits_seeing(after.tokens, seen)[after.predicting].log_softmax(-1)
                    for seen in (*({layer: ends} for layer in keep), keep)
                ]
                *alone, together = (float(kl_div(part, full, reduction="sum", log_target=True)) for part in changed)
                single += torch.tensor(alone)
                joint += together
    assert joint > 4 * 10
    if loaded.name == "bundled":
        assert single.max() > 0.8 * joint
    else:
        assert single.sum() < 0.1 * joint
