"""What differs between two plans: budgets head by head, and everything else that changes what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvsearch.errors import IncompatibleError
from kvsearch.plan.fields import Scalar
from kvsearch.plan.schema import PHASES, AllocationSpec, LayerPlan, Phase, PhasePlan, Plan, PolicySpec

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
    ("allocation.layers", "policy.window"). `phase` is set for what belongs to a phase: its "total", and policies, which
    are stated once for all `layers` with the same change.
    """

    name: str
    before: Scalar | None
    after: Scalar | None
    phase: Phase | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlanDiff:
    """All differences of two plans; false if there are none. Where the plans come from is not compared."""

    settings: tuple[SettingChange, ...] = ()
    budgets: tuple[BudgetChange, ...] = ()

    def __bool__(self) -> bool:
        """Whether the plans differ."""
        return bool(self.settings or self.budgets)


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Compare two plans: settings of the whole, then of each phase (prefill first), and budgets by layer and kv head.

    Plans of models that differ in more than their name but have the same layers and kv heads can be compared; that
    they do is one of the differences.

    Raises:
        IncompatibleError: the plans' models differ in layers or kv heads.
    """
    if (a.model.layers, a.model.kv_heads) != (b.model.layers, b.model.kv_heads):
        raise IncompatibleError(
            f"cannot compare plans of {a.model.short()} and {b.model.short()}: other layers or heads"
        )
    settings = [SettingChange(*change) for change in _changes(_whole(a), _whole(b))]
    for phase in PHASES["both"]:
        settings += _phase_settings(_part(a, phase), _part(b, phase), phase, a.model.layers)
    return PlanDiff(
        tuple(settings), tuple(change for phase in PHASES["both"] for change in _budget_changes(a, b, phase))
    )


def _whole(plan: Plan) -> dict[str, Scalar | None]:
    model = {f"model.{field}": getattr(plan.model, field) for field in _MODEL}
    own = {"scaling": plan.scaling, "length": plan.length, "floor": plan.floor}
    return {**model, **own, **_named("allocation", plan.allocation)}


def _phase_settings(a: PhasePlan | None, b: PhasePlan | None, phase: Phase, layers: int) -> Iterator[SettingChange]:
    totals = [{"total": part.total if part else None} for part in (a, b)]
    for change in _changes(*totals):
        yield SettingChange(*change, phase)
    where: dict[tuple[str, Scalar | None, Scalar | None], list[int]] = {}
    for layer, (before, after) in enumerate(zip(_layers(a, layers), _layers(b, layers), strict=True)):
        for change in _changes(_policy(before), _policy(after)):
            where.setdefault(change, []).append(layer)
    for change, found in where.items():
        yield SettingChange(*change, phase, tuple(found))


def _budget_changes(a: Plan, b: Plan, phase: Phase) -> Iterator[BudgetChange]:
    nothing = (None,) * a.model.kv_heads
    pairs = zip(_layers(_part(a, phase), a.model.layers), _layers(_part(b, phase), b.model.layers), strict=True)
    for layer, (before, after) in enumerate(pairs):
        heads = zip(before.budget if before else nothing, after.budget if after else nothing, strict=True)
        for head, (old, new) in enumerate(heads):
            if old != new:
                yield BudgetChange(phase, layer, head, old, new)


def _changes(
    before: Mapping[str, Scalar | None], after: Mapping[str, Scalar | None]
) -> Iterator[tuple[str, Scalar | None, Scalar | None]]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _policy(layer: LayerPlan | None) -> dict[str, Scalar]:
    return {} if layer is None else _named("policy", layer.policy)


def _named(what: str, spec: PolicySpec | AllocationSpec) -> dict[str, Scalar]:
    return {what: spec.name, **{f"{what}.{key}": value for key, value in spec.params.items()}}


def _part(plan: Plan, phase: Phase) -> PhasePlan | None:
    return plan.prefill if phase == "prefill" else plan.decode


def _layers(part: PhasePlan | None, layers: int) -> tuple[LayerPlan | None, ...]:
    return (None,) * layers if part is None else part.layers
