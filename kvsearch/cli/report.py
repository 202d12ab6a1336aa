"""kvsearch report: runs, plans and results as one HTML page."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.report import ReportOptions


@command(ReportOptions)
def report(options: ReportOptions, console: Console) -> None:
    """Write runs of any kind as one HTML page that needs no network: figures, tables, what was asked and how.

    Each run says in one sentence what was found. Every figure and table has its numbers as CSV; tables sort by a click
    on a heading. Several runs are grouped by their models. A search that still runs shows how far it is.

    Example: kvsearch report runs/best runs/table -o report.html
    """
    from kvsearch.jobs import report as jobs
    from kvsearch.report.numbers import counted

    found = jobs.write_report(options, talk=console)
    files = list(map(str, found.files))
    if console.as_json:
        counts = {what: found.count(what) for what in ("figures", "tables")}
        console.print_json({"report": str(found.output), "bytes": found.bytes, **counts, "files": files})
        return
    what = f"{counted(found.count('figures'), 'figure')}, {counted(found.count('tables'), 'table')}"
    console.say(f"wrote {found.output}: {what}, {found.bytes / 1000:.0f} kB")
    if files:
        console.say(f"wrote {counted(len(files), 'file')} to {options.figures}")
