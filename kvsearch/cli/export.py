"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli.calibrate import PROFILE
from kvsearch.cli.common import Common, command


@command
def export(
    profile: Annotated[Path, typer.Argument(help="Directory or file that `calibrate` wrote.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file.", show_default=False)],
    common: Common,
    ratio: Annotated[
        float | None, typer.Option(help="Share of the cache to evict, 0 to 1.", show_default=False)
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Entries to keep per kv head, on average.", min=1, show_default=False)
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Prompt length the integer budgets are for.", min=1, show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the plan file.")] = False,
) -> None:
    """Write a plan that evicts a share of any prompt (--ratio) or keeps so many entries (--budget).

    Example: kvsearch export runs/snapkv --ratio 0.8 -o plan.json
    """
    from kvsearch.export.build import Target, plan_from_profile
    from kvsearch.plan import save_plan
    from kvsearch.plan.profile import load_profile

    target = Target(ratio, budget, length)
    plan = plan_from_profile(load_profile(profile / PROFILE if profile.is_dir() else profile), target)
    if not common.dry_run:
        save_plan(plan, output, overwrite=force)
    summary = {
        "plan": str(output), "total": plan.total, "length": plan.length, "scaling": plan.scaling,
        "layers": len(plan.planned_layers("prefill")), "kv_heads": plan.model.kv_heads,
    }  # fmt: skip
    if common.as_json:
        common.print_json(summary)
    else:
        mean = plan.total / (summary["layers"] * summary["kv_heads"])  # type: ignore[operator]
        common.say(
            f"{'would write' if common.dry_run else 'wrote'} {output}: {plan.total} entries, {mean:.1f} per kv head "
            f"of a {plan.length}-token prompt, {plan.scaling}"
        )
