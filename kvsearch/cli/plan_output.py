"""What is said of a plan that was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsearch.cli.console import Console
    from kvsearch.jobs.plan_files import PlanOptions
    from kvsearch.plan import Plan


def make(job: Callable[..., Plan], options: PlanOptions, console: Console) -> Plan:
    """Make a plan and, but for a dry run, write it."""
    return options.make(console) if console.dry_run else job(options, talk=console)


def make_and_show(job: Callable[..., Plan], options: PlanOptions, console: Console) -> None:
    """Make a plan, and say where it was, or in a dry run would be, written to, and how much it keeps."""
    plan = make(job, options, console)
    if console.as_json:
        phases = "both" if plan.prefill and plan.decode else "prefill" if plan.prefill else "decode"
        console.print_json(
            {
                "plan": str(options.output), "total": plan.total, "scaling": plan.scaling, "length": plan.length,
                "phases": phases, "allocation": plan.allocation.name,
            }
        )  # fmt: skip
        return
    shared = "" if plan.allocation.name == "static" else f", shared out by {plan.allocation.name}"
    console.say(f"{written(plan, options, console)}{shared}")
    say_next(plan, options.output, console)


def say_next(plan: Plan, path: Path, console: Console) -> None:
    """Say what may be done with a plan that was written."""
    if not console.dry_run:
        console.next("show", path)
        console.next("evaluate", plan.model.name, "--plan", path)


def written(plan: Plan, options: PlanOptions, console: Console) -> str:
    """Return where a plan is and how much it keeps, in words."""
    part = plan.prefill or plan.phase("decode")
    mean = plan.total / (len(part.planned_layers) * plan.model.kv_heads)
    of = f" of a {plan.length}-token prompt" if plan.length else ""
    verb = "would write" if console.dry_run else "wrote"
    return f"{verb} {options.output}: {plan.total} entries, {mean:.1f} per kv head{of}, {plan.scaling}"
