"""kvsearch validate: find out which signals of a PolyKV calibration are worth following."""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.render import print_parts
from kvsearch.jobs.validate import ValidateOptions


@command(ValidateOptions, dry_run=True)
def validate(options: ValidateOptions, console: Console) -> None:
    """Score the strategy of every signal against its inverse, a uniform strategy and random ones of the same size.

    A signal is useful if its strategy is better than its inverse, and than the uniform strategy or random ones by more
    than strategies differ by chance; unproven if it is better, but random ones may be, too; harmful if it is worse than
    the uniform one; else useless. What was found is kept in DIR/validation.json, and finished replies in
    DIR/validation, so the same command goes on where it stopped.

    Example: kvsearch validate runs/polykv --samples 40
    """
    from kvsearch.jobs import validate as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    from kvsearch.report.validation import parts

    done = jobs.validate(options, talk=console)
    if console.as_json:
        console.print_json(done.as_json())
    else:
        for at in done.now:
            print_parts(parts(done.found, at), console)
    others = ", ".join(at.size for at in done.found.budgets if at not in done.now)
    console.say(f"kept in {done.path}" + (f", beside what was found before at {others}" if others else ""))
    sizes = [f"{at.budget:g}" for at in done.now if at.ratio is None]
    if sizes:
        plan = options.directory / "plan.json"
        size = ("--budget", sizes[0]) if len(sizes) == 1 else ("--budgets", ",".join(sizes))
        console.next("select", options.directory, *size, "-o", plan)
