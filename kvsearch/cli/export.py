"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.cli.console import Console
from kvsearch.cli.plan import make, say_next, written
from kvsearch.jobs.export import PLAN, ExportOptions

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exported
    from kvsearch.plan import PhasePlan


def list_targets() -> None:
    """Say which targets there are and what of a plan they keep."""
    from kvsearch.exporters import TARGETS, exporter_of
    from kvsearch.report.screen import listing

    table = listing("targets of export --to", ["target", "read by", "keeps"])
    for name in TARGETS:
        target = exporter_of(name)
        table.add_row(name, target.tool, target.keeps)
    Console().out.print(table)


def run_export(options: ExportOptions, console: Console) -> None:
    """Write a plan, or the files of a target, and say what was written."""
    from kvsearch.jobs import export as jobs
    from kvsearch.strategies.from_signals import SIGNAL_BUDGET

    if options.to != PLAN:
        found = options.for_target(console) if console.dry_run else jobs.export_to(options, reporter=console)
        _say_target(found, options, console)
        return
    plan = make(jobs.export, options, console)
    parts = plan.phases
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
    say_next(plan, options.output, console)


def _say_target(found: Exported, options: ExportOptions, console: Console) -> None:
    """Say where the files of a target are, what they lost, and how they are loaded."""
    usage = [line.format(path=str(options.output)) for line in found.usage]
    if console.as_json:
        losses = [{"what": loss.what, "entries": loss.entries} for loss in found.losses]
        files = [str(options.output / name) for name in found.files]
        summary = {"target": options.to, "files": files, "losses": losses, "total": found.total, "usage": usage}
        console.print_json(summary)
        return
    from kvsearch.report.numbers import counted

    verb = "would write" if console.dry_run else "wrote"
    lost = "nothing is lost" if not found.losses else f"{counted(len(found.losses), 'thing')} lost"
    console.say(f"{verb} {options.output} for {options.to}: {lost}")
    for line in usage:
        console.say(f"  {line}")


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
    low = min(kept)
    high = max(kept)
    return f"{', '.join(places)}; {low if low == high else f'{low} to {high}'} entries per kv head"
