"""A fingerprint is the model's content: not its name, dtype, attention implementation or the folder it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsearch.models.architecture import find_text_config
from kvsearch.models.fingerprint import compute_fingerprint, hash_config, hash_weights
from tests.families import build


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_model_has_one_fingerprint_however_it_is_loaded(family: str, tmp_path: Path) -> None:
    model = build(family)
    made = compute_fingerprint(model, "here")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / "moved")
    for dtype, attention in ((torch.float32, "eager"), (torch.bfloat16, None)):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "moved", dtype=dtype, attn_implementation=attention)
        assert made.mismatch(compute_fingerprint(again)) is None


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 1e-5}, {"max_position_embeddings": 1024}, {"eos_token_id": 5}, {"attention_dropout": 0.1}],
)
def test_another_configuration_is_another_model(changes: dict[str, Any]) -> None:
    model, other = build("llama"), build("llama", **changes)
    assert hash_weights(model) == hash_weights(other)
    assert hash_config(find_text_config(model)) != hash_config(find_text_config(other))
    assert "other configuration" in str(compute_fingerprint(model).mismatch(compute_fingerprint(other)))


@pytest.mark.parametrize("family", ["llama", "phi3"])
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
