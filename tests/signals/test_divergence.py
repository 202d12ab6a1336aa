"""Properties of the divergence of next-token distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvsearch.signals.divergence import divergence


def logits(seed: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 11, generator=torch.Generator().manual_seed(seed)) * 2


def test_divergence_is_zero_for_equal_distributions() -> None:
    assert divergence(logits(0), logits(0)) == 0.0
    # a constant added to all logits of a row changes no distribution
    assert divergence(logits(0), logits(0) + torch.arange(4.0)[:, None]) == pytest.approx(0.0, abs=1e-6)


def test_divergence_is_positive_and_directed() -> None:
    assert divergence(logits(0), logits(1)) > 0.1
    assert divergence(logits(0), logits(1)) != pytest.approx(divergence(logits(1), logits(0)))


def test_divergence_of_two_known_distributions() -> None:
    full, changed = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(full, changed) == pytest.approx(expected)


def test_divergence_adds_up_over_rows_and_does_not_care_for_scale() -> None:
    a, b = logits(0), logits(1)
    assert divergence(a, b) == pytest.approx(sum(divergence(a[i : i + 1], b[i : i + 1]) for i in range(4)))
    assert divergence(a.repeat(3, 1), b.repeat(3, 1)) == pytest.approx(3 * divergence(a, b), rel=1e-5)


def test_divergence_of_half_precision_logits_is_computed_in_float() -> None:
    a, b = logits(0).bfloat16(), logits(1).bfloat16()
    assert divergence(a, b) == divergence(a.float(), b.float())


@pytest.mark.parametrize("seed", range(20))
def test_divergence_is_never_negative(seed: int) -> None:
    noise = torch.randn(4, 11, generator=torch.Generator().manual_seed(seed))
    assert 0 <= divergence(logits(seed), logits(seed) + 1e-7 * noise) < 1e-5


def test_no_rows_lose_nothing() -> None:
    assert divergence(logits(0)[:0], logits(1)[:0]) == 0.0
