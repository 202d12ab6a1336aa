"""kvsearch plan: make plans without calibration, change plans, compare them; what `export` prints of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsearch.cli.command import PLAN_VERBS, verb
from kvsearch.core.printed import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsearch.cli.console import Console
    from kvsearch.commands.export import ExportOptions
    from kvsearch.commands.plan import DiffOptions, PlanOptions, YamlOptions
    from kvsearch.plan import Plan

COMMANDS = "kvsearch.commands.plan"


def make_and_show(job: Callable[..., Plan], make: Callable[..., Plan], options: PlanOptions, console: Console) -> None:
    """Make a plan, and print its file, its size and the next commands; a dry run makes it without writing it."""
    from kvsearch.commands.groups import suggest_plan_commands
    from kvsearch.commands.public import run_job

    plan = run_job(make, options, console, dry=True) if console.dry_run else job(options, reporter=console)
    if console.as_json:
        phases = "both" if len(plan.phases) > 1 else next(iter(plan.phases))
        console.print_json(
            {
                "plan": str(options.output), "total": plan.total, "scaling": plan.scaling, "length": plan.length,
                "phases": phases, "allocation": plan.allocation.name,
            }
        )  # fmt: skip
        return
    of = f" of a {plan.length}-token prompt" if plan.length else ""
    shared = "" if plan.allocation.name == "static" else f", shared out by {plan.allocation.name}"
    verb = "would write" if console.dry_run else "wrote"
    size = f"{plan.total} entries, {plan.total / plan.heads:.1f} per kv head{of}, {plan.scaling}{shared}"
    console.say(f"{verb} {options.output}: {size}")
    if not console.dry_run:
        for line in suggest_plan_commands(options.output, plan.model.name, options.evaluation_options()):
            console.say(line)


def run_export(options: ExportOptions, console: Console) -> None:
    """Write a plan or the files of a target, and print the files, their losses and how to load them."""
    from kvsearch.commands import export as command
    from kvsearch.commands.public import run_job

    if options.to == command.PLAN_TARGET:
        make_and_show(command.export, command.make_plan, options, console)
        return
    if console.dry_run:
        exported = run_job(command.make_target_files, options, console, dry=True)
    else:
        exported = command.export_to(options, reporter=console)
    usage = [line.format(path=str(options.output)) for line in exported.usage]
    if console.as_json:
        losses = [{"what": what, "entries": entries} for what, entries in exported.losses.items()]
        files = [str(options.output / name) for name in exported.files]
        saved = None if exported.model is None else exported.model.name
        summary = {
            "target": options.to, "files": files, "model": saved, "losses": losses, "total": exported.total,
            "usage": usage,
        }  # fmt: skip
        console.print_json(summary)
        return
    verb = "would write" if console.dry_run else "wrote"
    lost = "nothing is lost" if not exported.losses else f"{pluralize(len(exported.losses), 'thing')} lost"
    saved = (
        "" if exported.model is None else f", and {exported.model.name} itself in {exported.model.fingerprint.dtype}"
    )
    console.say(f"{verb} {options.output} for {options.to}{saved}: {lost}")
    for line in usage:
        console.say(f"  {line}")


@verb(f"{COMMANDS}:UniformOptions", group=PLAN_VERBS, dry_run=True)
def uniform(options: PlanOptions, console: Console) -> None:
    """Write a plan of one policy with the same budget for every layer and kv head.

    prefill: evict once, when the prompt is read; the cache then grows. decode: the prompt stays whole until the first
    new token; from then on one entry leaves per token. both: the cache never holds more than the budget and one entry.

    Example: kvsearch plan uniform bundled --policy h2o --budget 128 --phases both -o h2o.json
    """
    from kvsearch.commands import plan as command

    make_and_show(command.uniform, command.make_direct, options, console)


@verb(f"{COMMANDS}:PyramidOptions", group=PLAN_VERBS, dry_run=True)
def pyramid(options: PlanOptions, console: Console) -> None:
    """Write a plan of one policy with PyramidKV's budgets: many entries for the first layers, few for the last.

    Beyond what the policy always keeps, budgets fall in a straight line from layer to layer. Their total is that of
    `plan uniform` with the same --budget or --ratio. For --phases see there.

    Example: kvsearch plan pyramid bundled --policy pyramidkv --budget 64 -o pyramid.json
    """
    from kvsearch.commands import plan as command

    make_and_show(command.pyramid, command.make_direct, options, console)


@verb(f"{COMMANDS}:ScaleOptions", group=PLAN_VERBS, dry_run=True)
def scale(options: PlanOptions, console: Console) -> None:
    """Write a plan with the shape of another at another size: all budgets times one factor.

    With --budget the new budgets hold for prompts of every length, with --ratio they scale with the prompt at hand. In
    a plan with both phases, --budget and --ratio are about the prefill phase; the decode phase follows in proportion.

    Example: kvsearch plan scale plan.json --ratio 0.9 -o smaller.json
    """
    from kvsearch.commands import plan as command

    make_and_show(command.scale, command.make_scaled, options, console)


@verb(f"{COMMANDS}:BuildOptions", group=PLAN_VERBS, dry_run=True)
def build(options: PlanOptions, console: Console) -> None:
    """Write the plan of a YAML file; whatever is wrong with it is told with its line.

    Example: kvsearch plan build strategy.yaml -o plan.json
    """
    from kvsearch.commands import plan as command

    make_and_show(command.build, command.make_built, options, console)


@verb(f"{COMMANDS}:YamlOptions", group=PLAN_VERBS, dry_run=True)
def yaml(options: YamlOptions, console: Console) -> None:
    """Write a plan in YAML to read and edit: layers by range, a budget for all heads or a list, no sums to keep.

    `kvsearch plan build` makes a plan of it again, byte by byte the same one if nothing was edited.

    Example: kvsearch plan yaml plan.json -o strategy.yaml
    """
    from kvsearch.commands import plan as command

    text = options.make() if console.dry_run else command.yaml(options, reporter=console)
    if console.as_json:
        console.print_json({"yaml": str(options.output), "lines": text.count("\n")})
    else:
        verb = "would write" if console.dry_run else "wrote"
        console.say(f"{verb} {options.output}, to be edited")
        if not console.dry_run:
            console.say(options.next_command())


@verb(f"{COMMANDS}:DiffOptions", group=PLAN_VERBS)
def diff(options: DiffOptions, console: Console) -> None:
    """Show what differs between two plans: settings, policies and their parameters, and budgets layer by layer.

    Where the plans come from is not compared. A setting that one of them does not state is shown as -.

    With --json, an object with equal (true or false), settings and budgets (lists of objects with before and after)
    and totals (by phase: the entries of A and B).

    Example: kvsearch plan diff plan.json smaller.json
    """
    from kvsearch.commands import plan as command

    difference = command.diff(options, reporter=console)
    console.print_result(difference.as_json, difference.parts)
