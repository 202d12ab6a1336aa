"""What the `kvsearch plan` commands that write a plan share: where to, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsearch.cli.common import Common
from kvsearch.plan.files import check_output as check_output

if TYPE_CHECKING:
    from kvsearch.plan import Plan

Output = Annotated[Path, typer.Option("--output", "-o", help="The plan file.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace the plan file.")]


def deliver(plan: Plan, output: Path, force: bool, common: Common) -> None:
    """Write `plan`, or with --dry-run only say so; UsageError if its parts do not fit together."""
    from kvsearch.plan import save_plan
    from kvsearch.runtime.plan_checks import check_plan

    check_plan(plan, f"the plan for {output}")
    if not common.dry_run:
        save_plan(plan, output, overwrite=force)
    if common.as_json:
        phases = "both" if plan.prefill and plan.decode else "prefill" if plan.prefill else "decode"
        common.print_json(
            {
                "plan": str(output), "total": plan.total, "scaling": plan.scaling, "length": plan.length,
                "phases": phases, "allocation": plan.allocation.name,
            }
        )  # fmt: skip
    else:
        common.say(f"{'would write' if common.dry_run else 'wrote'} {output}: {_size(plan)}")


def _size(plan: Plan) -> str:
    part = plan.prefill or plan.phase("decode")
    mean = plan.total / (len(part.planned_layers) * plan.model.kv_heads)
    of = f" of a {plan.length}-token prompt" if plan.length else ""
    shared = "" if plan.allocation.name == "static" else f", shared out by {plan.allocation.name}"
    return f"{plan.total} entries, {mean:.1f} per kv head{of}, {plan.scaling}{shared}"
