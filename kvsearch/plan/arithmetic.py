"""Budgets of a plan for a prompt, plans scaled to another size, and differences of two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.fields import Scalar
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.core.naming import require_known
from kvsearch.plan.origin import record_change
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.schema import NO_CARRY, PHASES, STATIC, WHOLE, Carry, LayerPlan, Phase, PhasePlan, Plan, PolicySpec
from kvsearch.plan.size import LAID_OUT, ONE_SIZE, Size

Scaling = Literal["fixed", "proportional"]


def compute_budgets(plan: Plan, phase: Phase, length: int, clip: bool = True) -> Ints:
    """Return the integer budgets [planned layers, Hkv] for a prompt of `length` tokens.

    "fixed" budgets are as planned, in the prefill phase clipped to `length`, unless `clip` is off; what that frees is
    not handed to other heads. "proportional" ones are budget * length / plan.length, water-filled and rounded over all
    layers at once to the phase's total times length / plan.length, halves up; bounds are the floor, at least one entry,
    and in the prefill phase `length`. Where a very short prompt puts that total out of reach, the nearest possible one
    is used.

    Raises:
        UsageError: `length` is below 1 or the plan has no such phase.

    Examples:
        >>> from kvsearch.plan import load_plan
        >>> plan = load_plan("plan.json")  # 64 entries in each of 4 kv heads of 6 layers
        >>> compute_budgets(plan, "prefill", length=1000)[0].tolist()
        [64, 64, 64, 64]
        >>> compute_budgets(plan, "prefill", length=40)[0].tolist()  # no head keeps more than the prompt has
        [40, 40, 40, 40]
    """
    if length < 1:
        raise UsageError(f"a prompt has at least one token, got a length of {length}")
    wanted = plan.phase(phase).table
    if plan.scaling == "fixed" or plan.length is None:
        return np.minimum(wanted, length) if phase == "prefill" and clip else wanted
    if length == plan.length:
        return wanted
    low = max(plan.floor, 1)
    total = _scale_total(int(wanted.sum()), length, plan.length)
    if phase == "decode":  # the sequence will outgrow its prompt
        return water_fill(wanted, max(total, low * wanted.size), low)
    low = min(low, length)
    return water_fill(wanted, min(max(total, low * wanted.size), length * wanted.size), low, length)


def scale(
    plan: Plan,
    *,
    total: int | None = None,
    budget: int | None = None,
    ratio: float | None = None,
    length: int | None = None,
) -> Plan:
    """Keep the shape of a plan at another size: all budgets times one factor, within bounds, to an exact total.

    Give one size: a `total` of entries, a mean `budget` in entries per kv head, or the `ratio` of a prompt to evict. It
    is the size of the phase whose sum `plan.total` is. A decode phase next to prefill is scaled by the same factor: its
    total times total / plan.total, halves up. Entries make the plan "fixed", a ratio makes it "proportional".

    Bounds are the floor, at least one entry, and the length. The length does not bound "fixed" decode budgets, nor
    keep heads of a "fixed" plan that are above its own length from staying so.

    Args:
        plan: what to scale.
        total: entries of all planned layers and heads together.
        budget: entries per kv head.
        ratio: share to evict of a prompt of `length` tokens, in (0, 1).
        length: prompt length in tokens that the new budgets are for; default: that of `plan`, or LAID_OUT for a ratio.

    Raises:
        UsageError: no size or several, or a size that the bounds make impossible.

    Examples:
        >>> from kvsearch.plan import load_plan
        >>> plan = load_plan("plan.json")  # 64 entries in each of 4 kv heads of 6 layers
        >>> scale(plan, budget=32).total
        768
        >>> scale(plan, ratio=0.9, length=1000).budgets("prefill")[0]
        (100, 100, 100, 100)
    """
    at = plan.length if length is None else length
    if ratio is not None and at is None:
        at = length = LAID_OUT
    scaling: Scaling = "fixed" if ratio is None else "proportional"
    wanted = _resolve_total(plan.heads, total, budget, ratio, at)
    scaled: dict[str, PhasePlan] = {}
    for name, phase in plan.phases.items():
        whole = _scale_phase(
            plan, name, _scale_total(phase.total, wanted, plan.total), _find_caps(plan, name, length, scaling)
        )
        scaled[name] = _add_carry_to_phase(whole, phase.carries, at)
    sizes = {"total": total, "budget": budget, "ratio": ratio, "length": at}
    size = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
    origin = record_change(plan.provenance, f"scaled to {size}: plan {hash_json(plan)}")
    total = next(iter(scaled.values())).total
    return Plan(**{**dict(plan), **scaled, "total": total, "length": at, "scaling": scaling, "provenance": origin})


def _resolve_total(heads: int, total: int | None, budget: int | None, ratio: float | None, length: int | None) -> int:
    """Return the total of `heads` kv heads that one of three sizes stands for."""
    if total is not None:
        if budget is not None or ratio is not None:
            raise UsageError(ONE_SIZE)
        return total
    size = Size(budget, ratio, length)
    return size.total(length or 0, heads)


def _find_caps(plan: Plan, name: Phase, length: int | None, scaling: Scaling) -> Ints:
    """Return the most a head may be scaled to, [planned layers, Hkv]; without `length` that of the plan holds."""
    budgets = plan.phase(name).table
    known = plan.length if length is None else length
    if known is None or (name == "decode" and scaling == "fixed"):
        return np.full_like(budgets, MOST_ENTRIES)
    if length is None and plan.scaling == scaling == "fixed":
        return np.maximum(budgets, known)
    return np.full_like(budgets, known)


def _scale_phase(plan: Plan, name: Phase, total: int, caps: Ints) -> PhasePlan:
    low = max(plan.floor, 1)
    heads = caps.size
    if total < low * heads:
        raise UsageError(
            f"a {name} total of {total} is below the {low * heads} entries that {heads} kv heads always keep, {low} "
            f"each (the plan's floor): keep more"
        )
    if total > caps.sum():
        raise UsageError(
            f"a {name} total of {total} is above the {caps.sum()} entries that prompts of this length have for "
            f"{heads} kv heads: keep less, or give a longer --length"
        )
    phase = plan.phase(name)
    return PhasePlan.of(phase.policies, water_fill(phase.table, total, low, caps))


def add_carry(plan: Plan, carry: Carry) -> Plan:
    """Return a plan whose kept entries carry evicted ones as `carry` says, in every layer that evicts from a prompt.

    Raises:
        UsageError: there is no such carry, the plan has no prefill phase, or it keeps prompts whole.
    """
    require_known("carries", carry, get_args(Carry))
    phase = plan.phase("prefill")
    prefill = _add_carry_to_phase(phase, [carry] * len(phase.layers), plan.length)
    origin = record_change(plan.provenance, f"carry {carry}: plan {hash_json(plan)}")
    changed_plan = Plan(**{**dict(plan), "prefill": prefill, "provenance": origin})
    if carry != NO_CARRY and not changed_plan.carries:
        raise UsageError("the plan keeps prompts whole, so nothing leaves that its entries could carry")
    return changed_plan


def even_out_budgets(plan: Plan) -> Plan:
    """Give all kv heads the same budget under the policies of a plan; the total of every phase stays.

    Entries carry nothing, and budgets are the same at every prompt: no allocation shares them out there.
    """
    phases: dict[str, PhasePlan] = {
        name: PhasePlan.of(phase.policies, water_fill(np.ones_like(phase.table), phase.total))
        for name, phase in plan.phases.items()
    }
    origin = record_change(plan.provenance, f"even budgets: plan {hash_json(plan)}")
    return Plan(**{**dict(plan), **phases, "allocation": PolicySpec(name=STATIC), "provenance": origin})


def _add_carry_to_phase(phase: PhasePlan, carries: Sequence[Carry], longest: int | None) -> PhasePlan:
    """Return a phase with what its layers carry, nothing where nothing leaves a prompt of `longest` tokens."""

    def leaves(layer: LayerPlan) -> bool:
        return layer.policy.name != WHOLE and (longest is None or min(layer.budget) < longest)

    layers = (
        None if layer is None else layer.model_copy(update={"carry": carry if leaves(layer) else NO_CARRY})
        for layer, carry in zip(phase.layers, carries, strict=True)
    )
    return PhasePlan(layers=tuple(layers))


def _scale_total(total: int, numerator: int, denominator: int) -> int:
    """Round total * numerator / denominator, halves up, in whole numbers."""
    return (2 * total * numerator + denominator) // (2 * denominator)


_MODEL = ("model_type", "config_sha256", "weights_sha256", "head_dim")


class BudgetChange(NamedTuple):
    """A kv head's budget in two plans, in entries; None where its layer keeps the full cache or the phase is absent."""

    phase: Phase
    layer: int
    head: int
    before: int | None
    after: int | None


