"""The plan: per phase and layer a policy with its parameters, and a budget for every kv head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, ValidationInfo, field_validator

from kvsearch.errors import UsageError
from kvsearch.naming import unknown
from kvsearch.plan.fields import Entries, Floor, Record, ScalarField, Text, Total, few, refuse
from kvsearch.plan.fingerprint import ModelFingerprint
from kvsearch.plan.limits import MOST_HEADS, MOST_LAYERS, MOST_PARAMETERS
from kvsearch.plan.origin import Provenance

__all__ = [
    "PHASES",
    "STATIC",
    "AllocationSpec",
    "LayerPlan",
    "ModelFingerprint",
    "Phase",
    "PhasePlan",
    "Plan",
    "PolicySpec",
    "Provenance",
    "phases_of",
]

PLAN_FORMAT = "kvsearch.plan"
PLAN_VERSION = 1
STATIC = "static"

Phase = Literal["prefill", "decode"]
PHASES: dict[str, tuple[Phase, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "both": ("prefill", "decode"),
}
Budgets = tuple[tuple[int, ...] | None, ...]
Problem = tuple[tuple[str | int, ...], str]


def phases_of(name: str) -> tuple[Phase, ...]:
    """Return the phases called "prefill", "decode" or "both"; UsageError if there are none of that name."""
    if name not in PHASES:
        raise UsageError(unknown("phases", name, list(PHASES)))
    return PHASES[name]


class PolicySpec(Record):
    """An eviction policy by its registered name, with the hyper-parameters that differ from its defaults."""

    name: Text
    params: Annotated[dict[Text, ScalarField], few(MOST_PARAMETERS)] = Field(default_factory=dict)


class AllocationSpec(Record):
    """How the totals of a plan become budgets of a prompt: "static" as written, or by a registered dynamic rule."""

    name: Text = STATIC
    params: Annotated[dict[Text, ScalarField], few(MOST_PARAMETERS)] = Field(default_factory=dict)


class LayerPlan(Record):
    """What one layer keeps: `budget` is in entries per kv head, protected entries (sinks, window) included."""

    policy: PolicySpec
    budget: Annotated[tuple[Entries, ...], FailFast(), few(MOST_HEADS)]


class PhasePlan(Record):
    """One phase, an item per model layer; None leaves a layer its full cache (say, one with its own sliding window)."""

    layers: Annotated[tuple[LayerPlan | None, ...], few(MOST_LAYERS)]

    @property
    def planned_layers(self) -> tuple[int, ...]:
        """Indices of the layers with budgets, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if layer is not None)

    @property
    def budgets(self) -> Budgets:
        """Entries per kv head of each layer; None where a layer keeps its full cache."""
        return tuple(None if layer is None else layer.budget for layer in self.layers)

    @property
    def total(self) -> int:
        """The sum of all budgets, in entries."""
        return sum(sum(budget) for budget in self.budgets if budget is not None)


