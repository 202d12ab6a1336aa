"""What a plan is compared with: the full cache, and simpler methods that hold exactly as many entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.naming import suggest
from kvsearch.plan.rounding import largest_remainder
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.random import RandomEviction
from kvsearch.runtime import Program
from kvsearch.runtime.program import PhaseProgram

Total = Callable[[int], int]
BASELINES = ("uniform", "snapkv", "streaming", "random")
SNAPKV_SINKS = 4


def full_cache(model: Any) -> Program:
    """Nothing is evicted."""
    return Program.uniform(model, create_policy("full"), lambda length: length)


def equal_uniform(model: Any, policy: Policy, total: Total | None, decode: Total | None = None) -> Program:
    """`policy` with `total(length)` entries spread evenly over all full-attention layers and kv heads, exactly.

    `total` is for the prefill phase, `decode` for the decode phase; None leaves that phase out.
    """
    shape = describe(model)
    heads = (len(shape.full_layers), shape.kv_heads)
    policies = dict.fromkeys(shape.full_layers, policy)

    def phase(entries: Total, most: Callable[[int], int | None]) -> PhaseProgram:
        def table(length: int) -> NDArray[np.int64]:
            wanted = entries(length)
            return largest_remainder(np.full(heads, wanted / (heads[0] * heads[1])), wanted, 0, most(length))

        return PhaseProgram(policies, table)

    return Program(
        None if total is None else phase(total, lambda length: length),
        None if decode is None else phase(decode, lambda _: None),
    )


def baselines(model: Any, plan: Program, names: tuple[str, ...] = BASELINES) -> dict[str, Program]:
    """The named baselines, in the phases of the plan, each with the entries it holds at every prompt length.

    Full-attention layers outside the plan hold their full cache, which counts.

    "uniform" is the plan's own policy with even budgets; "snapkv" and "streaming" are those methods; "random" evicts at
    random. A baseline that equals another one is left out.
    """
    shape = describe(model)

    def total(phase: PhaseProgram | None) -> Total | None:
        if phase is None:
            return None
        unplanned = (len(shape.full_layers) - len(phase.policies)) * shape.kv_heads
        return lambda length: phase.entries(length) + unplanned * length

    policies = set(plan.policies)
    made: dict[str, Policy] = {}
    for name in names:
        if name == "uniform" and len(policies) > 1:
            continue  # a plan of several policies has no uniform counterpart of its own
        policy = next(iter(policies)) if name == "uniform" else _policy(name)
        if policy not in made.values():
            made[name] = policy
    return {
        name: equal_uniform(model, policy, total(plan.prefill), total(plan.decode)) for name, policy in made.items()
    }


def _policy(name: str) -> Policy:
    if name == "random":
        return RandomEviction()
    if name == "snapkv":
        return create_policy("snapkv", {"sinks": SNAPKV_SINKS})
    if name == "streaming":
        return create_policy("streaming")
    raise UsageError(f"unknown baseline {name!r}{suggest(name, list(BASELINES))}")
