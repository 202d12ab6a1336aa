"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.plan_output import make, written
from kvsearch.jobs.export import ExportOptions

if TYPE_CHECKING:
    from kvsearch.plan import PhasePlan


@command(ExportOptions, dry_run=True)
def export(options: ExportOptions, console: Console) -> None:
    """Write a plan that evicts a share of any prompt (--ratio) or keeps so many entries (--budget).

    Of a PolyKV profile: every layer takes the pattern that its signals prefer, and the share of the budget that its
    sensitivity asks for.

    Examples: kvsearch export runs/snapkv --ratio 0.8 -o plan.json

    kvsearch export runs/polykv --budget 512 --budget-signal entropy -o plan.json
    """
    from kvsearch.jobs import export as jobs
    from kvsearch.strategies.from_signals import SIGNAL_BUDGET

    plan = make(jobs.export, options, console)
    parts = {name: part for name in ("prefill", "decode") if (part := getattr(plan, name)) is not None}
    shown = parts if SIGNAL_BUDGET in plan.provenance.settings else {}  # what every phase of a strategy does
    if console.as_json:
        summary = {
            "plan": str(options.output), "total": plan.total, "length": plan.length, "scaling": plan.scaling,
            "layers": len(next(iter(parts.values())).planned_layers), "kv_heads": plan.model.kv_heads,
        }  # fmt: skip
        phases = {"phases": {name: _patterns(part) for name, part in shown.items()}} if shown else {}
        console.print_json({**summary, **phases})
        return
    console.say(written(plan, options, console))
    for name, part in shown.items():
        console.say(f"{name}: {_in_words(part)}")


def _patterns(phase: PhasePlan) -> dict[str, list[int]]:
    """Return the layers of every pattern."""
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(phase.layers):
        if layer is not None:
            found.setdefault(layer.policy.name, []).append(index)
    return found


def _in_words(phase: PhasePlan) -> str:
    """Say which layers have which pattern, and how much they keep."""
    from kvsearch.plan.yaml import layer_ranges

    places: list[str] = []
    for name, layers in _patterns(phase).items():
        *ranges, last = layer_ranges(layers)
        noun = "" if places else "layer " if len(layers) == 1 else "layers "
        places.append(f"{name} in {noun}{', '.join(ranges)}{' and ' if ranges else ''}{last}")
    kept = [count for layer in phase.layers if layer and layer.policy.name != "full" for count in layer.budget]
    low, high = min(kept), max(kept)
    return f"{', '.join(places)}; {low if low == high else f'{low} to {high}'} entries per kv head"
