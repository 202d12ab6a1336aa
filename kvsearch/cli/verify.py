"""kvsearch verify: is all that a run has written whole?"""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import show_view
from kvsearch.errors import UsageError
from kvsearch.jobs.verify import VerifyOptions


@command(VerifyOptions)
def verify(options: VerifyOptions, console: Console) -> None:
    """Check that all that runs have written is whole: checksums, ledgers, schemas, sums, weights.

    For every artefact it says what it is and whether it is whole, unfinished or damaged, and what to do. Exit code 2
    if anything is damaged. No model is loaded, and nothing is written.

    Example: kvsearch verify runs/best plan.json
    """
    from kvsearch.jobs import verify as jobs
    from kvsearch.report.numbers import counted

    found = jobs.verify(options, talk=console)
    show_view(found, console)
    if found.damaged:
        number, first = len(found.damaged), found.damaged[0]
        count = f"{number} of {counted(len(found.artefacts), 'artefact')} {'is' if number == 1 else 'are'} damaged"
        raise UsageError(f"{count}, the first is {first.path}: {first.problem}; {first.remedy}")
