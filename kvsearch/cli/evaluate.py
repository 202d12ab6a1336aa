"""kvsearch evaluate: score methods and plans on the same samples, at the same number of entries."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import print_parts
from kvsearch.errors import IncompatibleError
from kvsearch.jobs.evaluate import EvaluateOptions


@command(EvaluateOptions, dry_run=True)
def evaluate(options: EvaluateOptions, console: Console) -> None:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With --output, a run that is interrupted goes on where it stopped when the same command is given again. --tasks
    ppl:FILE measures perplexity: contexts of --length tokens are compressed, what follows them is predicted. Where the
    full cache itself scores next to nothing, the exit code is 4: nothing is shown by such questions.

    Example: kvsearch evaluate bundled --methods uniform,pyramid,adakv,lava --budgets 64,128 -o runs/table
    """
    from kvsearch.jobs import evaluate as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    found = jobs.evaluate(options, talk=console)
    if console.as_json:
        console.print_json(found.as_json())
    elif isinstance(found, jobs.Evaluated):
        from kvsearch.report.evaluation import parts
        from kvsearch.report.needle import needle_grids

        print_parts(
            parts(found.comparison, needle_grids(found.comparison.samples), found.losses, found.columns), console
        )
    else:
        from kvsearch.report.perplexity import perplexity_rows, perplexity_table

        console.out.print(perplexity_table(found.result, perplexity_rows(found.result), found.phases))
    if options.output is not None:
        console.say(f"kept in {options.output}")
    if isinstance(found, jobs.Evaluated) and found.comparison.doubt is not None:
        raise IncompatibleError(found.comparison.doubt)
