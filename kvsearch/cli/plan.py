"""kvsearch plan: make plans without calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli.common import Common, command

plan_app = typer.Typer(help="Make plans without calibration.", no_args_is_help=True)


@command
def uniform(
    model: Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)],
    policy: Annotated[str, typer.Option(help="Eviction policy; see `kvsearch policies`.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file.", show_default=False)],
    common: Common,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A policy parameter, as in --set window=16; repeatable.")
    ] = None,
    phases: Annotated[str, typer.Option(help="When to evict: prefill, decode or both.")] = "prefill",
    ratio: Annotated[
        float | None, typer.Option(help="Share of the prompt to evict, between 0 and 1.", show_default=False)
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Entries to keep per kv head.", min=1, show_default=False)] = None,
    length: Annotated[
        int | None, typer.Option(help="Prompt length that a ratio's integer budgets are for.", min=1)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the plan file.")] = False,
) -> None:
    """Write a plan of one policy with the same budget for every layer and kv head.

    prefill: evict once, when the prompt is read; the cache then grows. decode: the prompt stays whole until the first
    new token; from then on one entry leaves per token. both: the cache never holds more than the budget and one entry.

    Example: kvsearch plan uniform bundled --policy h2o --budget 128 --phases both -o h2o.json
    """
    from kvsearch.calibrate.recipe import parse_setting
    from kvsearch.errors import UsageError
    from kvsearch.export.build import Target
    from kvsearch.export.uniform import PHASES, check_request, uniform_plan
    from kvsearch.naming import suggest
    from kvsearch.plan import save_plan
    from kvsearch.plan.files import check_target
    from kvsearch.policies.registry import create_policy

    made = create_policy(policy, dict(parse_setting(item) for item in settings or []))
    if phases not in PHASES:
        raise UsageError(f"unknown phases {phases!r}{suggest(phases, list(PHASES))}")
    target = Target(ratio, budget, length)
    check_request(made, target)
    if not force and output.exists():
        raise UsageError(f"{output} exists: choose another file, or --force to replace it")
    check_target(output)
    plan = uniform_plan(common.load(model), made, target, PHASES[phases])
    if not common.dry_run:
        save_plan(plan, output, overwrite=force)
    if common.as_json:
        common.print_json({"plan": str(output), "total": plan.total, "scaling": plan.scaling, "phases": phases})
    else:
        common.say(f"{'would write' if common.dry_run else 'wrote'} {output}: {plan.total} entries, {plan.scaling}")


plan_app.command("uniform", no_args_is_help=True)(uniform)
