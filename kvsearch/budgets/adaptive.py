"""AdaKV: head budgets inside a layer, by where the layer's highest scores are."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.budgets.base import Floats, Ints, Signals
from kvsearch.budgets.bounds import check_signals, head_scores
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import GUARD, water_fill

Variant = Literal["exact", "official", "kvpress"]


def head_budgets(
    scores: ArrayLike, free: int, floor_share: float = 0.2, variant: Variant = "exact", most: ArrayLike | None = None
) -> Ints:
    """Split the free budget of one layer over its heads (AdaKV, Feng et al. 2024, arXiv 2407.11550, Algorithm 1).

    f_h counts the entries of head h among the `free` highest scores of the layer, c = free / Hkv is the even share and
    alpha = `floor_share` what is safe of it. Variants:

    - exact: (1 - alpha) * f_h + alpha * c, rounded to sum to `free`.
    - official: round_half_even((1 - alpha) * f_h + floor(alpha * c)), as the authors' code. It does NOT sum to `free`:
      both roundings lose or gain entries, up to a quarter for c = 4.
    - kvpress: the first floor(alpha * c) entries of every head are safe, the highest scores of the layer get the rest;
      sums to `free`. kvpress ranks its window, too: to get the same, give it scores above all others and count it
      in `free`.

    Where scores tie for the last of the `free` places, the heads share these places equally, as far as their ties go:
    all-equal scores, e.g. all zero, mean equal budgets.

    Args:
        scores: [Hkv, M] of the layer's candidates, in a unit that is the same for all heads; may be negative.
        free: entries of all heads together, beyond what is protected.
        floor_share: alpha, in [0, 1].
        variant: one of the above.
        most: entries a head has room for, a number or [Hkv]; never more than M, which is the default.

    Returns:
        int64 [Hkv] in [0, most].

    Raises:
        UsageError: scores are not finite or not [Hkv, M]; `free` is outside [0, sum of most]; a bad option.
    """
    values = check_signals(np.asarray(scores), "scores")
    if values.ndim != 2:
        raise UsageError(f"scores of a layer must be [kv heads, candidates], got shape {list(values.shape)}")
    check_options(floor_share, variant)
    heads, length = values.shape
    room = _room(most, heads, length)
    if not 0 <= operator.index(free) <= room.sum():
        raise UsageError(f"{free} free entries cannot be met by {heads} heads: at least 0, at most {room.sum()}")
    if not heads:
        return room
    ranked = -np.sort(-values, axis=1)
    safe = math.floor(floor_share * free / heads + GUARD)
    if variant == "kvpress":
        return _counts(ranked, np.minimum(safe, room), free, room)
    counts = _counts(ranked, np.zeros_like(room), free, room)
    if variant == "official":
        mixed: Ints = np.minimum(np.rint(counts * (1 - floor_share) + safe).astype(np.int64), room)
        return mixed
    return water_fill((1 - floor_share) * counts + floor_share * free / heads, free, 0, room)


@dataclass(frozen=True)
class AdaKV:
    """Even layers, and inside every layer `head_budgets` of its scores; what the floors hold is not counted.

    The signals are scores [L, Hkv, M] of the candidates, i.e. of all entries but the protected ones that the floors
    stand for; caps above floor + M count as floor + M.

    Args:
        floor_share: share of the even budget that every head is sure of, in [0, 1].
        variant: "exact" or "kvpress"; "official" does not sum to the total and is refused.
    """

    name: ClassVar[str] = "adakv"
    floor_share: float = 0.2
    variant: Variant = "exact"

    def __post_init__(self) -> None:
        check_options(self.floor_share, self.variant)
        if self.variant == "official":
            raise UsageError("the official rounding of adakv does not sum to the total; use exact or kvpress")

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Allocate `total` entries by scores [L, Hkv, M]: int64 [L, Hkv].

        Raises:
            UsageError: scores are not finite or of another shape; `total` is outside [sum of floors, sum of caps].
        """
        scores, low, high = head_scores(signals, total, floors, caps)
        layers = water_fill(np.ones(len(low)), total, low.sum(axis=1), high.sum(axis=1))
        return split_layers(scores, layers - low.sum(axis=1), low, high, self.floor_share, self.variant)


def split_layers(
    scores: Floats, free: Ints, floors: Ints, caps: Ints, floor_share: float, variant: Variant = "exact"
) -> Ints:
    """Add `head_budgets` of every layer to its floors: int64 [L, Hkv]; `free` [L] is what a layer has beyond them."""
    budgets = floors.copy()
    for layer, entries in enumerate(free.tolist()):
        budgets[layer] += head_budgets(scores[layer], entries, floor_share, variant, caps[layer] - floors[layer])
    return budgets


def check_options(floor_share: float, variant: str = "exact") -> None:
    """UsageError if the share is outside [0, 1] or the variant unknown."""
    if not 0 <= floor_share <= 1:
        raise UsageError(f"floor_share must be in [0, 1], got {floor_share}")
    if variant not in get_args(Variant):
        raise UsageError(f"unknown variant {variant!r} (known: {', '.join(get_args(Variant))})")


def _room(most: ArrayLike | None, heads: int, length: int) -> Ints:
    room = np.minimum(length if most is None else np.asarray(most, dtype=np.int64), length)
    if room.ndim and room.shape != (heads,):
        raise UsageError(f"most must be a number or one for each of {heads} heads, got shape {list(room.shape)}")
    if room.size and room.min() < 0:
        raise UsageError(f"most must be 0 or more, got {room.min()}")
    return np.broadcast_to(room, (heads,)).astype(np.int64)


def _counts(ranked: Floats, safe: Ints, count: int, room: Ints) -> Ints:
    """How many of the `count` entries to keep each head has: first its `safe` best, then the highest of all the others.

    `ranked` [Hkv, M] is sorted in descending order; no head keeps more than its `room`.
    """
    rank = np.arange(ranked.shape[1])
    open_to = (rank >= safe[:, None]) & (rank < room[:, None])
    missing = count - int(safe.sum())
    if missing <= 0:
        return safe
    last = -np.partition(-ranked[open_to], missing - 1)[missing - 1]
    above: Ints = safe + (open_to & (ranked > last)).sum(axis=1)
    tied = (open_to & (ranked == last)).sum(axis=1)
    return above + water_fill(np.ones(len(ranked)), count - int(above.sum()), 0, tied)
