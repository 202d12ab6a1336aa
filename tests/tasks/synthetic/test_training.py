"""The tokenizer of the bundled models, and how they are trained."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from kvsearch.models.loading import load
from kvsearch.tasks.synthetic.suite import SyntheticTask
from scripts.train_bundled import RETRIEVING, retrieving_layer, spread, tokenizer, train


def test_it_survives_being_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = SyntheticTask("multikey", 512).examples(1, 0)[0].context
    assert again(text)["input_ids"] == tokenizer()(text)["input_ids"]
    assert again.padding_side == "left"


@pytest.mark.nightly
def test_the_layer_that_retrieves_is_found_and_spread() -> None:
    model = load("bundled").model
    layer = retrieving_layer(model, random.Random(0), 128)
    attention = model.model.layers[layer].self_attn
    before, kept = attention.o_proj.weight.clone(), model.model.layers[layer + 1].mlp.up_proj.weight.clone()
    assert spread(model, layer) == range(3, 6)
    for index in range(3, 6):
        assert torch.allclose(model.model.layers[index].self_attn.o_proj.weight * RETRIEVING, before)
        assert torch.equal(model.model.layers[index].self_attn.k_proj.weight, attention.k_proj.weight)
    assert torch.equal(model.model.layers[layer + 1].mlp.up_proj.weight, kept)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("redundant", [False, True])
def test_a_short_run_leaves_a_loadable_model(redundant: bool, tmp_path: Path) -> None:
    args = argparse.Namespace(
        out=tmp_path / "model",
        minutes=0.05,
        context=1024,
        layers=3,
        kv_heads=4,
        hidden=32,
        rate=1e-3,
        seed=0,
        threads=1,
        redundant=redundant,
    )
    train(args)
    lines = (tmp_path / "model" / "training.jsonl").read_text().splitlines()
    assert all(json.loads(line)["stage"] == (64 if redundant else "recall") for line in lines)
    loaded = load(str(tmp_path / "model"))
    assert loaded.tokenizer.decode(loaded.tokenizer("code amber")["input_ids"][1:]) == "code amber"
