"""Plans made without calibration: one policy, even budgets or a pyramid of them, in the phases one wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.budgets.uniform import Uniform
from kvsearch.config.options import parse_setting
from kvsearch.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.plan import Phase, Plan, Size
from kvsearch.plan.contexts import ContextRecord
from kvsearch.plan.limits import MOST_ENTRIES
from kvsearch.plan.origin import provenance
from kvsearch.policies import Policy
from kvsearch.strategies.build import Chosen, build_plan

if TYPE_CHECKING:
    from kvsearch.budgets.dynamic import Allocation
    from kvsearch.models.loading import LoadedModel


def parse_allocation(text: str) -> Allocation | None:
    """Read an allocation from NAME or NAME:option=value,option=value; None is "static".

    Raises:
        UsageError: the text is not of that form, or there is no such allocation, option or value.
    """
    name, colon, options = text.partition(":")
    items = options.split(",") if colon else []
    if not name.strip() or not all(all(part.strip() for part in item.partition("=")) for item in items):
        raise UsageError(f"allocation {text!r} is not of the form NAME or NAME:option=value,option=value")
    pairs = [parse_setting(item) for item in items]
    params = dict(pairs)
    if len(params) < len(pairs):
        raise UsageError(f"allocation {text!r} states an option twice: state each once")
    return create_allocation(name.strip(), params)


def check_request(policy: Policy, size: Size, allocation: Allocation | None = None) -> None:
    """Find what is wrong with a request before a model is loaded.

    Raises:
        UsageError: a ratio without a length, a size below what the policy protects or that evicts nothing, or an
            allocation that cannot share the policy's entries.
    """
    if size.ratio is not None and size.length is None:
        raise UsageError("a ratio needs the --length of a prompt, in tokens, that the integer budgets are for")
    least, given = policy.floor, size.mean(size.length or 0)
    if given < least:
        raise UsageError(
            f"{given:g} entries per kv head is below the {least} that {policy.name} always keeps "
            f"({policy.sink_count} sinks, {policy.recent_count} recent): keep more, or lower them with --set"
        )
    if policy.exempt(int(given), 1):
        raise UsageError(
            f"{policy.name} never evicts heads with budgets of {given:g} entries on average: see its description"
        )
    if size.length is not None and given >= size.length:
        raise UsageError(f"{given:g} entries per kv head is all of a {size.length}-token prompt: lower the budget")
    if allocation is not None:
        allocation.check(policy, "--allocation")


def direct_plan(
    loaded: LoadedModel,
    policy: Policy,
    size: Size,
    phases: Sequence[Phase],
    allocator: Uniform | Pyramid,
    allocation: Allocation | None = None,
) -> Plan:
    """`policy` for every full-attention layer of a model, with budgets that need no measurement.

    With a ratio, budgets are for prompts of `size.length` tokens and scale with the prompt at hand. The total is
    exact: what is left by rounding goes to the first heads. `allocation` shares what the budgets add up to anew for
    every prompt.

    Raises:
        UsageError: see `check_request`.
    """
    check_request(policy, size, allocation)
    shape = describe(loaded.model)
    heads = (len(shape.full_layers), shape.kv_heads)
    total = size.total(size.length or 0, heads[0] * heads[1])
    floors, caps = np.full(heads, policy.floor), np.full(heads, size.length or MOST_ENTRIES)
    budgets = allocator.allocate(np.zeros(heads), total, floors, caps)
    chosen = Chosen((policy.spec,) * heads[0], budgets)
    settings = {"ratio": size.ratio, "budget": size.budget, **asdict(allocator)}
    return build_plan(
        loaded.fingerprint,
        shape.full_layers,
        dict.fromkeys(phases, chosen),
        provenance(allocator.name, 0, None, settings, ContextRecord()),
        policy.floor,
        size.scaling,
        size.length,
        allocation,
    )