class SettingChange(NamedTuple):
    """Something else that differs between two plans; None where a plan does not state it.

    `name` is a field of the plan ("length", "model.weights_sha256"), "allocation" or "policy", or a parameter of these
    ("allocation.layers", "policy.window"), or "carry". `phase` is set for what belongs to a phase: its "total", and
    policies and what entries carry, which are stated once for all `layers` with the same change.
    """

    name: str
    before: Scalar | None
    after: Scalar | None
    phase: Phase | None = None
    layers: tuple[int, ...] = ()


def compare_plans(a: Plan, b: Plan) -> tuple[list[SettingChange], list[BudgetChange]]:
    """Compare two plans: settings of the whole, then of each phase (prefill first), and budgets by layer and kv head.

    Where the plans come from is not compared.

    Plans of models that differ in more than their name but have the same layers and kv heads can be compared; that
    they do is one of the differences.

    Raises:
        IncompatibleError: the plans' models differ in layers or kv heads.

    Examples:
        >>> from kvsearch.plan import load_plan
        >>> plan = load_plan("plan.json")
        >>> settings, budgets = compare_plans(plan, scale(plan, budget=32))
        >>> [change.name for change in settings], len(budgets)
        (['total'], 24)
        >>> budgets[0]
        BudgetChange(phase='prefill', layer=0, head=0, before=64, after=32)
    """
    if (a.model.layers, a.model.kv_heads) != (b.model.layers, b.model.kv_heads):
        raise IncompatibleError(
            f"cannot compare plans of {a.model.short()} and {b.model.short()}: other layers or heads"
        )
    settings = list(_list_changes(_list_settings(a), _list_settings(b)))
    budgets = list[BudgetChange]()
    unplanned = (None,) * a.model.kv_heads
    for phase in PHASES["both"]:
        parts = [plan.phases.get(phase) for plan in (a, b)]
        totals = [{} if part is None else {"total": part.total} for part in parts]
        settings += _list_changes(totals[0], totals[1], phase)
        pairs = zip(*((None,) * a.model.layers if part is None else part.layers for part in parts), strict=True)
        changed_in: dict[SettingChange, list[int]] = {}
        for layer, pair in enumerate(pairs):
            settings_of = [{} if planned is None else _list_layer_settings(planned) for planned in pair]
            for change in _list_changes(settings_of[0], settings_of[1], phase):
                changed_in.setdefault(change, []).append(layer)
            heads = zip(*(unplanned if planned is None else planned.budget for planned in pair), strict=True)
            budgets += [
                BudgetChange(phase, layer, head, *both) for head, both in enumerate(heads) if len(set(both)) > 1
            ]
        settings += [change._replace(layers=tuple(layers)) for change, layers in changed_in.items()]
    return settings, budgets


def _list_settings(plan: Plan) -> dict[str, Scalar | None]:
    model = {f"model.{field}": getattr(plan.model, field) for field in _MODEL}
    settings = {"scaling": plan.scaling, "length": plan.length, "floor": plan.floor}
    return {**model, **settings, **_name_policy("allocation", plan.allocation)}


def _list_changes(
    before: Mapping[str, Scalar | None], after: Mapping[str, Scalar | None], phase: Phase | None = None
) -> Iterator[SettingChange]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield SettingChange(name, before.get(name), after.get(name), phase)


def _list_layer_settings(planned: LayerPlan) -> dict[str, Scalar | None]:
    carry = {} if planned.carry == NO_CARRY else {"carry": planned.carry}
    return {**_name_policy("policy", planned.policy), **carry}


def _name_policy(what: str, spec: PolicySpec) -> dict[str, Scalar]:
    return {what: spec.name, **{f"{what}.{key}": value for key, value in spec.params.items()}}
