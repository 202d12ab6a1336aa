"""The training script of the bundled models: its pieces, and runs of a few seconds."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from kvsearch.models.loading import load
from kvsearch.tasks.synthetic import vocabulary as v
from scripts.train_bundled import (
    RETRIEVING,
    Hidden,
    build,
    document_batch,
    grow,
    hiding,
    retrieving_layer,
    seed_previous_token_heads,
    spread,
    train,
)  # fmt: skip


@torch.no_grad()
def test_seeded_heads_look_back() -> None:
    torch.manual_seed(0)
    model = build(2, 4, 4, 64)
    seed_previous_token_heads(model, {0: 1, 1: 2})
    model.set_attn_implementation("eager")
    ids = torch.randint(4, len(v.WORDS), (1, 40))
    attention = model(input_ids=ids, output_attentions=True).attentions[0][0]
    rows = torch.arange(5, 40)
    for head, offset in ((0, 1), (1, 2)):
        assert (attention[head, 5:].argmax(-1) == rows - offset).float().mean() > 0.9


@torch.no_grad()
def test_growing_keeps_what_was_learnt() -> None:
    torch.manual_seed(0)
    small = build(2, 4, 4, 64)
    large = grow(small, 6, 64)
    ids = torch.randint(4, len(v.WORDS), (2, 30))
    before, after = small(input_ids=ids).logits, large(input_ids=ids).logits
    assert large.config.num_attention_heads == 2 * large.config.num_key_value_heads
    assert torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1] > 0.99  # duplicated heads get noise


@torch.no_grad()
def test_what_is_hidden_changes_nothing_and_all_else_does() -> None:
    """Other words where a context is hidden leave the rows after it as they are; elsewhere they do not."""
    torch.manual_seed(0)
    model, batch = build(2, 4, 4, 64), document_batch(random.Random(0), 64, 2)
    model.eval()
    start, hidden_from = int(batch.context[0]), 3
    everywhere = torch.ones(len(batch.ids), dtype=torch.bool)
    first = torch.full_like(batch.context, hidden_from)

    def change(place: int, layers: range, last: int = 0) -> float:
        other = batch._replace(ids=batch.ids.clone())
        other.ids[0, place] = (other.ids[0, place] + 1) % len(v.WORDS)
        rows = []
        for one in (batch, other):
            with hiding(model, one, Hidden(dict.fromkeys(layers, everywhere), first, torch.full_like(first, last))):
                rows.append(model(input_ids=one.ids, use_cache=False).logits[0, start:])
        return float((rows[0] - rows[1]).abs().max())

    assert change(hidden_from, range(2)) == change(start - 1, range(2)) == 0
    assert min(change(hidden_from - 1, range(2)), change(hidden_from, range(1)), change(start - 1, range(2), 1)) > 0
    after = model(input_ids=batch.ids, use_cache=False).logits
    with hiding(model, batch, None):
        assert torch.equal(model(input_ids=batch.ids, use_cache=False).logits, after)  # no hook is left behind


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
