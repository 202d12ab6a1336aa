"""The plan: per phase and layer a policy with its parameters, and a budget for every kv head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import FailFast, Field, ValidationInfo, field_validator

from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.fields import (
    Count,
    Entries,
    Floor,
    HeadCount,
    LayerCount,
    Record,
    ScalarField,
    Sha256,
    Text,
    is_none,
    refuse,
)
from kvsearch.core.limits import MOST_ENTRIES, MOST_HEADS, MOST_LAYERS, MOST_NUMBER
from kvsearch.core.naming import require_known, suggest
from kvsearch.core.parsing import format_value
from kvsearch.plan.origin import Guarantee, Provenance

if TYPE_CHECKING:
    from kvsearch.core.arrays import Ints

_COMPARED = {
    "model_type": "architecture", "config_sha256": "configuration", "weights_sha256": "weights", "layers": "layers",
    "kv_heads": "kv heads per layer", "head_dim": "dimensions of a head",
}  # fmt: skip
_ROUNDING = "float16"  # in which small weights, and so their hash, are others than in float32 and bfloat16
_DIGITS = 12  # of a hash
_TYPES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class ModelFingerprint(Record):
    """A model by content: hashes of its configuration and weights, and the shape of its KV cache.

    `name`, `revision` and `dtype`, in which it was loaded, are for the reader and never compared; a file that does not
    say the dtype is older than this field. `layers` counts all layers of the model, `kv_heads`
    the kv heads of each, `head_dim` the width of one of them.
    """

    name: Text
    model_type: Text
    config_sha256: Sha256
    weights_sha256: Sha256
    revision: Text | None = None
    layers: LayerCount
    kv_heads: HeadCount
    head_dim: Entries
    dtype: Text | None = Field(default=None, exclude_if=is_none)

    def mismatch(self, other: ModelFingerprint, weights: bool = True) -> str | None:
        """Say on one line what differs between two models, or None; `weights=False` lets the weights differ."""
        differences = []
        for field, label in _COMPARED.items():
            value = getattr(self, field)
            yours = getattr(other, field)
            if value != yours and (weights or field != "weights_sha256"):
                end = _DIGITS if field.endswith("sha256") else None
                differences.append(f"other {label} ({str(value)[:end]}, here {str(yours)[:end]})")
        return ", ".join(differences) or None

    def short(self) -> str:
        """Render the fingerprint on one line, hashes cut."""
        shape = f"{self.layers} layers x {self.kv_heads} kv heads x {self.head_dim}"
        hashes = f"config {self.config_sha256[:_DIGITS]}, weights {self.weights_sha256[:_DIGITS]}"
        return f"{self.name!r} ({self.model_type}, {hashes}, {shape})"

    def require(self, other: ModelFingerprint, what: str, weights: bool = True) -> None:
        """Refuse `other`, the model at hand, unless it is the one that `what` (a plan, a file) was made for.

        Raises:
            IncompatibleError: they are different models, or the same one in another dtype; the message says which.
        """
        difference = self.mismatch(other, weights)
        if difference is None:
            return
        only_weights = self.mismatch(other, weights=False) is None
        dtypes = {self.dtype, other.dtype}
        rounds_otherwise = None not in dtypes and len(dtypes) == 2 and _ROUNDING in dtypes
        if only_weights and self.name == other.name and rounds_otherwise:
            raise IncompatibleError(
                f"{what} was made in {self.dtype}, and this model is loaded in {other.dtype}: {_ROUNDING} rounds small "
                f"weights, so that it has {difference}; load it with --dtype {self.dtype}, or make {what} again"
            )
        names = f"{self.name!r}, and this is {other.name!r}"
        if self.name == other.name:
            names = f"which is called {self.name!r} as this one is"
        hint = ", or load it in the --dtype of then" if only_weights and self.dtype is None else ""
        raise IncompatibleError(
            f"{what} was made for another model, {names}: it has {difference}; use it with that one{hint}"
        )


PLAN_FORMAT = "kvsearch.plan"
PLAN_VERSION = 1
STATIC = "static"

Phase = Literal["prefill", "decode"]
PhaseNames = Literal["prefill", "decode", "both"]  # as options have them
PHASES: dict[str, tuple[Phase, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "both": ("prefill", "decode"),
}
LayerBudgets = tuple[tuple[int, ...] | None, ...]
Problem = tuple[tuple[str | int, ...], str]


def parse_phases(name: str) -> tuple[Phase, ...]:
    """Parse "prefill", "decode" or "both" to phases; UsageError for another name."""
    require_known("phases", name, list(PHASES))
    return PHASES[name]


WHOLE = "full"  # the policy that keeps everything
# what kept entries carry of those that leave a prompt: "match", values and log weights that make up for them
Carry = Literal["none", "match"]
NO_CARRY: Carry = "none"


class PolicySpec(Record):
    """An eviction policy, or an allocation, by its registered name, with the parameters that differ from its defaults.

    An allocation says how the totals of a plan become budgets of a prompt: "static" as written, or by a dynamic rule.
    """

    name: Text
    params: dict[Text, ScalarField] = Field(default_factory=dict)


class LayerPlan(Record):
    """What one layer keeps: `budget` is in entries per kv head, protected entries (sinks, window) included.

    `carry` is what they carry of those that leave, in a prefill phase.
    """

    policy: PolicySpec
    budget: Annotated[tuple[Entries, ...], FailFast()] = Field(max_length=MOST_HEADS)
    carry: Carry = Field(default=NO_CARRY, exclude_if=lambda carry: carry == NO_CARRY)


class PhasePlan(Record):
    """One phase, an item per model layer; None leaves a layer its full cache (say, one with its own sliding window)."""

    layers: tuple[LayerPlan | None, ...] = Field(max_length=MOST_LAYERS)

    @classmethod
    def of(cls, policies: Sequence[PolicySpec | None], table: Ints) -> PhasePlan:
        """Make a phase from a policy per layer (None: keeps its full cache) and budgets [planned layers, Hkv]."""
        rows = iter(table.tolist())
        return cls(
            layers=tuple(
                None if policy is None else LayerPlan(policy=policy, budget=tuple(next(rows))) for policy in policies
            )
        )

    @property
    def policies(self) -> tuple[PolicySpec | None, ...]:
        """The policy of each layer; None where a layer keeps its full cache."""
        return tuple(None if layer is None else layer.policy for layer in self.layers)

    @property
    def carries(self) -> tuple[Carry, ...]:
        """What the entries of each layer carry of what leaves."""
        return tuple(NO_CARRY if layer is None else layer.carry for layer in self.layers)

    @property
    def planned_layers(self) -> tuple[int, ...]:
        """Indices of the layers with budgets, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if layer is not None)

    @property
    def budgets(self) -> LayerBudgets:
        """Entries per kv head of each layer; None where a layer keeps its full cache."""
        return tuple(None if layer is None else layer.budget for layer in self.layers)

    @property
    def total(self) -> int:
        """The sum of all budgets, in entries."""
        return sum(sum(budget) for budget in self.budgets if budget is not None)

    @property
    def table(self) -> Ints:
        """The budgets [planned layers, Hkv]."""
        import numpy as np

        return np.array([budget for budget in self.budgets if budget is not None], dtype=np.int64)


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
    allocation: PolicySpec = PolicySpec(name=STATIC)
    floor: Floor
    prefill: PhasePlan | None = None
    decode: PhasePlan | None = Field(default=None, validate_default=True)
    total: Count
    provenance: Provenance

    @property
    def phases(self) -> dict[Phase, PhasePlan]:
        """The phases that the plan has, by name; its total is that of the first."""
        phases: dict[Phase, PhasePlan | None] = {"prefill": self.prefill, "decode": self.decode}
        return {name: phase for name, phase in phases.items() if phase is not None}

    @property
    def content_sha256(self) -> str:
        """The hash of everything but where the plan came from: equal plans are run alike."""
        return hash_json(self.model_dump(mode="json", exclude={"provenance"}))

    @property
    def guarantee(self) -> Guarantee | None:
        """What this plan was shown to lose at most; None if it was not, or was changed since."""
        shown = self.provenance.guarantee
        return shown if shown is not None and shown.plan_sha256 == self.content_sha256 else None

    @property
    def heads(self) -> int:
        """How many kv heads share the total."""
        return len(next(iter(self.phases.values())).planned_layers) * self.model.kv_heads

    def phase(self, name: Phase) -> PhasePlan:
        """Select the part of the plan for "prefill" or "decode".

        Raises:
            UsageError: the plan has no such phase.
        """
        if name not in self.phases:
            raise UsageError(f"the plan has no {name!r} phase, only {' and '.join(self.phases)}")
        return self.phases[name]

    def budgets(self, phase: Phase) -> LayerBudgets:
        """List entries per kv head of each model layer, None where it keeps its full cache; UsageError as `phase`."""
        return self.phase(phase).budgets

    @property
    def policies(self) -> tuple[PolicySpec, ...]:
        """The policies of all phases and layers, each once."""
        specs = [spec for phase in self.phases.values() for spec in phase.policies if spec is not None]
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
            refuse(_find_phase_problems(phase, info.data, info.field_name == "prefill"))
        elif info.field_name == "decode" and info.data.get("prefill", phase) is None and "prefill" in info.data:
            refuse([((), "a plan needs at least one phase: give prefill, decode or both")])
        return phase

    @property
    def carries(self) -> bool:
        """Whether kept entries of some layer carry what leaves a prompt."""
        return self.prefill is not None and set(self.prefill.carries) != {NO_CARRY}

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


