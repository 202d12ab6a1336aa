"""The tokenizer of the bundled models, and how they are trained."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvsearch.models.loading import load
from kvsearch.tasks.synthetic.suite import SyntheticTask
from scripts.train_bundled import tokenizer, train


def test_it_survives_being_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = SyntheticTask("multikey", 512).examples(1, 0)[0].context
    assert again(text)["input_ids"] == tokenizer()(text)["input_ids"]
    assert again.padding_side == "left"


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
