"""What an answer loses without a layer's context: properties of the divergence, and which layers are asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvsearch.signals.effect import divergence, layer_effects


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


def test_every_layer_is_asked_for_once_with_its_own_protected_entries() -> None:
    protected = torch.rand(3, 2, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    asked: list[tuple[int, Tensor]] = []
    full = logits(0)

    def without(layer: int, keep: Tensor) -> Tensor:
        asked.append((layer, keep))
        return logits(layer)  # layer 0 changes nothing

    effects = layer_effects(full, without, protected)
    assert [layer for layer, _ in asked] == [0, 1, 2]
    assert all(torch.equal(keep, protected[layer]) for layer, keep in asked)
    assert effects.dtype == torch.float32
    assert effects.tolist() == pytest.approx([0.0, divergence(full, logits(1)), divergence(full, logits(2))])