class Plan(Record):
    """The deployable strategy of one model, checked as a whole when built.

    "proportional" budgets are for prompts of `length` tokens and scale with the prompt at hand; "fixed" ones hold at
    every length. `total` is the sum of the prefill budgets, or of the decode ones where there is no prefill phase;
    `floor` is the fewest entries any head may get. An `allocation` other than "static" shares what the budgets add up
    to anew for every prompt: within each layer, or over all layers.

    Raises:
        ValidationError: on construction; see `load_plan` and `describe_validation_error` for readable messages.
    """

    format: Literal["kvsearch.plan"] = "kvsearch.plan"
    version: Literal[1] = 1
    # Validators see the fields above their own, so the order of these matters.
    model: ModelFingerprint
    length: Entries | None = None
    scaling: Literal["fixed", "proportional"]
    allocation: AllocationSpec = AllocationSpec()
    floor: Floor
    prefill: PhasePlan | None = None
    decode: PhasePlan | None = Field(default=None, validate_default=True)
    total: Total
    provenance: Provenance

    def phase(self, name: Phase) -> PhasePlan:
        """Select the part of the plan for "prefill" or "decode".

        Raises:
            UsageError: the plan has no such phase.
        """
        phases: dict[str, PhasePlan | None] = {"prefill": self.prefill, "decode": self.decode}
        found = phases.get(name)
        if found is None:
            present = " and ".join(phase for phase, plan in phases.items() if plan is not None)
            raise UsageError(f"the plan has no {name!r} phase, only {present}")
        return found

    def budgets(self, phase: Phase) -> Budgets:
        """List entries per kv head of each model layer, None where it keeps its full cache; UsageError as `phase`."""
        return self.phase(phase).budgets

    @property
    def policies(self) -> tuple[PolicySpec, ...]:
        """The policies of all phases and layers, each once."""
        phases = [phase for phase in (self.prefill, self.decode) if phase is not None]
        specs = [layer.policy for phase in phases for layer in phase.layers if layer is not None]
        return tuple(spec for number, spec in enumerate(specs) if spec not in specs[:number])

    def planned_layers(self, phase: Phase) -> tuple[int, ...]:
        """List the model layers that `phase` budgets, ascending; UsageError as `phase`."""
        return self.phase(phase).planned_layers

    @field_validator("scaling")
    @classmethod
    def _knows_its_length(cls, scaling: str, info: ValidationInfo) -> str:
        if scaling == "proportional" and info.data.get("length", 0) is None:
            refuse([((), '"proportional" needs a length: the prompt length, in tokens, that the budgets are for')])
        return scaling

    @field_validator("prefill", "decode")
    @classmethod
    def _fits_the_rest(cls, phase: PhasePlan | None, info: ValidationInfo) -> PhasePlan | None:
        if phase is not None:
            refuse(_phase_problems(phase, info.data))
        elif info.field_name == "decode" and info.data.get("prefill", phase) is None and "prefill" in info.data:
            refuse([((), "a plan needs at least one phase: give prefill, decode or both")])
        return phase

    @field_validator("total")
    @classmethod
    def _adds_up(cls, total: int, info: ValidationInfo) -> int:
        if "prefill" not in info.data:
            return total
        name = "decode" if info.data["prefill"] is None else "prefill"
        phase = info.data.get(name)
        if phase is not None and phase.total != total:
            refuse([((), f"says {total}, but the {name} budgets add up to {phase.total}: correct one of them")])
        return total


def _phase_problems(phase: PhasePlan, known: Mapping[str, Any]) -> Iterator[Problem]:
    """Find where a phase contradicts the model, floor and length, as far as these are valid themselves."""
    model: ModelFingerprint | None = known.get("model")
    if model is not None and len(phase.layers) != model.layers:
        yield ("layers",), f"has {len(phase.layers)} items, but model.layers is {model.layers}: list every layer"
    if not phase.planned_layers:
        yield ("layers",), "plans no layer: leave the phase out (null) instead"
    most = known.get("length") if known.get("scaling") == "proportional" else None
    for index, budget in enumerate(phase.budgets):
        for what in () if budget is None else _budget_problems(budget, model, known.get("floor", 0), most):
            yield ("layers", index, "budget"), what


def _budget_problems(
    budget: tuple[int, ...], model: ModelFingerprint | None, floor: int, most: int | None
) -> Iterator[str]:
    if model is not None and len(budget) != model.kv_heads:
        yield f"has {len(budget)} items, but model.kv_heads is {model.kv_heads}: one budget per kv head"
    low = [head for head, entries in enumerate(budget) if entries < floor]
    if low:
        yield f"is {_listed(budget, low)}, below the floor of {floor} entries"
    high = [head for head, entries in enumerate(budget) if most is not None and entries > most]
    if high:
        yield f"is {_listed(budget, high)}, above the length of {most} tokens that proportional budgets are for"


def _listed(budget: tuple[int, ...], heads: list[int]) -> str:
    return ", ".join(f"{budget[head]} at head {head}" for head in heads)
