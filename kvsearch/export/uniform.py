"""Plans made without calibration: one policy and even budgets, in the phases one wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvsearch.calibrate.provenance import provenance
from kvsearch.errors import UsageError
from kvsearch.export.build import Target, phase_of, total_entries
from kvsearch.models.architecture import describe
from kvsearch.plan import Phase, Plan, PolicySpec
from kvsearch.plan.rounding import largest_remainder
from kvsearch.policies import Policy

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel

PHASES: dict[str, tuple[Phase, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "both": ("prefill", "decode"),
}


def check_request(policy: Policy, target: Target) -> None:
    """Find what is wrong with a request before a model is loaded.

    Raises:
        UsageError: a ratio without a length, or a target below what the policy protects or that evicts nothing.
    """
    if target.ratio is not None and target.length is None:
        raise UsageError("a ratio needs the --length of a prompt, in tokens, that the integer budgets are for")
    least, given = _floor(policy), _mean(target)
    if given < least:
        raise UsageError(
            f"{given:g} entries per kv head is below the {least} that {policy.name} always keeps "
            f"({policy.sink_count} sinks, {policy.window_count} recent): keep more, or lower them with --set"
        )
    if bool(policy.exempt(torch.tensor([int(given)]), torch.tensor([1]))):
        raise UsageError(
            f"{policy.name} never evicts heads with even budgets of {given:g} entries: see its description"
        )
    if target.length is not None and given >= target.length:
        raise UsageError(f"{given:g} entries per kv head is all of a {target.length}-token prompt: lower the budget")


def uniform_plan(loaded: LoadedModel, policy: Policy, target: Target, phases: Sequence[Phase]) -> Plan:
    """`policy` with the same budget for every full-attention layer and kv head of a model.

    With a ratio, budgets are for prompts of `target.length` tokens and scale with the prompt at hand; a total that does
    not divide gives the first heads one entry more.

    Raises:
        UsageError: see `check_request`.
    """
    check_request(policy, target)
    shape = describe(loaded.model)
    heads = (len(shape.full_layers), shape.kv_heads)
    total = total_entries(target, target.length or 0, heads[0] * heads[1])
    budgets = largest_remainder(np.full(heads, total / (heads[0] * heads[1])), total, _floor(policy))
    spec = PolicySpec(name=policy.name, params=policy.parameters())
    phase = phase_of(budgets, shape.full_layers, shape.layers, spec)
    return Plan(
        model=loaded.fingerprint,
        length=target.length,
        scaling="proportional" if target.ratio is not None else "fixed",
        floor=_floor(policy),
        prefill=phase if "prefill" in phases else None,
        decode=phase if "decode" in phases else None,
        total=total,
        provenance=provenance("uniform", 0, None, {"ratio": target.ratio, "budget": target.budget}),
    )


def _floor(policy: Policy) -> int:
    return max(1, policy.sink_count + policy.window_count)


def _mean(target: Target) -> float:
    """Entries per kv head."""
    if target.budget is not None:
        return target.budget
    return (1 - float(target.ratio or 0)) * (target.length or 0)
