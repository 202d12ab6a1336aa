"""From the YAML of `kvsearch.plan.yaml`, edited by hand, to a plan: every mistake with its line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.errors import UsageError
from kvsearch.core.limits import MOST_HEADS, MOST_LAYERS
from kvsearch.core.naming import suggest
from kvsearch.core.parsing import locate_problems, require_header
from kvsearch.core.yaml_document import YamlDocument, YamlPlace
from kvsearch.plan import PHASES, ModelFingerprint, Plan, PolicySpec
from kvsearch.plan.origin import Provenance
from kvsearch.plan.schema import WHOLE
from kvsearch.plan.yaml import STRATEGY_FORMAT, STRATEGY_VERSION, format_layer_ranges

EXAMPLE = "{policy: snapkv, budget: 640}"
_KEYS = (
    "format", "version", "model", "length", "scaling", "floor", "allocation", "policies", *PHASES["both"],
    "fingerprint", "provenance",
)  # fmt: skip
_FINGERPRINT = [name for name in ModelFingerprint.model_fields if name != "name"]
_LAYERS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


def plan_from_yaml(text: bytes | str, name: str) -> Plan:
    """Read and check a plan in YAML; `name` is its name in messages, usually the file.

    Raises:
        UsageError: it is no YAML or no strategy; or values, layers, policies or budgets that do not fit, in one message
            with a line for each.
        EnvironmentFault: a policy comes from a package that cannot be imported.
    """
    return plan_of_document(YamlDocument(text, name))


def plan_of_document(document: YamlDocument) -> Plan:
    """Make a plan of YAML that was parsed; errors as `plan_from_yaml`."""
    require_header(document.data, STRATEGY_FORMAT, STRATEGY_VERSION, document.name)
    return _Reader(document).plan()


class _Reader:
    """Converts a YAML document to the data of a plan file, and reports problems by their place in the document."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.tell = document.tell
        self.data = self._known((), document.data, _KEYS)
        self.policies: dict[str, Any] = {}
        self.rows: dict[YamlPlace, YamlPlace] = {}  # where layers of the plan come from
        self.told: set[YamlPlace] = set()  # places of the plan of which all has been said

    def plan(self) -> Plan:
        data = self._plan_data()
        plan = None
        try:
            plan = Plan.model_validate(data)
        except ValidationError as error:
            for place, problem in locate_problems(error):
                if place not in self.told:
                    self.tell(self._source(place), problem)
        if plan is not None and not self.document.problems:
            self._check_plan(plan)
        if plan is None or self.document.problems:
            raise self.document.refusal()
        return plan

    def _plan_data(self) -> dict[str, Any]:
        """Convert the document to the data of a plan file, as far as it has it."""
        data: dict[str, Any] = {key: self.data[key] for key in ("length", "scaling", "floor") if key in self.data}
        for key, record in (("allocation", PolicySpec), ("provenance", Provenance)):
            if key in self.data:
                data[key] = self._known((key,), self.data[key], record.model_fields)
        model = self._known(("fingerprint",), self.data.get("fingerprint", {}), _FINGERPRINT)
        data["model"] = {**model, **({"name": self.data["model"]} if "model" in self.data else {})}
        self.policies = self._mapping(("policies",), self.data.get("policies", {}), "such as snapkv: {window: 8}")
        phases = {name: self._phase(name, model) for name in PHASES["both"] if self.data.get(name) is not None}
        budgets = [layer.get("budget", []) for layer in next(iter(phases.values()), []) if layer is not None]
        total = sum(entries for budget in budgets for entries in budget if type(entries) is int)
        return {**data, **{name: {"layers": layers} for name, layers in phases.items()}, "total": max(total, 1)}

    def _mapping(self, place: YamlPlace, value: Any, what: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.tell(place, f"must be a mapping {what}")
        return {}

    def _known(self, place: YamlPlace, value: Any, known: Iterable[str]) -> dict[str, Any]:
        """Return a mapping without the keys that should not be there."""
        names = list(known)
        mapping = self._mapping(place, value, f"with the keys {', '.join(names)}")
        for key in mapping:
            if (*place, key) == ("total",):
                self.tell(("total",), "follows from budgets: remove it")
            elif key not in names:
                self.tell((*place, key), f"unknown key{suggest(key, names)}")
        return {key: mapping[key] for key in names if key in mapping}

    def _phase(self, phase: str, model: Mapping[str, Any]) -> list[Any]:
        """An item for every layer of the model."""
        place = (phase, "layers")
        before = len(self.document.problems)
        given = self._known((phase,), self.data[phase], ("layers",)).get("layers", {})
        count = _up_to(MOST_LAYERS, model.get("layers"))
        heads = _up_to(MOST_HEADS, model.get("kv_heads"))
        rows: dict[int, tuple[str, Any]] = {}
        entries = self._mapping(place, given, f"such as 0-7: {EXAMPLE}")
        if len(entries) > MOST_LAYERS:
            self.tell(place, f"has {len(entries)} entries, and a model at most {MOST_LAYERS} layers")
        for key, value in islice(entries.items(), MOST_LAYERS):
            entry = self._entry((*place, key), value, heads or 1)
            for layer in self._covered((*place, key), count):
                if layer in rows:
                    self.tell((*place, key), f"layer {layer} is in {rows[layer][0]}, too: give every layer once")
                rows.setdefault(layer, (key, entry))
        missing = sorted(set(range(count or 0)) - rows.keys())
        if missing:
            listed = ", ".join(format_layer_ranges(missing))
            self.tell(place, f"says nothing of layer {listed}: add {EXAMPLE}, or {WHOLE} for the whole cache")
        if len(self.document.problems) > before:
            self.told.add(place)  # what a plan would say of its layers follows from these problems
        ordered = [rows[layer] for layer in sorted(rows)]
        self.rows |= {(*place, row): (*place, key) for row, (key, _) in enumerate(ordered)}
        return [entry for _, entry in ordered]

    def _covered(self, place: YamlPlace, count: int | None) -> Iterable[int]:
        """Return the layers of a key such as 3 or 0-7 in a model of `count` layers."""
        match = _LAYERS.fullmatch(str(place[-1]))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            self.tell(place, "must be a layer or a range of layers, such as 3 or 0-7")
        elif count is not None and last >= count:
            self.tell(place, f"the model has layers 0 to {count - 1}")
        return range(first, min(last + 1, count or MOST_LAYERS))

    def _entry(self, place: YamlPlace, value: Any, heads: int) -> dict[str, Any] | None:
        """Convert the plan of a layer; None for the whole cache."""
        if not isinstance(value, dict):
            if value != WHOLE:
                self.tell(place, f"must be {WHOLE} (the whole cache) or a mapping such as {EXAMPLE}")
            return None
        given = self._known(place, value, ("policy", "budget", "params", "carry"))
        name = given.get("policy")
        params = given["params"] if "params" in given else self.policies.get(str(name), {})
        entry: dict[str, Any] = {"policy": {"params": params, **({"name": name} if "policy" in given else {})}}
        if "budget" in given:
            budget = given["budget"]
            entry["budget"] = budget if isinstance(budget, list) else [budget] * heads
        if "carry" in given:
            entry["carry"] = given["carry"]
        return entry

    def _check_plan(self, plan: Plan) -> None:
        """Report the problems that `check_plan` finds with policies, budgets and the allocation."""
        self._check_whole(plan)
        try:
            check_plan(plan, "")
        except UsageError as error:
            for problem in str(error).split("\n  ")[1:]:
                place, _, what = problem.partition(": ")
                place = place.partition(" (")[0]  # and in other layers of the same entry
                parts = tuple(int(part) if part.isdecimal() else part for part in place.split("."))
                self.tell(self._source(parts), what)

    def _check_whole(self, plan: Plan) -> None:
        """Note policies that keep everything and would count as less."""
        for phase in PHASES["both"]:
            part = getattr(plan, phase)
            for row, layer in enumerate(part.layers if part is not None and plan.length else ()):
                if layer is not None and layer.policy.name == WHOLE and min(layer.budget) < plan.length:
                    self.tell(
                        self._source((phase, "layers", row, "budget")),
                        f"is below {plan.length}, but {WHOLE} keeps all entries of a prompt of that length: give "
                        f"{plan.length}",
                    )

    def _source(self, place: YamlPlace) -> YamlPlace:
        """Map a place in the plan to its place in the document."""
        if place[:1] == ("model",):
            return ("model",) if place[1:2] == ("name",) else ("fingerprint", *place[1:])
        key = self.rows.get(place[:3], place[:3])
        rest = place[3:]
        if rest[:2] == ("policy", "name"):
            rest = ("policy",)
        elif rest[:2] == ("policy", "params"):
            rest = ("params", *rest[2:])
        elif rest[:1] == ("budget",) and (*key, *rest) not in self.document.lines:
            rest = ("budget",)  # one for all heads
        return (*key, *rest)


def _up_to(limit: int, value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= limit else None
