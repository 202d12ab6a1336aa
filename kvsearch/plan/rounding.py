"""Exact rounding: real-valued shares become integer budgets within their bounds that sum to the total."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.plan.size import GUARD

_DECIMALS = 9  # those that `GUARD` leaves: equal remainders tie despite float noise
_FAINTEST = 1e-200


def largest_remainder(ideal: ArrayLike, total: int, lower: ArrayLike = 0, upper: ArrayLike | None = None) -> Ints:
    """Round `ideal` shares to integers within bounds that sum to `total` exactly (method of largest remainders).

    Starts from clamp(floor(x_i), lower_i, upper_i). Missing units go one by one to the largest x_i - k_i that has
    room, excess units are taken from the smallest; ties go to the lower index (C order).

    Args:
        ideal: shares >= 0 in entries, any shape.
        total: the sum to reach, in entries.
        lower: whole numbers >= 0 that broadcast to the shape of `ideal`.
        upper: likewise; None means no upper bound.

    Returns:
        int64 array of `ideal`'s shape.

    Raises:
        UsageError: a share is negative or not finite; bounds cross; `total` is outside the bounds' sums.

    Examples:
        >>> largest_remainder([2.6, 1.7, 1.7], 6).tolist()
        [2, 2, 2]
        >>> largest_remainder([2.6, 1.7, 1.7], 6, lower=[3, 0, 0]).tolist()
        [3, 2, 1]
    """
    shares = _check_shares(ideal, "share")
    low, caps = check_bounds(shares.shape, total, lower, upper)
    # Nobody gets more than all there is: bounds of 2^62 would overflow when they are added up.
    high = np.minimum(caps, total)  # no result changes, no sum overflows
    # The guard: 3.0 that floats have made 2.9999999999 is 3.
    kept = np.clip(np.floor(shares + GUARD), low, high).astype(np.int64)
    missing = total - int(kept.sum())
    # Remainders that differ by noise only must tie, so that the lower index gets the entry on every machine.
    left = np.round(shares - kept, _DECIMALS)
    if missing > 0:
        return kept + _take(left, high - kept, missing)
    if missing < 0:
        # Bounds have lifted some above their share: entries go back where they exceed it most.
        return kept - _take(-left, kept - low, -missing)
    return kept


def water_fill(weights: ArrayLike, total: int, lower: ArrayLike = 0, upper: ArrayLike | None = None) -> Ints:
    """Share `total` in proportion to `weights` within bounds, as `water_level`, then round by `largest_remainder`.

    Args:
        weights: >= 0, any shape and scale.
        total: the sum to reach, in entries.
        lower: whole numbers >= 0 that broadcast to the shape of `weights`.
        upper: likewise; None means no upper bound.

    Returns:
        int64 array of `weights`' shape.

    Raises:
        UsageError: a weight is negative or not finite; bounds cross; `total` is outside the bounds' sums.

    Examples:
        >>> water_fill([1, 2, 3], 12).tolist()
        [2, 4, 6]
        >>> water_fill([1, 2, 3], 12, lower=3, upper=5).tolist()
        [3, 4, 5]
    """
    ideal = water_level(weights, total, lower, upper)
    return largest_remainder(ideal, total, lower, upper)


def water_level(weights: ArrayLike, total: int, lower: ArrayLike = 0, upper: ArrayLike | None = None) -> Floats:
    """Share `total` in proportion to `weights` within bounds, not rounded: x_i = clamp(lam * w_i, lower_i, upper_i).

    lam is solved for exactly on the active set, so a bound that binds loses no entry. Zero weights keep their lower
    bound until all others are full, then fill uniformly, so all-zero weights mean uniform.

    Returns:
        float64 array of `weights`' shape that sums to `total`; arguments and errors as `water_fill`.

    Examples:
        >>> water_level([1, 2, 3], 10).round(2).tolist()
        [1.67, 3.33, 5.0]
    """
    scaled = _check_shares(weights, "weight")
    low, caps = check_bounds(scaled.shape, total, lower, upper)
    high = np.minimum(caps, total)
    # Weights have no unit; divided by the largest, lam does not overflow either.
    if scaled.size and scaled.max() > 0:
        scaled = scaled / scaled.max()
    flat = scaled.ravel()
    lo = low.ravel()
    hi = high.ravel()
    # Below it, bound / weight may overflow: such weights count as zero.
    weighty = flat > _FAINTEST
    filled = np.where(weighty, hi, lo)
    # What is left if all with weight are full. If anything is, those without share it evenly; if it is too much, those
    # without stay at their lower bound.
    rest = total - int(filled.sum())
    ideal = filled.astype(np.float64)
    if rest > 0:
        bare = ~weighty
        ideal[bare] = _fill(np.ones(int(bare.sum())), rest + int(lo[bare].sum()), lo[bare], hi[bare])
    elif rest < 0:
        room = total - int(lo[~weighty].sum())
        ideal[weighty] = _fill(flat[weighty], room, lo[weighty], hi[weighty])
    return ideal.reshape(scaled.shape)


def _fill(weights: Floats, total: int, low: Ints, high: Ints) -> Floats:
    """Solve sum clamp(lam * w, low, high) = total for lam; weights > 0, sum(low) <= total <= sum(high)."""
    starts = low / weights
    stops = high / weights
    # The sum is linear between these values of lam, where a share leaves its lower bound or meets its upper one.
    bends = np.unique(np.concatenate([starts, stops]))
    # the sum is <= total at bends[below] and >= total at bends[above]
    below = 0
    above = len(bends) - 1
    while above - below > 1:
        middle = (below + above) // 2
        if np.clip(bends[middle] * weights, low, high).sum() <= total:
            below = middle
        else:
            above = middle
    # Between two neighbouring bends it is certain which shares are at a bound; the others are lam * w, and lam follows
    # by division.
    at_low = starts >= bends[above]
    at_high = stops <= bends[below]
    free = ~(at_low | at_high)
    filled = np.where(at_high, high, low).astype(np.float64)
    if free.any():
        # Exact but for rounding: no iteration, and no tolerance.
        lam = (total - filled[~free].sum()) / weights[free].sum()
        filled[free] = np.clip(lam * weights[free], low[free], high[free])
    return filled


def _take(priority: Floats, room: Ints, count: int) -> Ints:
    """Take `count` units where unit t of entry i has priority p_i - t, t < room_i; ties to the lower index.

    All units above an integer level are taken; at the level each entry has one unit, and the largest fractions win.
    """
    whole = np.floor(priority).astype(np.int64)
    # Integer bisection for the level: at `taken` all units count, at `level` none does.
    taken = int((whole - room).min())
    level = int(whole.max()) + 1
    while level - taken > 1:  # count(level) < count <= count(taken), where count(k) = units with priority >= k
        middle = (taken + level) // 2
        if int(np.clip(whole - middle + 1, 0, room).sum()) < count:
            level = middle
        else:
            taken = middle
    # Units above the level are all taken; of those at it, one per entry, the largest fractions win.
    units = np.clip(whole - level + 1, 0, room)
    at_level = np.flatnonzero((np.clip(whole - taken + 1, 0, room) > units).ravel())
    fraction = np.round(priority - whole, _DECIMALS).ravel()[at_level]
    winners = at_level[np.argsort(-fraction, kind="stable")[: count - int(units.sum())]]
    flat = units.ravel()
    flat[winners] += 1
    return flat.reshape(room.shape)


def _check_shares(values: ArrayLike, noun: str) -> Floats:
    shares = np.asarray(values, dtype=np.float64)
    wrong = shares[~(np.isfinite(shares) & (shares >= -GUARD))]
    if wrong.size:
        raise UsageError(
            f"every {noun} must be finite and >= 0: {wrong.size} of {shares.size} are not, e.g. {wrong[0]}"
        )
    return np.maximum(shares, 0.0)


def check_bounds(shape: tuple[int, ...], total: int, lower: ArrayLike, upper: ArrayLike | None) -> tuple[Ints, Ints]:
    """Return int64 bounds that admit `total`; UsageError if they cross, or their sums do not enclose it."""
    low = np.broadcast_to(np.asarray(lower, dtype=np.int64), shape)
    high = np.broadcast_to(np.asarray(max(total, 0) if upper is None else upper, dtype=np.int64), shape)
    crossed = np.flatnonzero((low > high).ravel()) if upper is not None else np.zeros(0, np.int64)
    if crossed.size:
        at = crossed[0]
        raise UsageError(f"lower bound {low.ravel()[at]} exceeds upper bound {high.ravel()[at]} at index {at}")
    # Python's whole numbers: an int64 sum of large caps would wrap around.
    minimum, maximum = (sum(bound.ravel().tolist()) for bound in (low, high))
    if total < minimum or total > maximum:
        ceiling = "unbounded" if upper is None and low.size else f"at most {maximum}"
        raise UsageError(f"total {total} cannot be met by {low.size} budgets: at least {minimum}, {ceiling}")
    return low, high
