"""AdaKV: head budgets inside a layer, by where the layer's highest scores are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from kvsearch.budgets.dynamic import Allocation, Order
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.core.naming import require_known
from kvsearch.plan.size import round_down
from kvsearch.policies.tensors import Tensor, torch

Variant = Literal["exact", "kvpress"]


def order_heads(ranked: Tensor, max_entries: int) -> Order:
    """Return the kv heads of a layer's `max_entries` highest scores, the highest first, on the host.

    `ranked` [Hkv, M] is in descending order along its rows. Among equal scores the better place in its head comes
    first, then the lower head, so the order does not depend on `max_entries`, and all-equal scores mean equal budgets.
    """
    heads = ranked.shape[0]
    # By place first, then by head: a stable sort takes equal scores in this order.
    flat = ranked[:, :max_entries].T.reshape(-1)
    first = torch.argsort(flat, descending=True, stable=True)[:max_entries] % heads
    # There is one for every free entry of a prompt, so it is small.
    return first.to(torch.uint8 if heads < 256 else torch.int32).cpu().numpy()


def split_heads(order: Order, free: int, room: Ints, floor_share: float, variant: Variant = "exact") -> Floats:
    """Split the free budget of one layer over its heads (AdaKV, Feng et al. 2024, arXiv 2407.11550, Algorithm 1).

    f_h counts the entries of head h among the `free` highest scores of the layer, c = free / Hkv is the even share and
    alpha = `floor_share` what is safe of it. Variants:

    - exact: (1 - alpha) * f_h + alpha * c.
    - kvpress: the first floor(alpha * c) entries of every head are safe, the highest scores of the layer get the rest.
      kvpress ranks its window, too: to get the same, give it scores above all others and count it in `free`.

    The authors' code rounds round_half_even((1 - alpha) * f_h + floor(alpha * c)), which does NOT sum to `free`: both
    roundings lose or gain entries, up to a quarter for c = 4.

    Args:
        order: kv heads of the layer's entries by descending score; beyond its end all heads count alike.
        free: entries of all heads together, beyond what is protected.
        room: most entries that a head counts, int64 [Hkv].
        floor_share: alpha, in [0, 1].
        variant: one of the above.

    Returns:
        float64 [Hkv], not rounded yet.
    """
    even = free / len(room)
    if variant == "kvpress":
        return _count_entries(order, np.minimum(round_down(floor_share * even), room), free, room)
    shares: Floats = (1 - floor_share) * _count_entries(order, np.zeros_like(room), free, room) + floor_share * even
    return shares


@dataclass(frozen=True)
class AdaKVAllocation(Allocation):
    """Leave every layer what is planned, and split it by its scores (`split_heads`); the floors are not counted.

    Args:
        floor_share: share of the even budget that every head is sure of, in [0, 1].
        variant: "exact" or "kvpress"; the authors' rounding does not sum to the total.
    """

    name: ClassVar[str] = "adakv"
    shares_layers: ClassVar[bool] = False
    shares_heads: ClassVar[bool] = True
    floor_share: float = 0.2
    variant: Variant = "exact"

    def __post_init__(self) -> None:
        check_floor_share(self.floor_share)
        require_known("variant", self.variant, get_args(Variant))

    def order(self, ranked: Tensor, free: int) -> Order:
        return order_heads(ranked, free)

    def split(self, order: Order, free: int, rooms: Ints) -> Floats:
        return split_heads(order, free, rooms, self.floor_share, self.variant)


def check_floor_share(floor_share: float) -> None:
    """Raise UsageError if the share is outside [0, 1]."""
    if not 0 <= floor_share <= 1:
        raise UsageError(f"floor_share must be in [0, 1], got {floor_share}")


def _count_entries(order: Order, safe: Ints, count: int, room: Ints) -> Floats:
    """Count how many of `count` entries each head has, float64 [Hkv]: its `safe` best, then the best of all the others.

    No head counts more than its `room`; beyond the end of the order all count alike.
    """
    heads = len(room)
    counts = np.bincount(order[:count], minlength=heads)
    # The usual case needs no bounds: the highest scores fit in their heads.
    if safe.any() or (counts > room).any():
        place = np.zeros(len(order), dtype=np.int64)  # how many entries of its head come before each
        for head in range(heads):
            of_head = order == head
            place[of_head] = np.arange(int(of_head.sum()))
        open_to = order[(place >= safe[order]) & (place < room[order])]
        counts = safe + np.bincount(open_to[: max(count - int(safe.sum()), 0)], minlength=heads)
    return counts.astype(np.float64) + max(count - int(counts.sum()), 0) / heads
