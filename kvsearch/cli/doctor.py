"""kvsearch doctor: is this installation able to do its work?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import print_parts
from kvsearch.jobs.doctor import MISSING, DoctorOptions


@command(DoctorOptions)
def doctor(options: DoctorOptions, console: Console) -> None:
    """Check versions, devices and the bundled models, and run one tiny generation on the runtime's cache.

    With --families, a tiny random model of every tested family runs under plans
    that evict nothing (it must say what it says by itself) and that evict
    differently in every head (its logits must be those of masked entries), and
    the matrix of families is printed. --json: a list `families` of objects with
    family, verdict (supported, partly, refused or FAILED), why, planned_layers
    and transformers.
    """
    from kvsearch.errors import EnvironmentFault
    from kvsearch.jobs import doctor as jobs

    facts = jobs.doctor(options, talk=console)
    if console.as_json:
        console.print_json(facts)
    else:
        print_parts(_parts(facts), console)
    missing = [name for name, value in facts.items() if value == MISSING]
    if missing:
        raise EnvironmentFault(f"{', '.join(missing)} missing: run `pip install -e .` again where kvsearch is")
    failed = [row["family"] for row in facts.get("families", ()) if row["verdict"] == "FAILED"]
    if failed:
        raise EnvironmentFault(
            f"{', '.join(failed)}: this version of transformers ({facts['transformers']}) does otherwise than those "
            "that were tested; do not trust plans on these families"
        )


def _parts(facts: Mapping[str, Any]) -> Iterator[Any]:
    from kvsearch.report.screen import facts as lines_of
    from kvsearch.report.screen import listing

    if "families" not in facts:
        yield from lines_of(facts)
        return
    titles = ("family", "verdict", "planned layers", "why")
    table = listing(f"families, with transformers {facts['transformers']} and torch {facts['torch']}", titles)
    for row in facts["families"]:
        table.add_row(*(row[name] for name in ("family", "verdict", "planned_layers", "why")))
    yield table
