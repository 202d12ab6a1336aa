"""kvsearch plan: make plans without calibration, change plans, compare them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.registry import view_output
from kvsearch.config.options import JobOptions, Option
from kvsearch.jobs import plan as jobs
from kvsearch.jobs.following import following
from kvsearch.plan import load_plan
from kvsearch.report.plans import DifferenceView

if TYPE_CHECKING:
    from kvsearch.cli.console import Console
    from kvsearch.jobs.plan import PlanOptions
    from kvsearch.plan import Plan

plan = typer.Typer(name="plan", no_args_is_help=True)


def make(job: Callable[..., Plan], options: PlanOptions, console: Console) -> Plan:
    """Make a plan and, but for a dry run, write it."""
    return options.make(console) if console.dry_run else job(options, reporter=console)


def make_and_show(job: Callable[..., Plan], options: PlanOptions, console: Console) -> None:
    """Make a plan, and say where it was, or in a dry run would be, written to, and how much it keeps."""
    plan = make(job, options, console)
    if console.as_json:
        phases = "both" if len(plan.phases) > 1 else next(iter(plan.phases))
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
        console.say(following("show", path))
        console.say(following("evaluate", plan.model.name, "--plan", path))


def written(plan: Plan, options: PlanOptions, console: Console) -> str:
    """Return where a plan is and how much it keeps, in words."""
    part = next(iter(plan.phases.values()))
    mean = plan.total / (len(part.planned_layers) * plan.model.kv_heads)
    of = f" of a {plan.length}-token prompt" if plan.length else ""
    verb = "would write" if console.dry_run else "wrote"
    return f"{verb} {options.output}: {plan.total} entries, {mean:.1f} per kv head{of}, {plan.scaling}"


@command(jobs.UniformOptions, dry_run=True)
def uniform(options: jobs.UniformOptions, console: Console) -> None:
    """Write a plan of one policy with the same budget for every layer and kv head.

    prefill: evict once, when the prompt is read; the cache then grows. decode: the prompt stays whole until the first
    new token; from then on one entry leaves per token. both: the cache never holds more than the budget and one entry.

    Example: kvsearch plan uniform bundled --policy h2o --budget 128 --phases both -o h2o.json
    """
    make_and_show(jobs.uniform, options, console)


@command(jobs.PyramidOptions, dry_run=True)
def pyramid(options: jobs.PyramidOptions, console: Console) -> None:
    """Write a plan of one policy with PyramidKV's budgets: many entries for the first layers, few for the last.

    Beyond what the policy always keeps, budgets fall in a straight line from layer to layer. Their total is that of
    `plan uniform` with the same --budget or --ratio. For --phases see there.

    Example: kvsearch plan pyramid bundled --policy pyramidkv --budget 64 -o pyramid.json
    """
    make_and_show(jobs.pyramid, options, console)


@command(jobs.ScaleOptions, dry_run=True)
def scale(options: jobs.ScaleOptions, console: Console) -> None:
    """Write a plan with the shape of another at another size: all budgets times one factor.

    With --budget the new budgets hold for prompts of every length, with --ratio they scale with the prompt at hand. In
    a plan with both phases, --budget and --ratio are about the prefill phase; the decode phase follows in proportion.

    Example: kvsearch plan scale plan.json --ratio 0.9 -o smaller.json
    """
    make_and_show(jobs.scale, options, console)


@command(jobs.ConvertOptions, dry_run=True)
def convert(options: jobs.ConvertOptions, console: Console) -> None:
    """Write the entries that a plan made by --ratio keeps of prompts of one length, for that length only.

    Example: kvsearch plan convert plan.json --length 8192 -o plan8192.json
    """
    make_and_show(jobs.convert, options, console)


@command(jobs.MergeOptions, dry_run=True)
def merge(options: jobs.MergeOptions, console: Console) -> None:
    """Write a plan with the policies of one plan and the budgets of another.

    Both must be of the same model and plan the same layers in the same phases, and the budgets must cover what the
    policies always keep.

    Example: kvsearch plan merge --policies searched.json --budgets lukv.json -o both.json
    """
    make_and_show(jobs.merge, options, console)


@command(jobs.BuildOptions, dry_run=True)
def build(options: jobs.BuildOptions, console: Console) -> None:
    """Write the plan of a YAML file; whatever is wrong with it is told with its line.

    Example: kvsearch plan build strategy.yaml -o plan.json
    """
    make_and_show(jobs.build, options, console)


@command(jobs.YamlOptions, dry_run=True)
def yaml(options: jobs.YamlOptions, console: Console) -> None:
    """Write a plan in YAML to read and edit: layers by range, a budget for all heads or a list, no sums to keep.

    `kvsearch plan build` makes a plan of it again, byte by byte the same one if nothing was edited.

    Example: kvsearch plan yaml plan.json -o strategy.yaml
    """
    text = options.make() if console.dry_run else jobs.yaml(options, reporter=console)
    if console.as_json:
        console.print_json({"yaml": str(options.output), "lines": text.count("\n")})
    else:
        output = options.output
        verb = "would write" if console.dry_run else "wrote"
        console.say(f"{verb} {output}, to be edited")
        if not console.dry_run:
            made = output.with_suffix(".json")
            if made.exists():
                made = made.with_stem(f"{made.stem}-edited")
            console.say(following("plan", "build", output, "-o", made))


class DiffOptions(JobOptions):
    """The plans to compare."""

    job: ClassVar[str] = "plan diff"

    before: Annotated[Path, Option("A plan.", metavar="A", argument=True)]
    after: Annotated[Path, Option("Another plan.", metavar="B", argument=True)]


@command(DiffOptions)
def diff(options: DiffOptions, console: Console) -> None:
    """Show what differs between two plans: settings, policies and their parameters, and budgets layer by layer.

    Where the plans come from is not compared. A setting that one of them does not state is shown as -.

    With --json, an object with equal (true or false), settings and budgets (lists of objects with before and after)
    and totals (by phase: those of A and B).

    Example: kvsearch plan diff plan.json smaller.json
    """
    plans = load_plan(options.before), load_plan(options.after)
    view_output(DifferenceView(plans, (str(options.before), str(options.after)))).print(console)


for verb in (uniform, pyramid, scale, convert, merge, diff, yaml, build):
    plan.command(no_args_is_help=True)(verb)
