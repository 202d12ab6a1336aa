"""Agreement of attention outputs: worked examples, edges, and what cannot change it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.signals.attention_rows import compare_outputs


def agreement(full: list[float], changed: list[float]) -> tuple[float, float]:
    cosine, error = compare_outputs(torch.tensor(full), torch.tensor(changed))
    return cosine.item(), error.item()


def test_a_worked_example() -> None:
    cosine, error = agreement([1, 2, 2], [1, 2, 1])
    assert cosine == pytest.approx(7 / (3 * math.sqrt(6)), abs=1e-6)
    assert cosine == pytest.approx(0.9526, abs=1e-4)
    assert error == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("full", "changed", "expected"),
    [
        ([3.0, 4.0], [-3.0, -4.0], (-1.0, 2.0)),
        ([3.0, 4.0], [-4.0, 3.0], (0.0, math.sqrt(2))),
        ([0.0, 0.0], [0.0, 0.0], (1.0, 0.0)),
        ([0.0, 0.0], [3.0, 4.0], (0.0, 1.0)),
        ([2e18, 0.0], [1e18, 0.0], (1.0, 0.5)),
    ],
)
def test_edges(full: list[float], changed: list[float], expected: tuple[float, float]) -> None:
    assert agreement(full, changed) == pytest.approx(expected, abs=1e-6)


def test_half_precision_is_computed_in_single() -> None:
    """A dot product of 4096 terms in bf16 would be off by more than the agreement is."""
    full, noise = torch.randn(2, 5, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    changed = full + 0.01 * noise
    cosine, error = compare_outputs(full, changed)
    exact, _ = compare_outputs(full.double().float(), changed.double().float())
    assert cosine.dtype == error.dtype == torch.float32
    assert torch.equal(cosine, exact)
    double, moved = full.double(), changed.double()
    expected = (double - moved).norm(dim=-1) / double.norm(dim=-1)
    torch.testing.assert_close(error.double(), expected, rtol=1e-5, atol=0)


@given(st.integers(0, 10_000), st.floats(0.01, 100), st.integers(1, 9))
def test_bounds_and_scale(seed: int, scale: float, size: int) -> None:
    full, changed = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(seed))
    cosine, error = compare_outputs(full, changed)
    scaled = compare_outputs(full * scale, changed * scale)
    assert bool((cosine.abs() <= 1).all())
    assert bool((error >= 0).all())
    torch.testing.assert_close(scaled, (cosine, error), rtol=1e-4, atol=1e-5)
    turned, _ = compare_outputs(full, changed * scale)  # a cosine ignores length, the error does not
    torch.testing.assert_close(turned, cosine, rtol=1e-4, atol=1e-5)
