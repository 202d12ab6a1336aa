"""From policies and budgets of layers to a plan, and from the table of a profile to its budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.core.errors import UsageError
from kvsearch.plan import ModelFingerprint, Phase, PhasePlan, Plan, PolicySpec, Profile, Size
from kvsearch.plan.origin import Provenance, make_provenance
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import STATIC
from kvsearch.plan.size import Pool


class PhaseChoice(NamedTuple):
    """The choice of one phase: a policy and budgets for every planned layer, ascending."""

    policies: tuple[PolicySpec, ...]
    budgets: NDArray[np.int64]  # [L, Hkv]


def build_plan(
    model: ModelFingerprint,
    layers: Sequence[int],
    chosen: Mapping[Phase, PhaseChoice],
    origin: Provenance,
    floor: int,
    scaling: Literal["fixed", "proportional"] = "fixed",
    length: int | None = None,
    allocation: PolicySpec | None = None,
) -> Plan:
    """Build a plan from the `chosen` policies and budgets of model layers `layers`; other layers keep everything.

    `allocation` is the name and options of one that shares the total anew for every prompt; None: it is static.
    """
    phases = {}
    for phase, part in chosen.items():
        policies = dict(zip(layers, part.policies, strict=True))
        phases[phase] = PhasePlan.of([policies.get(layer) for layer in range(model.layers)], part.budgets)
    return Plan(
        model=model,
        length=length,
        scaling=scaling,
        allocation=allocation or PolicySpec(name=STATIC),
        floor=floor,
        prefill=phases.get("prefill"),
        decode=phases.get("decode"),
        total=next(iter(phases.values())).total,
        provenance=origin,
    )


def plan_from_profile(profile: Profile, size: Size) -> Plan:
    """Make the static plan of a profile at `size`: interpolated lookup, one global exact rounding.

    Raises:
        UsageError: the size is below the protected entries or above the length.
    """
    metadata = profile.metadata
    _, total, length = pool = size.pool(metadata)
    heads = metadata.shape[0] * metadata.shape[1]
    floor = max(metadata.floor, 1)
    check_pool(pool, floor)
    ratios = profile.local_ratios(1 - total / (length * heads) if size.ratio is None else size.ratio)
    budgets = round_ratios(ratios, length, total, floor)
    return make_profile_plan(profile, {"prefill": PhaseChoice((metadata.policy,) * len(budgets), budgets)}, size, floor)


def make_profile_plan(
    profile: Profile,
    chosen: Mapping[Phase, PhaseChoice],
    size: Size,
    floor: int,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Make the plan of the choices for the layers of a profile; `settings` join the calibration's."""
    metadata = profile.metadata
    origin = metadata.provenance
    joined = {**origin.settings, "ratio": size.ratio, "budget": size.budget, **(settings or {})}
    return build_plan(
        metadata.model,
        metadata.layers,
        chosen,
        make_provenance(method or origin.method, origin.seed, origin.data_sha256, joined, origin.contexts),
        floor,
        size.scaling,
        size.length or metadata.length,
    )


def check_pool(pool: Pool, floor: int = 0) -> None:
    """Raise UsageError if the size is below the floor of every head, or keeps all of a prompt."""
    kept = "are always kept (sinks, recent entries, minimum share)"
    check_mean(pool.mean, floor, pool.length, kept, "calibrate with a smaller --set protect or window")


def check_mean(mean: float, floor: int, length: int | None, kept: str, remedy: str) -> None:
    """Raise UsageError if the mean budget is below `floor`, described by `kept`, or is all of a prompt."""
    if mean < floor:
        raise UsageError(f"{mean:g} entries per kv head is below the {floor} that {kept}: keep more, or {remedy}")
    if length is not None and mean >= length:
        raise UsageError(
            f"{mean:g} entries per kv head is all of a {length}-token prompt: nothing would be evicted; lower the "
            "budget or give the --length of your prompts"
        )


def round_ratios(ratios: NDArray[np.float64], length: int, total: int, floor: int) -> NDArray[np.int64]:
    """Round local eviction ratios [L, Hkv] to integer budgets [L, Hkv] in [floor, length] that sum to `total`."""
    budgets: NDArray[np.int64] = water_fill((1.0 - ratios) * length, total, floor, length)
    return budgets
