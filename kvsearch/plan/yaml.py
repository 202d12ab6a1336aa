"""A plan in YAML, as people read and edit it (PolyKV, arXiv 2606.15157, Figure 2): layers by range, no sums to keep.

    model: bundled
    scaling: fixed
    floor: 8
    prefill:
      layers:
        0-7: {policy: snapkv, budget: 640, params: {window: 8}}
        8: {policy: tova, budget: [600, 700], carry: match}  # per kv head
        9-11: full  # whole cache, which no total counts

Parameters that several entries share may stand once under `policies`, by the name of the policy; an entry with `params`
of its own does not read them. Whatever a plan holds is in its YAML, except for the total, which follows from the
budgets: so reading what was written gives the same plan, byte by byte. Provenance is kept as it is when
budgets are edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import yaml

from kvsearch.plan import PhasePlan, Plan, PolicySpec, canonical_json
from kvsearch.plan.schema import NO_CARRY, STATIC, WHOLE, LayerPlan

STRATEGY_FORMAT = "kvsearch.strategy"
STRATEGY_VERSION = 1

_HEADER = f"""\
# A plan to read and edit; `kvsearch plan build` makes a plan file of it again.
# Layers: a number or a range. Budgets: entries per kv head, one for all or a list. {WHOLE}: the whole cache, uncounted.
"""
_WIDTH = 120
_TAG = "tag:yaml.org,2002:"


def plan_to_yaml(plan: Plan) -> str:
    """Render a plan as YAML; equal plans give equal texts, and reading them gives the plan again."""
    model = plan.model.model_dump(exclude_none=True)
    provenance = plan.provenance.model_dump(exclude_none=True)
    provenance["settings"] = dict(sorted(plan.provenance.settings.items()))
    if not provenance["settings"]:
        del provenance["settings"]
    document: dict[str, Any] = {
        "format": STRATEGY_FORMAT,
        "version": STRATEGY_VERSION,
        "model": model.pop("name"),
        "length": plan.length,
        "scaling": plan.scaling,
        "floor": plan.floor,
        "allocation": None if plan.allocation == PolicySpec(name=STATIC) else _Line(plan.allocation.model_dump()),
        **{name: _dump_phase(phase) for name, phase in plan.phases.items()},
        "fingerprint": model,
        "provenance": provenance,
    }
    given = {key: value for key, value in document.items() if value is not None}
    return _HEADER + yaml.dump(given, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)


def format_layer_ranges(layers: Sequence[int]) -> list[str]:
    """Return ascending layers as ranges, e.g. ["0-2", "5"]."""
    runs = groupby(enumerate(layers), key=lambda item: item[1] - item[0])
    return [_format_range([layer for _, layer in run]) for _, run in runs]


def _format_range(layers: Sequence[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


class _Line(dict[str, Any]):
    """A mapping that is written between braces."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


# plain or in single quotes, some line breaks would be read as others
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')
)
_Dumper.add_representer(_Line, lambda dumper, mapping: dumper.represent_mapping(f"{_TAG}map", mapping, flow_style=True))
_Dumper.add_representer(tuple, lambda dumper, items: dumper.represent_sequence(f"{_TAG}seq", items, flow_style=True))


def _dump_phase(phase: PhasePlan) -> dict[str, Any]:
    """Return the entries of runs of layers with equal content, by their range."""
    entries: dict[int | str, _Line | str] = {}
    for _, run in groupby(enumerate(phase.layers), key=lambda item: canonical_json(item[1])):
        layers, (first, *_) = zip(*run, strict=True)
        entries[_format_range(layers) if len(layers) > 1 else layers[0]] = _dump_layer(first)
    return {"layers": entries}


def _dump_layer(layer: LayerPlan | None) -> _Line | str:
    if layer is None:
        return WHOLE
    budget = layer.budget
    entry = _Line(policy=layer.policy.name, budget=budget[0] if len(set(budget)) == 1 else budget)
    if layer.policy.params:
        entry["params"] = dict(sorted(layer.policy.params.items()))
    if layer.carry != NO_CARRY:
        entry["carry"] = layer.carry
    return entry
