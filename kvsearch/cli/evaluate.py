"""kvsearch evaluate: score methods and plans on the same samples, at the same number of entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.evaluate import EvaluateOptions

if TYPE_CHECKING:
    from kvsearch.jobs.evaluate import Evaluated


@command(EvaluateOptions, dry_run=True)
def evaluate(options: EvaluateOptions, console: Console) -> None:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With --output, a run that is interrupted goes on where it stopped when the same command is given again. --tasks
    ppl:FILE measures perplexity: contexts of --length tokens are compressed, what follows them is predicted.

    Example: kvsearch evaluate bundled --methods uniform,pyramid,adakv,lava --budgets 64,128 -o runs/table
    """
    from kvsearch.jobs import evaluate as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options))
        return
    found = jobs.evaluate(options, talk=console)
    if isinstance(found, jobs.Evaluated) and found.comparison.doubt is not None:
        console.warn(found.comparison.doubt)
    if console.as_json:
        console.print_json(found.as_json())
    elif isinstance(found, jobs.Evaluated):
        _show(found, console)
    else:
        from kvsearch.report.perplexity import perplexity_table

        console.out.print(perplexity_table(found.result, found.phases))
    if options.output is not None:
        console.say(f"kept in {options.output}")


def _show(found: Evaluated, console: Console) -> None:
    from kvsearch.evaluation.grid import grid_table, needle_grids
    from kvsearch.report.losses import losses_table
    from kvsearch.report.table_files import all_tables, on_screen

    result = found.comparison
    for table in all_tables(result, found.columns):
        console.out.print(on_screen(table))
    for method, grid in needle_grids(result.samples).items():
        console.out.print(grid_table(f"{method} ({result.protocol}, phases: {result.phases})", grid))
    if found.losses is not None:
        console.out.print(losses_table(f"{result.model}, phases: {result.phases}", result.protocol, found.losses))
