"""Dynamic allocation: a prompt's budgets from the prompt itself, while its layers pass or at its end.

A layer states a demand: how much it wants of what the layers share, and in which order its heads want entries. `Shares`
turns the demands of one prompt into budgets with an exact total. While layers are still missing it bounds what a layer
may get: with every layer that comes in the others can only lose, so what is above the bound need not be kept.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.budgets.allocator import lift_floors
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import InternalError, UsageError
from kvsearch.core.naming import require_known
from kvsearch.plan.rounding import largest_remainder, water_fill, water_level
from kvsearch.plan.schema import STATIC, check_values
from kvsearch.plan.size import GUARD

if TYPE_CHECKING:
    from torch import Tensor

    from kvsearch.policies.base import Needs, Observation, Policy

BUILT_IN_ALLOCATIONS = {
    "adakv": "kvsearch.budgets.adakv:AdaKVAllocation",
    "cake": "kvsearch.budgets.cake:CAKEAllocation",
    "lava": "kvsearch.budgets.lava:LAVaAllocation",
}
Order = NDArray[np.integer[Any]]
NO_SCORES: Floats = np.zeros(0)


class LayerDemand(NamedTuple):
    """The demand of a layer of a prompt for entries."""

    weight: float  # its share of what the layers have in common, in any unit that is the same for all, or its logarithm
    order: Order  # the kv head of each of its free entries, the most wanted entry first; as far as heads are dynamic
    scores: Floats = NO_SCORES  # of its free entries, in that order, where scores of layers are compared


class Allocation(ABC):
    """How the total of a plan's budgets is divided for each prompt; subclasses are frozen dataclasses."""

    name: ClassVar[str]
    weighs_in_logarithms: ClassVar[bool] = False  # whether `weight` gives logarithms, which neither over- nor underflow

    @property
    @abstractmethod
    def shares_layers(self) -> bool:
        """Whether layers share one pool; if not, each has what the plan has for it."""

    @property
    @abstractmethod
    def shares_heads(self) -> bool:
        """Whether the heads of a layer share what it has; if not, they get the same."""

    def needs(self, policy: Policy) -> Needs:  # noqa: ARG002
        """Return what `weight` needs of the prompt besides the needs of the layer's policy."""
        from kvsearch.policies.base import Needs

        return Needs()

    def weight(
        self,
        policy: Policy,  # noqa: ARG002
        observation: Observation,  # noqa: ARG002
        scores: Sequence[Tensor],  # noqa: ARG002
    ) -> list[float]:
        """Return how much the layer wants per sequence; called where layers are shared.

        `scores` are the policy's, per sequence [Hkv, candidates] fp32 in descending order.
        """
        raise InternalError(f"allocation {self.name} does not weigh layers")

    def order(self, ranked: Tensor, free: int) -> Order:  # noqa: ARG002
        """Return the kv heads of the `free` most wanted entries (at least), by descending scores `ranked` [Hkv, M]."""
        raise InternalError(f"allocation {self.name} does not order entries")

    def scores(self, ranked: Tensor, free: int) -> Floats:  # noqa: ARG002
        """Return the `free` highest scores where layers share by how many of the highest of all they have."""
        return NO_SCORES

    def split(self, order: Order, free: int, rooms: Ints) -> Floats:  # noqa: ARG002
        """Return the shares of `free` entries of a layer before rounding, float64 [Hkv]; they sum to `free`.

        Must not fall in any head when `free` grows, if `rooms` [Hkv] are equal.
        """
        raise InternalError(f"allocation {self.name} does not split layers")

    def check(self, policy: Policy, name: str, carries: bool = False) -> None:
        """Raise UsageError, with the layer's `name`, if the entries of `policy` cannot be shared like this.

        `carries`: those that stay carry what leaves.
        """
        if policy.keeps_all(1, 2) or policy.keeps_all(2**31, 2):
            raise UsageError(
                f"{name}: {policy.name} never evicts some heads, whatever their budget, so there is nothing to share: "
                f"use a static plan, not allocation {self.name}"
            )
        if self.shares_layers and (policy.merges_prompt or carries):
            what = "entries carry what leaves" if carries else f"{policy.name} merges what it evicts"
            raise UsageError(
                f"{name}: {what}, so its budgets must be final when a layer ends: use allocation adakv or static, not "
                f"{self.name}"
            )

    def parameters(self) -> dict[str, int | float | bool | str]:
        """Return the options by name, as a plan stores them."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


class Shares:
    """The budgets of one prompt in one phase, in entries per kv head.

    Args:
        allocation: how to share.
        planned: int64 [L, Hkv], what a static plan would give; its sum (where layers are not shared, that of every
            layer) is the total that is shared, as far as the caps permit.
        floors: int64 [L, Hkv], what every head gets first; where the total does not reach it, as evenly as it can.
        caps: int64 [L, Hkv], the most a head can get.
    """

    def __init__(self, allocation: Allocation, planned: Ints, floors: Ints, caps: Ints) -> None:
        self.allocation = allocation
        low = np.minimum(floors, caps)
        if allocation.shares_layers:
            parts = [_find_room(planned, low, caps)]
        else:
            rows = zip(planned, low, caps, strict=True)
            parts = [_find_room(*(row[None] for row in layer)) for layer in rows]
        self.floors, self.spare = (np.concatenate([part[which] for part in parts]) for which in (0, 1))
        self.free = [part[2] for part in parts]  # entries beyond the floors, of all layers together or of each
        self.rooms = caps - self.floors
        self.demands: dict[int, LayerDemand] = {}
        self._highest = NO_SCORES  # of all layers so far where scores are compared, no more than are free
        self._owners = np.zeros(0, dtype=np.int64)  # their rows

    def add(self, layer: int, demand: LayerDemand) -> None:
        """Add the demand of row `layer`."""
        self.demands[layer] = demand
        scores = np.concatenate([self._highest, demand.scores])
        first = np.argsort(-scores, kind="stable")[: self.free[0]]
        # No layer can have more than the free entries among the highest, so the others are forgotten.
        self._highest = scores[first]
        self._owners = np.append(self._owners, np.full(len(demand.scores), layer))[first]

    def open_to(self, layer: int) -> int:
        """Return the most free entries that row `layer` can get, whatever the demands."""
        free = self.free[0 if self.allocation.shares_layers else layer]
        return int(min(free, self.rooms[layer].sum()))

    def most(self, layer: int) -> Ints:
        """Return the most entries that the heads of row `layer` can still get, int64 [Hkv]: what it must hold on to.

        Exceeds, summed over the layers so far, what they share by less than one entry per head.
        """
        if self.allocation.shares_heads:
            # Of the layers so far: whoever comes later only takes from this.
            free = math.ceil(self._layer_shares()[layer] - GUARD)
            shares = self.allocation.split(self.demands[layer].order, free, self.rooms[layer])
        else:
            shares = self._even_shares()[layer]
        # Rounded up, as the final rounding may give a head one more than its share.
        bound: Ints = self.floors[layer] + np.minimum(np.ceil(shares - GUARD).astype(np.int64), self.rooms[layer])
        return bound

    def budgets(self) -> Ints:
        """Return the final budgets, int64 [L, Hkv], once all layers have stated their demands.

        They sum to the planned total, or to the caps if these are less; `spare` [L, Hkv] is what is missing then, to
        be had while decoding.
        """
        layers = range(len(self.floors))
        if not self.allocation.shares_layers:
            return np.array([self.layer_budgets(layer) for layer in layers], dtype=np.int64)
        # In two steps, both exact: the pool to layers, then each layer's part to its heads.
        (pool,) = self.free
        if not self.allocation.shares_heads:
            shares = self._even_shares()
            ideal = np.array([shares[layer] for layer in layers]).reshape(self.rooms.shape)
            return self.floors + largest_remainder(ideal, pool, 0, self.rooms)
        by_layer = self._layer_shares()
        free = largest_remainder([by_layer[layer] for layer in layers], pool, 0, self.rooms.sum(-1)).tolist()
        given = [self._split(layer, free[layer]) for layer in layers]
        return self.floors + np.array(given, dtype=np.int64).reshape(self.floors.shape)

    def layer_budgets(self, layer: int) -> Ints:
        """Return the final budgets of one row, int64 [Hkv], where layers share nothing."""
        budgets: Ints = self.floors[layer] + self._split(layer, self.free[layer])
        return budgets

    def _layer_shares(self) -> dict[int, float]:
        """Return the free entries of every layer so far before rounding, if no other layer came."""
        rows = sorted(self.demands)
        rooms = self.rooms[rows].sum(-1)
        shares = water_level(self._weights(rows), self._pool(rooms), 0, rooms)
        return dict(zip(rows, shares.tolist(), strict=True))

    def _even_shares(self) -> dict[int, Floats]:
        """Return the free entries [Hkv] of the heads of every layer so far, all alike, before rounding."""
        rows = sorted(self.demands)
        rooms = self.rooms[rows]
        weights = np.repeat(self._weights(rows)[:, None], rooms.shape[1], 1)
        return dict(zip(rows, water_level(weights, self._pool(rooms), 0, rooms), strict=True))

    def _pool(self, rooms: Ints) -> int:
        return min(self.free[0], int(rooms.sum()))

    def _weights(self, rows: Sequence[int]) -> Floats:
        if len(self._owners):
            return np.bincount(self._owners, minlength=len(self.floors))[rows].astype(np.float64)
        weights = np.array([self.demands[row].weight for row in rows])
        if not self.allocation.weighs_in_logarithms:
            return weights
        # Shares depend on differences of logarithms alone: taken off the largest they cannot overflow.
        largest = weights.max(initial=-np.inf)
        return np.exp(weights - largest) if np.isfinite(largest) else np.zeros_like(weights)

    def _split(self, layer: int, free: int) -> Ints:
        shares = self.allocation.split(self.demands[layer].order, free, self.rooms[layer])
        return water_fill(shares, free, 0, self.rooms[layer])


def share_budgets(
    allocation: Allocation, planned: Ints, floors: Ints, caps: Ints, demand: Callable[[int, int], LayerDemand]
) -> Ints:
    """Return the budgets int64 [L, Hkv] of a prompt whose layers are all known; `demand(layer, free)` states theirs."""
    shares = Shares(allocation, planned, floors, caps)
    for layer in range(len(planned)):
        shares.add(layer, demand(layer, shares.open_to(layer)))
    return shares.budgets()


def create_allocation(name: str, params: Mapping[str, object] | None = None) -> Allocation | None:
    """Build an allocation from its name and options; None is "static", where budgets hold as they are.

    Raises:
        UsageError: an unknown name or option, or a value out of range.

    Examples:
        >>> create_allocation("adakv", {"floor_share": 0.5})
        AdaKVAllocation(floor_share=0.5, variant='exact')
        >>> create_allocation("static") is None
        True
    """
    if name == STATIC:
        if params:
            raise UsageError(f"allocation static has no option {next(iter(params))!r}")
        return None
    kind = find_allocation_class(name)
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    allocation: Allocation = kind(**check_values(params or {}, fields, f"allocation {name}", "option"))
    return allocation


def find_allocation_class(name: str) -> Any:
    """Return the class of an allocation other than "static"; UsageError for an unknown name."""
    require_known("allocation", name, sorted([STATIC, *BUILT_IN_ALLOCATIONS]))
    return resolve_name(BUILT_IN_ALLOCATIONS[name])


def _find_room(planned: Ints, floors: Ints, caps: Ints) -> tuple[Ints, Ints, int]:
    """Return floors that layers can reach together, what caps leave over (both [l, Hkv]), and the free entries."""
    wanted = int(planned.sum())
    total = min(wanted, int(caps.sum()))
    base = lift_floors(int(floors.max(initial=0)), total, np.zeros_like(floors), floors)
    # Short prompts have fewer entries than planned; the rest is for tokens that follow.
    spare = water_fill(np.ones(planned.shape), wanted - total)
    return base, spare, total - int(base.sum())
