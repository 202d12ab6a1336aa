"""Importance tables for the tests, hypothesis strategies and heavy-tailed draws, and what solvers are compared by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from kvsearch.budgets.convex import sort_blocks
from kvsearch.core.arrays import Floats, Ints
from kvsearch.testing.allocator_contract import AllocatorContract


class Contract(AllocatorContract):
    """The contract, with two of its seeds."""

    @pytest.fixture(params=range(2))
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        return np.random.default_rng(request.param)


def bounds(layers: int, heads: int = 1, floor: int = 0, cap: int = 1000) -> tuple[Ints, Ints]:
    """Floors and caps [L, Hkv], the same for all heads."""
    return np.full((layers, heads), floor), np.full((layers, heads), cap)


@st.composite
def tables(draw: st.DrawFn, heads: int = 4, length: int = 8) -> Floats:
    """[L, Hkv, T] with plenty of ties, zeros and plateaus, or continuous."""
    shape = draw(st.integers(1, 2)), draw(st.integers(1, heads)), draw(st.integers(1, length))
    if draw(st.booleans()):
        values = st.integers(0, draw(st.sampled_from([1, 3, 9]))).map(float)
        size = int(np.prod(shape))
        return np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)
    return heavy_tailed(np.random.default_rng(draw(st.integers(0, 2**32))), shape)


def eviction_loss(importance: ArrayLike, budgets: ArrayLike) -> Floats:
    """Sum the importance [..., T] beyond the first b ranked entries, `budgets` [...], float64 (LU-KV, Eq. 6)."""
    ranked = np.asarray(importance, dtype=np.float64)
    lost: Floats = np.where(np.arange(ranked.shape[-1]) >= np.asarray(budgets)[..., None], ranked, 0.0).sum(axis=-1)
    return lost


def marginal_gains(importance: ArrayLike) -> Floats:
    """Non-increasing gains [..., T] as the blocks of `sort_blocks` have them, entry by entry."""
    values = np.asarray(importance, dtype=np.float64)
    rows = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    heads = np.arange(len(rows))
    blocks = sort_blocks(rows, np.zeros_like(heads))
    gains = [np.repeat(blocks.slope[blocks.head == head], blocks.size[blocks.head == head]) for head in heads]
    return np.array(gains).reshape(values.shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    """Pareto importances with a falling trend of random strength, i.e. rankings from useless to nearly perfect."""
    trend = (1 + np.arange(shape[2])) ** -rng.uniform(0, 1.5, (*shape[:2], 1))
    return rng.pareto(1.1, shape) * trend * rng.lognormal(0, 1, (*shape[:2], 1))
