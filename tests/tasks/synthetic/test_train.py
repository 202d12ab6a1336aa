"""The training script of the bundled model: its pieces, and a run of a few seconds."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsearch.models.loading import load
from kvsearch.tasks.synthetic import vocabulary as v
from kvsearch.tasks.synthetic.train import (
    CONTEXTS,
    build,
    cooldown,
    document_batch,
    encode,
    grow,
    recall_batch,
    seed_previous_token_heads,
    train,
    training_document,
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


def test_recall_batches_are_answerable() -> None:
    batch = recall_batch(np.random.default_rng(0), 8, 8, 16, 32)
    for row, weight in zip(batch.ids.tolist(), batch.weight.tolist(), strict=True):
        facts = dict(zip(row[1:17:2], row[2:17:2], strict=True))
        for at in np.flatnonzero(weight):
            assert facts[row[at - 1]] == row[at]


def test_documents_of_every_length_can_be_drawn() -> None:
    rng = random.Random(0)
    for length in CONTEXTS:
        for _ in range(20):
            document = training_document(rng, length)
            ids, weight, spans = encode(document, 6)
            assert len(ids) == len(weight)
            assert len(document.words) <= length + 60  # dense evidence may overfill the shortest contexts
            for task, start, end in spans:
                assert task
                assert v.WORDS[ids[end - 1]] == "."
                assert start < end
    batch = document_batch(rng, 64, 6)
    assert batch.ids.shape == batch.weight.shape


def test_cooldown_ends_low() -> None:
    assert cooldown(0.5) == 1
    assert cooldown(0.85) < 0.6
    assert cooldown(1.0) == 0.05


@pytest.mark.slow
def test_a_short_run_leaves_a_loadable_model(tmp_path: Path) -> None:
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
    )
    train(args)
    lines = (tmp_path / "model" / "training.jsonl").read_text().splitlines()
    assert all(json.loads(line)["stage"] == "recall" for line in lines)
    loaded = load(str(tmp_path / "model"))
    assert loaded.tokenizer.decode(loaded.tokenizer("code amber")["input_ids"][1:]) == "code amber"