def _find_phase_problems(phase: PhasePlan, known: Mapping[str, Any], prefill: bool) -> Iterator[Problem]:
    """Find where a phase contradicts the model, floor and length, as far as these are valid themselves."""
    model: ModelFingerprint | None = known.get("model")
    if model is not None and len(phase.layers) != model.layers:
        yield ("layers",), f"has {len(phase.layers)} items, but model.layers is {model.layers}: list every layer"
    if not phase.planned_layers:
        yield ("layers",), "plans no layer: leave the phase out (null) instead"
    largest = known.get("length") if known.get("scaling") == "proportional" else None
    for index, budget in enumerate(phase.budgets):
        for what in () if budget is None else _find_budget_problems(budget, model, known.get("floor", 0), largest):
            yield ("layers", index, "budget"), what
    longest = known.get("length")
    for index, layer in enumerate(phase.layers):
        if layer is None or layer.carry == NO_CARRY:
            continue
        if not prefill:
            yield (
                ("layers", index, "carry"),
                f"is {layer.carry}, but only what leaves a prompt is carried: drop it",
            )
        elif longest is not None and min(layer.budget, default=0) >= longest:
            problem = f"is {layer.carry}, but this layer keeps all of {longest} tokens, so nothing leaves it: drop it"
            yield ("layers", index, "carry"), problem


