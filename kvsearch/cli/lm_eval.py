"""kvsearch lm-eval: tasks of lm-evaluation-harness under a plan."""

from __future__ import annotations

from typing import Any

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.lm_eval import LmEvalOptions


@command(LmEvalOptions, dry_run=True)
def lm_eval(options: LmEvalOptions, console: Console) -> None:
    """Run tasks of lm-evaluation-harness on the cache that a plan leaves (needs the extra `lm-eval`).

    Example: kvsearch lm-eval bundled --plan plan.json --tasks arc_easy --limit 100
    """
    from kvsearch.jobs import lm_eval as jobs

    jobs.prepare_harness(options.offline, console.quiet, console.verbose)
    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    results = jobs.lm_eval(options, talk=console)
    if console.as_json:
        console.print_json(results)
    else:
        _show(results, console)


def _show(results: dict[str, Any], console: Console) -> None:
    from kvsearch.lm_eval.package import make_table

    for column in ("results", "groups"):
        if results.get(column):
            console.out.print(make_table(results, column), soft_wrap=True)
    made = results["kvsearch"]
    console.out.print(f"plan {made['plan_sha256'][:12]}, {made['protocol']}; the cache held, mean per prompt:")
    for task, held in made["held"].items():
        share = held["entries"] / held["full_entries"]
        console.out.print(
            f"{task}: {held['entries']:.0f} of {held['full_entries']:.0f} entries ({share:.3f}), prompts of "
            f"{held['tokens']:.0f} tokens"
        )
