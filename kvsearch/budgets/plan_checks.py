"""What can be wrong with the policies and budgets of a plan: found before a model is loaded, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvsearch.budgets.dynamic import Allocation, create_allocation
from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import list_problems
from kvsearch.plan.yaml import layer_ranges
from kvsearch.policies.base import Policy
from kvsearch.policies.registry import policy_of

if TYPE_CHECKING:
    from kvsearch.plan import LayerPlan, Plan, PolicySpec

MOST_HEADS = 8  # that a message names


def check_plan(plan: Plan, name: str) -> None:
    """Find what is wrong with the policies and budgets of a plan; `name` is what to call it, usually its file.

    Raises:
        UsageError: unknown policies, allocations or parameters, values out of range, budgets below the protected
            entries, policies whose entries the allocation cannot share; all of it in one message.
        EnvironmentFault: a policy comes from a package that cannot be imported.
    """
    problems = [
        problem
        for phase in ("prefill", "decode")
        if (part := getattr(plan, phase)) is not None
        for problem in _phase_problems(phase, part.layers, plan.length)
    ]
    problems += _allocation_problems(plan)
    if problems:
        raise UsageError(list_problems(problems, name))


def _allocation_problems(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with the allocation, and in which phases and layers it does not suit the policy."""
    try:
        allocation = create_allocation(plan.allocation.name, plan.allocation.params)
    except UsageError as error:
        yield f"allocation: {error}"
        return
    if allocation is None:
        return
    for phase in ("prefill", "decode"):
        told: list[PolicySpec] = []
        for index, layer in enumerate(getattr(getattr(plan, phase), "layers", ())):
            if layer is None or layer.policy in told:
                continue
            told.append(layer.policy)
            yield from _sharing_problem(allocation, layer.policy, f"{phase}.layers.{index}")


def _sharing_problem(allocation: Allocation, spec: PolicySpec, place: str) -> Iterator[str]:
    try:
        policy = policy_of(spec)
    except UsageError:
        return  # told already
    try:
        allocation.check(policy, place)
    except UsageError as error:
        yield str(error)


def _phase_problems(phase: str, layers: Iterable[LayerPlan | None], length: int | None) -> Iterator[str]:
    planned = {index: layer for index, layer in enumerate(layers) if layer is not None}
    unusable: dict[str, list[int]] = {}
    small = []
    for index, layer in planned.items():
        try:
            policy = policy_of(layer.policy)
            if phase == "decode" and (problem := policy.no_decode_rule()) is not None:
                raise UsageError(problem)
        except UsageError as error:
            unusable.setdefault(str(error), []).append(index)
            continue
        problem = _budget_problem(policy, layer.budget, length)
        small += [f"{phase}.layers.{index}.budget: {problem}"] if problem else []
    for what, where in unusable.items():
        others = f" (and in layers {', '.join(layer_ranges(where[1:]))})" if where[1:] else ""
        yield f"{phase}.layers.{where[0]}.policy{others}: {what}"
    yield from small


def _budget_problem(policy: Policy, budget: tuple[int, ...], length: int | None) -> str | None:
    """Say which heads have fewer entries than are always kept; heads that keep everything anyway are left out."""
    longest = length or max(budget) + 1
    enough = policy.floor if length is None else min(policy.floor, length)  # of the prompt the budgets are for
    low = [head for head, few in enumerate(budget) if few < enough and not policy.exempt(few, longest)]
    if not low:
        return None
    more = f" and {len(low) - MOST_HEADS} more" if len(low) > MOST_HEADS else ""
    shown = ", ".join(f"{budget[head]} at head {head}" for head in low[:MOST_HEADS]) + more
    lower = " or ".join(policy.protecting)
    return (
        f"is {shown}, below the {policy.floor} entries that {policy.name} always keeps ({policy.sink_count} sinks and "
        f"{policy.recent_count} recent): raise it to {policy.floor}{f', or lower {lower}' if lower else ''}"
    )
