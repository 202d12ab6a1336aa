"""The whole way on a small model that people use: what random models and those of one purpose cannot show."""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsearch
from kvsearch.core.resources import find_resource
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan, Profile
from kvsearch.tasks.base import Example
from kvsearch.tasks.encode import make_token_counter
from kvsearch.tasks.metrics.likelihood import read_losses
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.needles import STORY_FILE, read_haystack
from tests.calibration.test_lukv import assert_rows_average_to_their_ratio
from tests.cli.conftest import done

pytestmark = pytest.mark.nightly

LAYERS, KV_HEADS = 30, 3
HEADS = LAYERS * KV_HEADS
LENGTH, ASKED = 300, 4  # tokens of a prompt with its reply, contexts
NEEDLES = {"tasks": "ruler:niah_single_2", "length": LENGTH}  # a number of seven digits in a story
POLICY = "expected_attention"
GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def calibrated(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    """LU-KV's budgets, from two contexts, and the folder they are in."""
    folder = tmp_path_factory.mktemp("lukv")
    return folder, kvsearch.calibrate(
        smollm2, **NEEDLES, samples=2, policy=POLICY, answer_tokens=16, check=False, output=folder
    )


@pytest.fixture(scope="module")
def fifth(calibrated: tuple[Path, Profile], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """The plan of these budgets that keeps a fifth, and its file."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    return path, kvsearch.export(calibrated[0], ratio=0.8, output=path)


def needles(loaded: LoadedModel, samples: int) -> list[Example]:
    return RulerTask("niah_single_2", length=LENGTH).examples(samples, 0, make_token_counter(loaded.tokenizer))


def chat(loaded: LoadedModel, text: str, prefix: str = "") -> Tensor:
    """The tokens [1, T] of a message to answer, as transformers makes them, and how the answer begins."""
    messages = [{"role": "user", "content": text}]
    whole = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + prefix
    ids: Tensor = loaded.tokenizer(whole, add_special_tokens=False, return_tensors="pt").input_ids
    return ids


def replies_of(folder: Path) -> dict[str, list[dict[str, str]]]:
    """What an evaluation has kept of every reply, by method."""
    replies = defaultdict(list)
    with (folder / "samples.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            replies[row["method"]].append(row)
    return replies


@pytest.mark.parametrize(("policy", "phases"), [("snapkv:window=2", "prefill"), ("h2o", "both")])
def test_a_plan_that_keeps_everything_is_the_stock_model(
    smollm2: LoadedModel, tmp_path: Path, policy: str, phases: str
) -> None:
    ids = chat(smollm2, f"{read_haystack(None)[:800]}\n\nWhat is the ferry called?")
    plan = kvsearch.plans.uniform(smollm2, policy=policy, budget=512, phases=phases, output=tmp_path / "plan.json")
    with kvsearch.attach(smollm2.model, plan) as planned:
        own = planned.generate(ids, max_new_tokens=8, **GREEDY)
    stock = smollm2.model.generate(ids, max_new_tokens=8, **GREEDY)
    assert "Constance" in smollm2.tokenizer.decode(stock.sequences[0, ids.shape[1] :])
    assert own.sequences.tolist() == stock.sequences.tolist()
    for ours, theirs in zip(own.logits, stock.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_what_a_calibration_measures(smollm2: LoadedModel, calibrated: tuple[Path, Profile]) -> None:
    _, profile = calibrated
    assert profile.metadata.model == smollm2.fingerprint
    table = profile.arrays["evicted_ratio"]
    assert table.shape == (99, LAYERS, KV_HEADS)
    assert_rows_average_to_their_ratio(table, profile.metadata.length, profile.metadata.floor)
    # every question has an error without its context, and all count as one
    assert profile.arrays["mass"][..., -1].sum() == pytest.approx(1.0, rel=1e-3)


def test_a_plan_that_is_made_of_it(calibrated: tuple[Path, Profile], fifth: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, profile = calibrated
    path, plan = fifth
    assert kvsearch.load_plan(path) == plan
    assert plan.model == profile.metadata.model
    assert sum(chain.from_iterable(plan.budgets("prefill"))) == round(0.2 * profile.metadata.length * HEADS)
    exported = kvsearch.export_to(folder, to="kvpress-lukv", output=tmp_path / "curves.npy")
    assert not exported.losses
    np.testing.assert_array_equal(np.load(tmp_path / "curves.npy"), profile.arrays["evicted_ratio"])


def test_a_reply_under_the_plan(smollm2: LoadedModel, fifth: tuple[Path, Plan], tmp_path: Path) -> None:
    [example] = needles(smollm2, 1)
    asked = {"prompt": [example.queries[0].question], "max_new_tokens": 40}
    [full] = kvsearch.generate(smollm2, context=example.context, **asked)
    assert example.queries[0].answers[0] in full.text
    [reply] = kvsearch.generate(smollm2, context=example.context, plan=fifth[0], **asked)
    assert reply.full_entries == full.entries == HEADS * full.context_tokens
    assert reply.entries == round(0.2 * HEADS * full.context_tokens)
    kvsearch.compress(smollm2, context=example.context, plan=fifth[0], output=tmp_path / "context.kv")
    [again] = kvsearch.generate(smollm2, cache=tmp_path / "context.kv", **asked)
    assert (again.text, again.entries) == (reply.text, reply.entries)


def test_replies_and_scores_of_an_evaluation(
    smollm2: LoadedModel, calibrated: tuple[Path, Profile], tmp_path: Path
) -> None:
    """The full cache replies as transformers does until it is right; budgets for each head keep what even ones lose."""
    methods = ("h2o", POLICY, f"lukv={calibrated[0]}")
    result = kvsearch.evaluate(
        smollm2, **NEEDLES, samples=ASKED, methods=methods, ratios=("0.5", "0.8"), output=tmp_path / "run"
    )
    replies = replies_of(tmp_path / "run")
    examples = needles(smollm2, ASKED)
    for example, row in zip(examples, replies["full"], strict=True):
        [query] = example.queries
        ids = chat(smollm2, f"{example.context}\n\n{query.question}", query.prefix)
        assert hashlib.sha256(ids.numpy().tobytes()).hexdigest() == row["prompt_sha256"]
        stock = smollm2.model.generate(ids, max_new_tokens=query.max_new_tokens, do_sample=False)
        whole = smollm2.tokenizer.decode(stock[0, ids.shape[1] :], skip_special_tokens=True)
        end = whole.find(query.answers[0]) + len(query.answers[0]) if query.answers[0] in whole else len(whole)
        assert row["reply"] == whole[:end]
    task, shares = RulerTask("niah_single_2"), {"full": 1.0, "0.5": 0.5, "0.8": 0.2}
    for method, rows in replies.items():
        share = shares[method.partition("@")[2] or method]
        for example, row in zip(examples, rows, strict=True):
            assert float(row["score"]) == task.score(row["reply"], example.queries[0])
            assert int(row["entries"]) == round(share * HEADS * int(row["context_tokens"]))
    scores = {method: fmean(float(row["score"]) for row in rows) for method, rows in replies.items()}
    found = {method.label: method for block in result.blocks for method in block.methods}
    assert {label: method.scores["averages"]["macro"].mean for label, method in found.items()} == {
        label: score for label, score in scores.items() if label != "full"
    }
    assert result.full.scores["averages"]["macro"].mean == scores["full"] == 1
    assert scores["lukv@0.8"] == 1
    assert scores[f"{POLICY}@0.8"] == scores["h2o@0.8"] == 0


def test_what_is_lost_on_text(smollm2: LoadedModel, tmp_path: Path) -> None:
    """In nats per token more than the full cache, at a tenth kept: attention sinks are needed, and chance is worst."""
    methods = ("h2o", "streaming", "streaming:sinks=0", "random")
    story = {"tasks": f"ppl:{find_resource(STORY_FILE)}", "length": 512}
    kvsearch.evaluate(smollm2, **story, samples=4, methods=methods, ratios=("0.9",), output=tmp_path / "run")
    excess = {}
    for method, rows in replies_of(tmp_path / "run").items():
        losses = [read_losses(row["reply"]) for row in rows]
        excess[method.removesuffix("@0.9")] = [loss - full for loss, full in filter(None, losses)]
    full, h2o, streaming, sinkless, random = (np.array(excess[method]) for method in ("full", *methods))
    assert full.tolist() == [0] * 4
    assert h2o.mean() > 0
    assert (random > h2o).all()
    assert random.mean() > 1.5 * max(h2o.mean(), streaming.mean())
    assert (sinkless > streaming + 0.4).all()
    assert sinkless.mean() > 4 * streaming.mean()


def test_the_plan_goes_into_an_ordinary_folder_with_its_model(
    smollm2: LoadedModel, fifth: tuple[Path, Plan], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    done("export", fifth[0], "--to", "model", "--dtype", "float32", "-o", folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == smollm2.tokenizer.chat_template
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, smollm2.model(ids).logits)
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    dequantised = "The weights are those of SmolLM2-135M-Instruct.Q4_1.gguf, dequantised to float32."
    assert f"{dequantised} They are under Apache-2.0." in card.text
