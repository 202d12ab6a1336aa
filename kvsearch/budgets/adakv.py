"""AdaKV: head budgets inside a layer, by where the layer's highest scores are."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvsearch.budgets.allocator import Floats, Ints, Signals
from kvsearch.budgets.bounds import check_signals, head_scores
from kvsearch.budgets.dynamic import Allocation, Order, Wish, even_layers, shared_budgets
from kvsearch.errors import UsageError
from kvsearch.plan.rounding import GUARD, water_fill

if TYPE_CHECKING:
    from kvsearch.policies.base import Policy

Variant = Literal["exact", "official", "kvpress"]


def head_budgets(
    scores: ArrayLike,
    free: int,
    floor_share: float = 0.2,
    variant: Variant = "exact",
    most: ArrayLike | None = None,
    normalize: bool = False,
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

    Among equal scores the entry with the better place in its head comes first, then the lower head: all-equal scores,
    e.g. all zero, mean equal budgets.

    Args:
        scores: [Hkv, M] of the layer's candidates, in a unit that is the same for all heads; may be negative.
        free: entries of all heads together, beyond what is protected.
        floor_share: alpha, in [0, 1].
        variant: one of the above.
        most: entries a head has room for, a number or [Hkv]; never more than M, which is the default.
        normalize: multiply the scores (>= 0) of a head by the share of its mass that its floor(c) highest hold, so that
            heads with scattered attention count for less; an option of the official code, off there by default.

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
    ranked = torch.from_numpy(-np.sort(-values, axis=1))
    order = head_order(normalized(ranked, free // heads) if normalize else ranked, values.size)
    shares = split_heads(order, free, room, floor_share, variant)
    if variant == "official":
        return np.minimum(np.rint(shares), room).astype(np.int64)
    return water_fill(shares, free, 0, room)


def head_order(ranked: Tensor, most: int) -> Order:
    """Kv heads of a layer's `most` highest scores, the highest first, on the host.

    `ranked` [Hkv, M] is in descending order along its rows. Among equal scores the better place in its head comes
    first, then the lower head, so the order does not depend on `most`.
    """
    heads = ranked.shape[0]
    flat = ranked[:, :most].T.reshape(-1)
    first = torch.argsort(flat, descending=True, stable=True)[:most] % heads
    return first.to(torch.uint8 if heads < 256 else torch.int32).cpu().numpy()


def normalized(ranked: Tensor, count: int) -> Tensor:
    """Scores `ranked` [Hkv, M] (descending, >= 0) times the share of each head's mass in its `count` highest."""
    mass = ranked.sum(-1, keepdim=True)
    share = torch.where(mass > 0, ranked[:, :count].sum(-1, keepdim=True) / mass, 1.0)
    return ranked * share


def split_heads(order: Order, free: int, room: Ints, floor_share: float, variant: Variant = "exact") -> Floats:
    """Shares of `free` entries, float64 [Hkv], of the heads in the `order` of a layer's scores; see `head_budgets`.

    No head counts more entries than its `room` [Hkv]. Beyond the end of the order all heads count alike.
    """
    heads = len(room)
    even = free / heads
    safe = math.floor(floor_share * even + GUARD)
    if variant == "kvpress":
        return _counts(order, np.minimum(safe, room), free, room)
    counts = _counts(order, np.zeros_like(room), free, room)
    if variant == "official":
        return counts * (1 - floor_share) + safe
    shares: Floats = (1 - floor_share) * counts + floor_share * even
    return shares


@dataclass(frozen=True)
class AdaKVAllocation(Allocation):
    """Every layer as planned, and inside it `head_budgets` of its scores; what the floors hold is not counted.

    As an allocator its signals are scores [L, Hkv, M] of the candidates, i.e. of all entries but the protected ones
    that the floors stand for; caps above floor + M count as floor + M, and layers are even.

    Args:
        floor_share: share of the even budget that every head is sure of, in [0, 1].
        variant: "exact" or "kvpress"; "official" does not sum to the total and is refused.
        normalize: see `head_budgets`.
    """

    name: ClassVar[str] = "adakv"
    floor_share: float = 0.2
    variant: Variant = "exact"
    normalize: bool = False

    def __post_init__(self) -> None:
        check_options(self.floor_share, self.variant)
        if self.variant == "official":
            raise UsageError("the official rounding of adakv does not sum to the total; use exact or kvpress")

    @property
    def shares_layers(self) -> bool:
        return False

    @property
    def shares_heads(self) -> bool:
        return True

    def order(self, ranked: Tensor, free: int) -> Order:
        """See `Allocation.order`."""
        return head_order(normalized(ranked, free // len(ranked)) if self.normalize else ranked, free)

    def check(self, policy: Policy, name: str) -> None:
        """See `Allocation.check`; normalising needs scores >= 0."""
        super().check(policy, name)
        if self.normalize and policy.signed_scores:
            raise UsageError(
                f"{name}: {policy.name} scores entries below 0, and normalize takes shares of scores: leave it out, or "
                "use a policy that scores attention"
            )

    def split(self, order: Order, free: int, rooms: Ints) -> Floats:
        """See `Allocation.split`."""
        return split_heads(order, free, rooms, self.floor_share, self.variant)

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Allocate `total` entries by scores [L, Hkv, M]: int64 [L, Hkv].

        Raises:
            UsageError: scores are not finite or of another shape; `total` is outside [sum of floors, sum of caps].
        """
        scores, low, high = head_scores(signals, total, floors, caps)
        ranked = -np.sort(-scores, axis=2)

        def wish(layer: int, free: int) -> Wish:
            return Wish(1.0, self.order(torch.from_numpy(ranked[layer]), free))

        return shared_budgets(self, even_layers(total, low, high), low, high, wish)


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


def _counts(order: Order, safe: Ints, count: int, room: Ints) -> Floats:
    """How many of `count` entries each head has, float64 [Hkv]: first its `safe` best, then the best of all the others.

    No head counts more than its `room`; beyond the end of the order all count alike.
    """
    heads = len(room)
    counts = np.bincount(order[:count], minlength=heads)
    if safe.any() or (counts > room).any():
        place = _places(order, heads)
        open_to = order[(place >= safe[order]) & (place < room[order])]
        counts = safe + np.bincount(open_to[: max(count - int(safe.sum()), 0)], minlength=heads)
    return counts.astype(np.float64) + max(count - int(counts.sum()), 0) / heads


def _places(order: Order, heads: int) -> Ints:
    """For each entry of the order, how many of its head come before it."""
    places = np.zeros(len(order), dtype=np.int64)
    for head in range(heads):
        mine = order == head
        places[mine] = np.arange(int(mine.sum()))
    return places
