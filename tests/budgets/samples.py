"""Importance tables for the tests: hypothesis strategies and heavy-tailed draws."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from kvsearch.budgets.allocator import Floats


@st.composite
def tables(draw: st.DrawFn, heads: int = 4, length: int = 8) -> Floats:
    """[L, Hkv, T] with plenty of ties, zeros and plateaus, or continuous."""
    shape = draw(st.integers(1, 2)), draw(st.integers(1, heads)), draw(st.integers(1, length))
    if draw(st.booleans()):
        values = st.integers(0, draw(st.sampled_from([1, 3, 9]))).map(float)
        return np.array(draw(st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))).reshape(
            shape
        )
    return heavy_tailed(np.random.default_rng(draw(st.integers(0, 2**32))), shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int, int]) -> Floats:
    """Pareto importances with a falling trend of random strength, i.e. rankings from useless to nearly perfect."""
    trend = (1 + np.arange(shape[2])) ** -rng.uniform(0, 1.5, (*shape[:2], 1))
    return rng.pareto(1.1, shape) * trend * rng.lognormal(0, 1, (*shape[:2], 1))
