"""Norms of projected values against the projection itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsearch.policies import scoring
from kvsearch.policies.base import Norm
from kvsearch.policies.scoring import projected_norms

BATCH, HEADS, GROUP, LENGTH, DIM, WIDTH = 2, 3, 4, 17, 8, 24
both = pytest.mark.parametrize("order", ["l1", "l2"])


def states() -> tuple[Tensor, Tensor]:
    """Values and W_O."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator)
    return values, torch.randn(HEADS * GROUP, DIM, WIDTH, generator=generator)


def by_definition(values: Tensor, weight: Tensor, order: Norm) -> Tensor:
    heads = [(values[:, head // GROUP] @ weight[head]).norm(p=int(order[1]), dim=-1) for head in range(len(weight))]
    return torch.stack(heads, 1).view(BATCH, HEADS, GROUP, -1)


def test_by_hand() -> None:
    values = torch.tensor([[[[1.0, 2.0], [0.0, -1.0]]]])
    weight = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]])  # v W = [3, 4] and [-1, -2]
    torch.testing.assert_close(projected_norms(values, weight, "l1"), torch.tensor([[[[7.0, 3.0]]]]))
    torch.testing.assert_close(projected_norms(values, weight, "l2"), torch.tensor([[[[5.0, 5.0**0.5]]]]))


@both
def test_zero_and_half_precision_values(order: Norm) -> None:
    values, weight = states()
    assert torch.equal(
        projected_norms(torch.zeros_like(values), weight, order), torch.zeros(BATCH, HEADS, GROUP, LENGTH)
    )
    halves, light = values.bfloat16(), weight.bfloat16()
    norms = projected_norms(halves, light, order)
    assert norms.dtype == torch.float32
    assert torch.equal(norms, projected_norms(halves.float(), light.float(), order))
    assert bool(projected_norms(values * 1e-20, weight, order).isfinite().all())


@both
@pytest.mark.parametrize("scratch", [1, 1500, 10**9])
def test_the_size_of_the_scratch_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, scratch: int, order: Norm
) -> None:
    values, weight = states()
    monkeypatch.setattr(scoring, "CHUNK_BYTES", scratch)
    torch.testing.assert_close(projected_norms(values, weight, order), by_definition(values, weight, order))


@both
def test_one_segment_per_row(order: Norm) -> None:
    """Rows of one kv head each, with the weights of that head, as when entries are scored anew while decoding."""
    values, weight = states()
    whole = projected_norms(values, weight, order)
    rows = projected_norms(values[:, 1:2], weight[GROUP : 2 * GROUP], order)
    torch.testing.assert_close(rows, whole[:, 1:2])
