"""DuoAttention (Xiao et al. 2024): streaming heads by the lowest gates, everything else for retrieval heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsearch.arrays import Floats, Ints
from kvsearch.errors import UsageError
from kvsearch.plan.guard import round_half_up
from kvsearch.plan.rounding import largest_remainder


def streaming_heads(gates: Floats, share: float, seed: int = 0) -> NDArray[np.bool_]:
    """Mark the round(share * L * Hkv) heads with the lowest `gates` [L, Hkv], halves rounded up; returns [L, Hkv] bool.

    Equal gates are taken in an order drawn from `seed`.

    Raises:
        UsageError: a gate is NaN, or `share` is not between 0 and 1.
    """
    gates = np.asarray(gates, dtype=np.float64)
    if not 0 <= share <= 1:
        raise UsageError(f"the share of streaming heads must be between 0 and 1, got {share}")
    if np.isnan(gates).any():
        raise UsageError(f"{int(np.isnan(gates).sum())} of {gates.size} gates are NaN")
    noise = np.random.default_rng(seed).permutation(gates.size)
    chosen = np.zeros(gates.size, dtype=bool)
    chosen[np.lexsort((noise, gates.ravel()))[: round_half_up(share * gates.size)]] = True
    return chosen.reshape(gates.shape)


def head_budgets(
    gates: Floats, share: float, sinks: int, recent: int, length: int, total: int | None = None, seed: int = 0
) -> Ints:
    """Turn gates into budgets in entries for prompts of `length` tokens, int64 [L, Hkv], none above `length`.

    Streaming heads get `sinks` + `recent`. Retrieval heads get `length`, or, with `total`, equal parts of what that
    leaves, so that all budgets sum to `total`; never less than streaming heads.

    Raises:
        UsageError: as `streaming_heads`; a count is out of range; `total` cannot be met.
    """
    if sinks < 0 or recent < 1 or length < 1:
        raise UsageError(f"head budgets need sinks >= 0, recent >= 1, length >= 1; got {sinks}, {recent}, {length}")
    streaming = streaming_heads(gates, share, seed)
    least = min(sinks + recent, length)
    budgets = np.where(streaming, least, length).astype(np.int64)
    if total is None:
        return budgets
    retrieval = int((~streaming).sum())
    rest = total - (streaming.size - retrieval) * least
    if not retrieval * least <= rest <= retrieval * length:
        lowest, most = streaming.size * least, int(budgets.sum())
        raise UsageError(
            f"a total of {total} entries cannot be met with {streaming.size - retrieval} streaming heads of {least} "
            f"entries and {retrieval} retrieval heads of up to {length}: give {lowest} to {most}"
        )
    if retrieval:
        budgets[~streaming] = largest_remainder(np.full(retrieval, rest / retrieval), rest)
    return budgets
