"""The importance pass against plain forwards, full attention matrices and masked runs, for every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvsearch.calibration.importance import ImportancePass
from kvsearch.models.architecture import describe, find_attention_modules, read_output_weight
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from tests.families import FAMILIES, build, prompts, take_families
from tests.runtime.helpers import assert_close, feed, reference, running

CONTEXT, ROWS = 40, 7
POLICY: Policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
families = take_families(*FAMILIES)
some_families = take_families("llama", "qwen3", "gemma2", "gemma3")


def tokens(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """A context and a question with its answer."""
    ids, _ = prompts(1, CONTEXT + rows, seed=seed)
    return ids[:, :CONTEXT], ids[:, CONTEXT:]


def pass_over(model: Any, context: Tensor, *policies: Policy) -> ImportancePass:
    return ImportancePass(model, policies, context)


@torch.no_grad()
def eager_pass(model: Any, ids: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor], Any]:
    """Full attention matrices, values of the full layers, and the whole output, of one plain forward pass."""
    full = describe(model).full_layers
    with running(model, "eager"):
        cache = DynamicCache(config=model.config)
        output = model(ids, past_key_values=cache, output_attentions=True, output_hidden_states=True)
    return (
        {layer: output.attentions[layer].float() for layer in full},
        {layer: cache.layers[layer].values for layer in full},
        output,
    )


@pytest.mark.parametrize("group", ["sum", "max"])
@families
@torch.no_grad()
def test_importance_is_that_of_the_whole_attention_matrix(family: str, group: str) -> None:
    model = build(family)
    context, question = tokens()
    shape = describe(model)
    attentions, values, _ = eager_pass(model, torch.cat([context, question], 1))
    with running(model, NAME):
        importance = ImportancePass(model, [POLICY], context, group).ask(question)[0]
    assert importance.shape == (len(shape.full_layers), shape.kv_heads, CONTEXT)
    for row, layer in enumerate(shape.full_layers):
        weight = read_output_weight(find_attention_modules(model)[layer], shape.query_heads)
        spread = values[layer][0, :, :CONTEXT].repeat_interleave(shape.group, 0)
        norms = (spread @ weight).norm(dim=-1)  # [Hq, T]
        taken = attentions[layer][0, :, CONTEXT:, :CONTEXT] * norms[:, None]
        taken = taken.reshape(shape.kv_heads, shape.group, ROWS, CONTEXT)
        expected = (taken.sum(1) if group == "sum" else taken.amax(1)).amax(1)
        assert_close(importance[row], expected)


def test_importance_where_kernels_attend_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold no attention, so that it is computed once more."""
    model = build("llama")
    context, question = tokens()
    with running(model, NAME):
        here = pass_over(model, context).ask(question)[0]
        monkeypatch.setattr("kvsearch.runtime.observe.serves", lambda *_: True)
        kernels = pass_over(model, context).ask(question)[0]
    torch.testing.assert_close(kernels, here, rtol=1e-4, atol=1e-5)  # by other products, which round otherwise


@some_families
def test_ranks_are_those_of_the_runtime(family: str) -> None:
    """An entry is kept by a uniform program if and only if its rank is below the budget."""
    model = build(family)
    context, _ = tokens()
    budget = 15
    others = [create_policy("keydiff", {"sinks": 4, "window": 1}), create_policy("expected_attention")]
    with running(model, NAME):
        passed = pass_over(model, context, POLICY, *others)
        for index, policy in enumerate([POLICY, *others]):
            ranks = passed.ranks(index)
            assert sorted(ranks[0, 0].tolist()) == list(range(CONTEXT))
            cache = PlanCache(model, Program.uniform(model, policy, lambda length: budget))
            with torch.no_grad():
                model(context, past_key_values=cache)
            for row, layer in enumerate(describe(model).full_layers):
                for head in range(ranks.shape[1]):
                    kept = torch.nonzero(ranks[row, head] < budget).flatten().tolist()
                    assert kept == cache.kept_positions(layer, 0, head)


@families
def test_asking_leaves_the_context_as_it_was(family: str) -> None:
    """The sliding windows (16 tokens) are full long before the question comes: they must be brought back."""
    model = build(family)
    context, question = tokens()
    other = tokens(seed=1, rows=11)[1]
    with running(model, NAME):
        passed = pass_over(model, context, POLICY)
        first = passed.ask(question)
        passed.ask(other)
        passed.logits_seeing(other, {0: torch.zeros(2, CONTEXT, dtype=torch.bool)})
        again = passed.ask(question)
    for before, after in zip(first, again, strict=True):
        assert torch.equal(before, after)


@families
def test_texts_look_at_the_same_side_by_side(family: str) -> None:
    """As each of them does alone, whatever their lengths."""
    model = build(family)
    context, question = tokens()
    texts = [question[0], question[0, 2:], tokens(seed=7, rows=11)[1][0]]
    with running(model, NAME):
        passed = pass_over(model, context)
        together = passed.measure_importance_of(texts)
        for text, importance in zip(texts, together, strict=True):
            assert_close(importance, passed.ask(text[None])[0])


@families
def test_all_layers_can_be_hidden_from_at_once(family: str) -> None:
    model = build(family)
    context, question = tokens()
    layers = describe(model).full_layers
    keep = torch.rand(len(layers), 2, CONTEXT, generator=torch.Generator().manual_seed(5)) < 0.4
    with running(model, NAME):
        passed = pass_over(model, context, POLICY)
        got = passed.logits_seeing(question, dict(enumerate(keep)))
        _, again = passed.ask(question)
    pieces = [(context, torch.ones_like(context)), (question, torch.ones_like(question))]
    with reference(model, {layer: keep[row][None] for row, layer in enumerate(layers)}) as cache:
        assert_close(got, feed(model, cache, pieces)[1][0])
    with reference(model, {}) as cache:
        assert_close(again, feed(model, cache, pieces)[1][0])


@families
def test_masks_that_are_rows_of_one_batch_are_those_of_one_pass_each(family: str) -> None:
    model = build(family)
    context, question = tokens()
    shape = (3, len(describe(model).full_layers), 2, CONTEXT)
    keeps = torch.rand(shape, generator=torch.Generator().manual_seed(6)) < torch.tensor([1.0, 0.5, 0.1]).view(
        3, 1, 1, 1
    )
    with running(model, NAME):
        passed = pass_over(model, context, POLICY)
        rows = list(passed.logits_under(question, keeps, 2))
        alone = [passed.logits_seeing(question, dict(enumerate(keep))) for keep in keeps]
        full = passed.ask(question)[1]
    for row, one in zip(rows, alone, strict=True):
        assert_close(row, one[-2:])
    assert_close(rows[0], full[-2:])
