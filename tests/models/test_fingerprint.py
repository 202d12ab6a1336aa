"""A fingerprint is the model's content: not its name, dtype, attention implementation or the folder it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsearch.models.architecture import find_text_config
from kvsearch.models.fingerprint import WEIGHT_SAMPLES, compute_fingerprint, hash_config, hash_weights
from tests.families import FAMILIES, build

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_one_model_has_one_fingerprint_however_it_is_loaded(family: str, tmp_path: Path) -> None:
    model = build(family)
    made = compute_fingerprint(model, "here")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "moved")
    for dtype, attention in ((torch.float32, "eager"), (torch.bfloat16, None)):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "moved", dtype=dtype, attn_implementation=attention)
        assert made.mismatch(compute_fingerprint(again)) is None


def test_names_and_use_are_not_content() -> None:
    model = build("llama")
    made = compute_fingerprint(model, "one")
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    model.config._name_or_path = "elsewhere"
    model.train()
    assert made.mismatch(compute_fingerprint(model, "two", "rev")) is None


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 1e-5}, {"max_position_embeddings": 1024}, {"eos_token_id": 5}, {"attention_dropout": 0.1}],
)
def test_another_configuration_is_another_model(changes: dict[str, Any]) -> None:
    model, other = build("llama"), build("llama", **changes)
    assert hash_weights(model) == hash_weights(other)
    assert hash_config(find_text_config(model)) != hash_config(find_text_config(other))
    assert "other configuration" in str(compute_fingerprint(model).mismatch(compute_fingerprint(other)))


@families
def test_any_tensor_that_changes_changes_it(family: str) -> None:
    model = build(family)
    before = hash_weights(model)
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.05)
        assert hash_weights(model) != before, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert hash_weights(model) == before


def test_which_values_are_sampled() -> None:
    """The first of each of 64 equal parts of a tensor; small tensors as a whole."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = torch.nn.Parameter(torch.zeros(10, 64))
            self.small = torch.nn.Parameter(torch.zeros(5))

    before = hash_weights(Two())
    for index in range(640):
        changed = Two()
        with torch.no_grad():
            changed.large.view(-1)[index] = 1.0
        assert (hash_weights(changed) != before) == (index % (640 // WEIGHT_SAMPLES) == 0)
    for index in range(5):
        changed = Two()
        with torch.no_grad():
            changed.small[index] = 1.0
        assert hash_weights(changed) != before


def test_shapes_and_names_count() -> None:
    def holding(**tensors: torch.Tensor) -> str:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_parameter(name, torch.nn.Parameter(tensor))
        return hash_weights(module)

    made = {
        holding(a=torch.ones(2, 3)), holding(a=torch.ones(3, 2)), holding(b=torch.ones(2, 3)),
        holding(a=torch.ones(6)), holding(a=torch.ones(2, 3), b=torch.ones(1)),
    }  # fmt: skip
    assert len(made) == 5


def test_views_and_order_of_parameters_do_not_count() -> None:
    model = build("llama")
    before = hash_weights(model)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.data = weight.data.t().contiguous().t()  # the same values in another memory layout
    assert not model.lm_head.weight.is_contiguous()
    assert hash_weights(model) == before
