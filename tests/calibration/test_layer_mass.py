"""What layers are worth together: against brute force over all subsets of layers, and against its own end points."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.calibration.importance import ImportancePass, integrated_gradients
from kvsearch.calibration.prompts import Continuation
from kvsearch.models.architecture import describe
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime.attention import NAME, gated_attention
from kvsearch.runtime.logits import Logits
from kvsearch.signals.predictions import token_losses
from tests.families import EACH_FAMILY, build, prompts
from tests.runtime.helpers import assert_close, feed, reference, running

CONTEXT, ANSWER = 40, 3
POLICY: Policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})


@contextmanager
def asked(model: Any, seed: int = 0) -> Iterator[tuple[ImportancePass, Continuation, Tensor]]:
    """A context with a question of 4 tokens and an answer of 3, and which entries of it stay."""
    ids, _ = prompts(1, CONTEXT + 7, seed=seed)
    with running(model, NAME):
        passed = ImportancePass(model, [POLICY], ids[:, :CONTEXT])
        after = Continuation(ids[:, CONTEXT:], 7 - ANSWER)
        yield passed, after, passed.ranks() < POLICY.protected(CONTEXT)


def smooth(family: str = "llama", factor: float = 0.5, **changes: Any) -> Any:
    """A random model whose loss is smooth in the gates."""
    model = build(family, **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.mul_(factor)
    return model


def brute_force(model: Any, layers: tuple[int, ...], after: Continuation, context: Tensor, keep: Tensor) -> np.ndarray:
    """Shapley values by definition: means over all subsets S of the others, weighted by |S|! (L - |S| - 1)! / L!."""
    tokens, answer = after.tokens, after.tokens[0, -ANSWER:]

    def loss(removed: tuple[int, ...]) -> float:
        hidden = {layers[row]: keep[row][None] for row in removed}
        with reference(model, hidden) as cache:
            pieces = [(context, torch.ones_like(context)), (tokens, torch.ones_like(tokens))]
            rows = feed(model, cache, pieces)[1][0, after.predicting]
        return float(token_losses(rows, answer).sum())

    rows, found = range(len(layers)), []
    for row in rows:
        others, value = [one for one in rows if one != row], 0.0
        for size in range(len(rows)):
            share = factorial(size) * factorial(len(rows) - size - 1) / factorial(len(rows))
            value += share * sum(loss((*some, row)) - loss(some) for some in combinations(others, size))
        found.append(value)
    return np.array(found)


def joint_loss(passed: ImportancePass, after: Continuation, protected: Tensor) -> float:
    """What the answer loses when all layers see protected entries alone."""

    def loss(keep: dict[int, Tensor]) -> float:
        rows = passed.logits_seeing(after.tokens, keep)[after.predicting]
        return float(token_losses(rows, after.tokens[0, -ANSWER:]).sum())

    return loss(dict(enumerate(protected))) - loss({})


def test_integrated_gradients_are_near_shapley_values_where_layers_hardly_act_on_each_other() -> None:
    model = smooth(factor=0.2, num_hidden_layers=3)
    context = prompts(1, CONTEXT + 7)[0][:, :CONTEXT]
    with asked(model) as (passed, after, protected):
        joint = joint_loss(passed, after, protected)
        gradients = integrated_gradients(passed, after, protected, 33).sum((1, 2)).numpy()
    expected = brute_force(model, (0, 1, 2), after, context, protected)
    assert np.abs(expected).max() > 0.01
    assert expected.sum() == pytest.approx(joint, abs=1e-4)
    assert np.abs(gradients - expected).max() < 0.1 * np.abs(expected).max()


# the others of SPECIAL choose experts, so their loss jumps along the way, or do not take several tokens at once
@pytest.mark.parametrize(
    "family", [*EACH_FAMILY, *(pytest.param(name, marks=pytest.mark.nightly) for name in ("lfm2", "qwen3_5"))]
)
def test_integrated_gradients_add_up_to_the_joint_loss(family: str) -> None:
    model = smooth(family)
    with asked(model) as (passed, after, protected):
        found = integrated_gradients(passed, after, protected, 24)
        joint = joint_loss(passed, after, protected)
        again = integrated_gradients(passed, after, protected, 24)
    shape = describe(model)
    assert found.shape == (len(shape.full_layers), shape.kv_heads, CONTEXT)
    assert found[protected].abs().max() == 0.0
    assert abs(joint) > 1e-3
    assert float(found.sum()) == pytest.approx(joint, rel=0.02, abs=2e-4)
    assert torch.equal(found, again)


def test_gates_lead_in_a_straight_line_from_the_full_cache_to_one_without() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, n, t, 8, generator=generator) for n, t in ((4, 3), (2, 13), (2, 13)))
    keep = torch.rand(2, 10, generator=generator) < 0.4
    how = Logits(8**-0.5)

    def output(gate: Tensor) -> Tensor:
        return gated_attention((query, keys, values), keep, gate, how)

    def attended(shown: Tensor) -> Tensor:
        mask = torch.cat([shown[:, None].expand(-1, 3, -1), torch.ones(3, 3).tril().bool().expand(2, -1, -1)], -1)
        spread = (one.repeat_interleave(2, 1) for one in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(
            query, *spread, attn_mask=mask.repeat_interleave(2, 0)[None]
        ).transpose(1, 2)

    some = torch.rand(2, 10, generator=generator)
    full, without = attended(torch.ones_like(keep)), attended(keep)
    assert_close(output(torch.ones(2, 10)), full)
    assert_close(output(torch.zeros(2, 10)), without)
    assert_close(output(torch.full((2, 10), 0.25)), 0.25 * full + 0.75 * without)
    assert_close(output(some), output(some.masked_fill(keep, 0.5)))
    for entry in range(10):  # each entry by itself, so that what they add sums up to the whole
        one = torch.zeros(2, 10)
        one[:, entry] = 1.0
        full = full - (output(one) - without)
    assert_close(full, without)
