"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.cli.console import Console
from kvsearch.cli.plan import make_and_show
from kvsearch.jobs.export import PLAN, ExportOptions, export_to

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exported


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
    if options.to == PLAN:
        make_and_show("kvsearch.jobs.export:export", options, console)
        return
    found = options.for_target(console) if console.dry_run else export_to(options, reporter=console)
    _say_target(found, options, console)


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
