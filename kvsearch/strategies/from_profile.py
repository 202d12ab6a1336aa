"""From a profile to a plan: look up local ratios, then round them to integer budgets with an exact total."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsearch.calibration.provenance import provenance
from kvsearch.errors import UsageError
from kvsearch.plan import LayerPlan, PhasePlan, Plan, PolicySpec, Profile
from kvsearch.plan.rounding import round_half_up, water_fill


@dataclass(frozen=True)
class Target:
    """How much to keep: evict `ratio` of any prompt, or keep `budget` entries per kv head on average.

    `length` is the prompt length, in tokens, that the integer budgets in the file are for; default: the calibration's.
    """

    ratio: float | None = None
    budget: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.budget is None):
            raise UsageError("give either a ratio to evict (--ratio 0.8) or entries to keep per kv head (--budget 512)")
        if self.ratio is not None and not 0 < self.ratio < 1:
            raise UsageError(f"ratio {self.ratio} is outside (0, 1): it is the share to evict, 0.8 keeps a fifth")
        if self.length is not None and self.length < 1:
            raise UsageError(f"length {self.length} must be 1 token or more")
        # plans hold plain numbers, whatever a caller computes with
        for name, plain in (("ratio", float), ("budget", int), ("length", int)):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else plain(value))


def plan_from_profile(profile: Profile, target: Target) -> Plan:
    """The static plan of a profile at `target`: interpolated lookup, one global exact rounding.

    Raises:
        UsageError: the target is below the protected entries or above the length.
    """
    metadata = profile.metadata
    length = target.length or metadata.length
    heads = metadata.shape[0] * metadata.shape[1]
    floor = max(metadata.floor, 1)
    total = total_entries(target, length, heads)
    if total < floor * heads:
        raise UsageError(
            f"{total / heads:g} entries per kv head is below the {floor} that are always kept "
            f"(sinks, window, minimum share): keep more, or calibrate with a smaller window"
        )
    if total >= length * heads:
        raise UsageError(
            f"{total / heads:g} entries per kv head is all of a {length}-token prompt: nothing would be evicted; "
            f"lower the budget or give the --length of your prompts"
        )
    ratios = profile.local_ratios(1 - total / (length * heads) if target.ratio is None else target.ratio)
    budgets = round_ratios(ratios, length, total, floor)
    settings = {"ratio": target.ratio, "budget": target.budget, **metadata.provenance.settings}
    return Plan(
        model=metadata.model,
        length=length,
        scaling="proportional" if target.ratio is not None else "fixed",
        floor=floor,
        prefill=phase_of(budgets, metadata.layers, metadata.model.layers, metadata.policy),
        total=int(budgets.sum()),
        provenance=provenance(
            metadata.provenance.method, metadata.provenance.seed, metadata.provenance.data_sha256, settings
        ),
    )


def round_ratios(ratios: NDArray[np.float64], length: int, total: int, floor: int) -> NDArray[np.int64]:
    """Integer budgets [L, Hkv] that sum to `total`, from local eviction ratios [L, Hkv]; each in [floor, length]."""
    budgets: NDArray[np.int64] = water_fill((1.0 - ratios) * length, total, floor, length)
    return budgets


def phase_of(budgets: NDArray[np.int64], layers: tuple[int, ...], model_layers: int, policy: PolicySpec) -> PhasePlan:
    """A phase with one policy: row i of `budgets` is model layer `layers[i]`, other layers keep everything."""
    rows = dict(zip(layers, budgets.tolist(), strict=True))
    return PhasePlan(
        layers=tuple(
            LayerPlan(policy=policy, budget=tuple(rows[index])) if index in rows else None
            for index in range(model_layers)
        )
    )


def total_entries(target: Target, length: int, heads: int) -> int:
    """Entries of `heads` kv heads together at `target`, for prompts of `length` tokens."""
    if target.budget is not None:
        return target.budget * heads
    return int(round_half_up((1 - float(target.ratio or 0)) * length * heads))
