"""Sizes: what they refuse, and what they add up to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsearch.core.errors import UsageError
from kvsearch.plan import ProfileMetadata, Size
from kvsearch.plan.size import Pool

from .builders import metadata_dict


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "give either a ratio .* or entries"),
        ({"ratio": 0.5, "budget": 10}, "give either a ratio .* or entries"),
        ({"ratio": 0.0}, r"ratio 0.0 is outside \(0, 1\)"),
        ({"ratio": 1.0}, r"ratio 1.0 is outside \(0, 1\)"),
        ({"ratio": 80}, r"ratio 80 is outside \(0, 1\)"),
        ({"ratio": -0.2}, "ratio -0.2 is outside"),
        ({"ratio": float("nan")}, "ratio nan is outside"),
        ({"ratio": 0.5, "length": 0}, "length 0 must be 1 token or more"),
        ({"budget": 5, "length": -3}, "length -3 must be"),
        ({"budget": 0}, "a budget of 0 keeps nothing: give at least 1 entry per kv head"),
    ],
)
def test_sizes_that_make_no_sense(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Size(**given)


@pytest.mark.parametrize(
    ("size", "length", "total", "mean"),
    [
        (Size(budget=12), 100, 96, 12),
        (Size(budget=12), 10, 96, 12),  # in full where the prompt is shorter
        (Size(ratio=0.75), 100, 200, 25),
        (Size(ratio=0.75), 101, 202, 25.25),
        (Size(ratio=0.5, length=7), 101, 404, 50.5),  # of the prompt at hand
        (Size(ratio=0.999), 100, 1, 0.1),
    ],
)
def test_totals(size: Size, length: int, total: int, mean: float) -> None:
    assert size.total(length, 8) == total
    assert size.held(length, 8) == max(total, 8)
    assert size.mean(length) == pytest.approx(mean)


def test_what_the_layers_of_a_profile_share() -> None:
    metadata = ProfileMetadata.model_validate(metadata_dict())
    heads = metadata.shape[0] * metadata.shape[1]
    pool = Size(ratio=0.5).pool(metadata)
    assert pool == Pool(metadata.shape, heads * metadata.length // 2, metadata.length)
    assert pool.mean == metadata.length / 2
    assert Size(ratio=0.5, length=30).pool(metadata) == Pool(metadata.shape, heads * 15, 30)


def test_numbers_of_numpy_become_plain() -> None:
    size = Size(np.int64(40), length=np.int32(150))
    assert [type(value) for value in (size.budget, size.length)] == [int, int]
    assert type(Size(ratio=np.float32(0.75)).ratio) is float
