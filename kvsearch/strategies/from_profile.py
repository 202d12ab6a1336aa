"""From a profile to a plan: look up local ratios, then round them to integer budgets with an exact total."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import UsageError
from kvsearch.plan import Plan, Profile, Size
from kvsearch.plan.origin import provenance
from kvsearch.plan.rounding import water_fill
from kvsearch.strategies.build import Chosen, build_plan


def plan_from_profile(profile: Profile, size: Size) -> Plan:
    """Return the static plan of a profile at `size`: interpolated lookup, one global exact rounding.

    Raises:
        UsageError: the size is below the protected entries or above the length.
    """
    metadata = profile.metadata
    _, total, length = pool = size.pool(metadata)
    heads = metadata.shape[0] * metadata.shape[1]
    floor = max(metadata.floor, 1)
    if total < floor * heads:
        raise UsageError(
            f"{pool.mean:g} entries per kv head is below the {floor} that are always kept "
            f"(sinks, recent entries, minimum share): keep more, or calibrate with a smaller --set protect or window"
        )
    if total >= length * heads:
        raise UsageError(
            f"{pool.mean:g} entries per kv head is all of a {length}-token prompt: nothing would be evicted; "
            f"lower the budget or give the --length of your prompts"
        )
    ratios = profile.local_ratios(1 - total / (length * heads) if size.ratio is None else size.ratio)
    budgets = round_ratios(ratios, length, total, floor)
    origin = metadata.provenance
    settings = {"ratio": size.ratio, "budget": size.budget, **origin.settings}
    return build_plan(
        metadata.model,
        metadata.layers,
        {"prefill": Chosen((metadata.policy,) * len(budgets), budgets)},
        provenance(origin.method, origin.seed, origin.data_sha256, settings, origin.contexts),
        floor,
        size.scaling,
        length,
    )


def round_ratios(ratios: NDArray[np.float64], length: int, total: int, floor: int) -> NDArray[np.int64]:
    """Round local eviction ratios [L, Hkv] to integer budgets [L, Hkv] in [floor, length] that sum to `total`."""
    budgets: NDArray[np.int64] = water_fill((1.0 - ratios) * length, total, floor, length)
    return budgets
