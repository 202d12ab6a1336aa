"""Oracle importance against the definition, on given numbers and on random states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsearch.policies import scoring
from kvsearch.policies.scoring import projected_norms
from kvsearch.signals import attention_rows
from kvsearch.signals.attention_rows import attend_and_weigh, importance_rows

BATCH, HEADS, GROUP, ROWS, CONTEXT, DIM, WIDTH = 2, 3, 4, 5, 17, 8, 24


def random_states() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query rows, keys, values of the context, and W_O."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return (
        normal(BATCH, HEADS * GROUP, ROWS, DIM),
        normal(BATCH, HEADS, CONTEXT + ROWS, DIM),
        normal(BATCH, HEADS, CONTEXT, DIM),
        normal(HEADS * GROUP, DIM, WIDTH),
    )


def by_definition(query: Tensor, keys: Tensor, norms: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """A[q, k, j] |v_j W_O[q]| of every query head, one row at a time, [B, Hkv, G, K, T]."""
    taken = torch.zeros(BATCH, HEADS, GROUP, ROWS, CONTEXT)
    for head in range(HEADS * GROUP):
        kv, member = divmod(head, GROUP)
        for row in range(ROWS):
            visible = keys[:, kv, : CONTEXT + row + 1]
            logits = torch.einsum("bd,bnd->bn", query[:, head, row], visible) * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            taken[:, kv, member, row] = logits.softmax(-1)[:, :CONTEXT] * norms[:, kv, member]
    return taken


def test_the_worked_example() -> None:
    """Two steps, A = [.1, .6, .3] and [.5, .2, .3], norms [1, 2, .5] give [.5, 1.2, .15]."""
    attention = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    # one-hot keys turn queries into logits; the two later tokens are hidden by very low logits
    keys = torch.eye(5)[None, None]
    query = torch.full((1, 1, 2, 5), -1e4)
    query[0, 0, :, :3] = attention.log()
    norms = torch.tensor([1.0, 2.0, 0.5]).view(1, 1, 1, 3)
    torch.testing.assert_close(importance_rows(query, keys, norms, 3, 1.0)[0, 0], torch.tensor([0.5, 1.2, 0.15]))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("group", ["sum", "max"])
def test_importance_is_the_largest_row_of_the_aggregated_group(group: str, softcap: float | None) -> None:
    query, keys, values, weight = random_states()
    norms = projected_norms(values, weight, "l2")
    taken = by_definition(query, keys, norms, 0.4, softcap)
    expected = (taken.sum(2) if group == "sum" else taken.amax(2)).amax(2)
    torch.testing.assert_close(importance_rows(query, keys, norms, CONTEXT, 0.4, softcap, group), expected)


@pytest.mark.parametrize(("softcap", "scratch"), [(None, 1), (2.0, 4000)])
def test_the_size_of_a_block_changes_nothing(
    softcap: float | None, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, keys, values, weight = random_states()
    norms = projected_norms(values, weight, "l2")
    values = torch.randn(BATCH, HEADS, CONTEXT + ROWS, DIM, generator=torch.Generator().manual_seed(1))
    weights = torch.arange(1.0, BATCH * ROWS + 1).view(BATCH, ROWS)
    given = (CONTEXT, 0.4, softcap, "sum", None)
    whole = importance_rows(query, keys, norms, *given, weights)
    outputs, importance = attend_and_weigh(query, keys, values, norms, *given)
    monkeypatch.setattr(scoring, "CACHE_BYTES", scratch)
    monkeypatch.setattr(attention_rows, "MIN_BLOCK_ROWS", 2)
    torch.testing.assert_close(importance_rows(query, keys, norms, *given, weights), whole, rtol=1e-6, atol=1e-7)
    blocks = attend_and_weigh(query, keys, values, norms, *given)
    torch.testing.assert_close(blocks, (outputs, importance), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_that_weighs_entries_is_that_of_the_definition(softcap: float | None) -> None:
    query, keys, _, _ = random_states()
    # values of the context are one-hot, so outputs are the attention itself
    values = torch.eye(CONTEXT + ROWS).expand(BATCH, HEADS, -1, -1)
    ones = torch.ones(BATCH, HEADS, GROUP, CONTEXT)
    outputs, importance = attend_and_weigh(query, keys, values, ones, CONTEXT, 0.4, softcap, "sum", None)
    taken = by_definition(query, keys, ones, 0.4, softcap)
    torch.testing.assert_close(outputs[..., :CONTEXT], taken.flatten(1, 2))
    torch.testing.assert_close(importance, taken.sum(2).amax(2))
