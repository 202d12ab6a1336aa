"""Checks of a plan's policies and budgets that need neither a model nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import list_problems
from kvsearch.plan.schema import NO_CARRY
from kvsearch.plan.yaml import format_layer_ranges
from kvsearch.policies.base import Policy
from kvsearch.policies.registry import build_policy

if TYPE_CHECKING:
    from kvsearch.plan import Plan
    from kvsearch.plan.schema import LayerPlan

MAX_NAMED_HEADS = 8  # that a message names


def check_plan(plan: Plan, name: str) -> None:
    """Find what is wrong with the policies and budgets of a plan; `name` is what to call it, usually its file.

    Raises:
        UsageError: unknown policies, allocations or parameters, values out of range, budgets below the protected
            entries, policies whose entries the allocation cannot share; all of it in one message.
        EnvironmentFault: a policy comes from a package that cannot be imported.
    """
    problems: list[str] = []
    sharing: list[str] = []
    allocation = None
    try:
        allocation = create_allocation(plan.allocation.name, plan.allocation.params)
    except UsageError as error:
        sharing.append(f"allocation: {error}")
    for phase, part in plan.phases.items():
        unusable: dict[str, list[int]] = {}
        small: list[str] = []
        shared: set[tuple[Policy, bool]] = set()
        for index, layer in enumerate(part.layers):
            if layer is None:
                continue
            try:
                policy = build_policy(layer.policy)
                if phase == "decode" and (problem := policy.no_decode_rule()) is not None:
                    raise UsageError(problem)
            except UsageError as error:
                unusable.setdefault(str(error), []).append(index)
                continue
            if problem := _find_budget_problem(policy, layer.budget, plan.length):
                small.append(f"{phase}.layers.{index}.budget: {problem}")
            carries = layer.carry != NO_CARRY
            decode = plan.decode and plan.decode.layers[index]
            if carries and (
                problem := _find_carry_problem(policy, build_policy(decode.policy) if decode else None, layer)
            ):
                small.append(f"{phase}.layers.{index}.carry: {problem}")
            if allocation is not None and (policy, carries) not in shared:
                shared.add((policy, carries))
                try:
                    allocation.check(policy, f"{phase}.layers.{index}", carries)
                except UsageError as error:
                    sharing.append(str(error))
        for problem, (first, *others) in unusable.items():
            more = f" (and in layers {', '.join(format_layer_ranges(others))})" if others else ""
            problems.append(f"{phase}.layers.{first}.policy{more}: {problem}")
        problems += small
    if problems + sharing:
        raise UsageError(list_problems(problems + sharing, name))


def _find_carry_problem(policy: Policy, decode: Policy | None, layer: LayerPlan) -> str | None:
    """Say why entries that `policy` keeps of a prompt cannot carry what leaves it."""
    merging = next((used.name for used in (policy, decode) if used is not None and used.merges), None)
    if merging is not None:
        return f"is {layer.carry}, but {merging} merges what leaves into what stays itself: leave carry out"
    longest = 2 * max(layer.budget)
    if all(policy.keeps_all(budget, longest) for budget in layer.budget):
        return f"is {layer.carry}, but {policy.name} keeps everything here, so nothing leaves: leave carry out"
    return None


def _find_budget_problem(policy: Policy, budget: tuple[int, ...], length: int | None) -> str | None:
    """Say which heads have fewer entries than are always kept; heads that keep everything anyway are left out."""
    longest = length or max(budget) + 1
    enough = policy.least if length is None else min(policy.least, length)  # of the prompt the budgets are for
    low = [head for head, few in enumerate(budget) if few < enough and not policy.keeps_all(few, longest)]
    if not low:
        return None
    more = f" and {len(low) - MAX_NAMED_HEADS} more" if len(low) > MAX_NAMED_HEADS else ""
    shown = ", ".join(f"{budget[head]} at head {head}" for head in low[:MAX_NAMED_HEADS]) + more
    lower = " or ".join(policy.protecting)
    return (
        f"is {shown}, below the {policy.least} entries that {policy.name} always keeps ({policy.sink_count} sinks and "
        f"{policy.recent_count} recent): raise it to {policy.least}{f', or lower {lower}' if lower else ''}"
    )