def _find_budget_problems(
    budget: tuple[int, ...], model: ModelFingerprint | None, floor: int, largest: int | None
) -> Iterator[str]:
    if model is not None and len(budget) != model.kv_heads:
        yield f"has {len(budget)} items, but model.kv_heads is {model.kv_heads}: one budget per kv head"
    low = [head for head, entries in enumerate(budget) if entries < floor]
    if low:
        yield f"is {_list_budgets(budget, low)}, below the floor of {floor} entries"
    high = [head for head, entries in enumerate(budget) if largest is not None and entries > largest]
    if high:
        high_budgets = _list_budgets(budget, high)
        yield f"is {high_budgets}, above the length of {largest} tokens that proportional budgets are for"


def _list_budgets(budget: tuple[int, ...], heads: list[int]) -> str:
    return ", ".join(f"{budget[head]} at head {head}" for head in heads)


def check_values(given: Mapping[str, object], defaults: Mapping[str, object], owner: str, noun: str) -> dict[str, Any]:
    """Return parameters checked against the types of their `defaults`; whole numbers become floats where these are.

    A default of `dataclasses.MISSING` permits any type. Whole numbers fit int32, a seed int64; what else a parameter
    may be, its policy says.

    Raises:
        UsageError: `owner` has no such `noun`, its type is another one, or it is out of all range.
    """
    values = dict(given)
    for key, value in values.items():
        if key not in defaults:
            raise UsageError(f"{owner} has no {noun} {key!r}{suggest(key, list(defaults))}")
        maximum = MOST_NUMBER if key == "seed" else MOST_ENTRIES
        if isinstance(value, int) and abs(value) > maximum:
            raise UsageError(f"{owner}: {key} must be {maximum} or less, got {format_value(value)}")
        wanted = type(defaults[key])
        if wanted is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not wanted and defaults[key] is not dataclasses.MISSING:
            raise UsageError(f"{owner}: {key} must be {_TYPES.get(wanted, wanted.__name__)}, got {format_value(value)}")
    return values


Protocol = Literal["question-agnostic", "question-aware"]
QUESTION_AGNOSTIC: Protocol = "question-agnostic"
QUESTION_AWARE: Protocol = "question-aware"
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
