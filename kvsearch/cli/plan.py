"""kvsearch plan: make plans without calibration, change plans, compare them."""

from __future__ import annotations

import typer

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.cli.plan_diff import diff
from kvsearch.cli.plan_output import make_and_show
from kvsearch.jobs import plan as jobs

plan = typer.Typer(
    name="plan", help="Make plans without calibration, change plans, compare them.", no_args_is_help=True
)


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

    A profile, or the directory of one, is exported at --ratio first.

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
    """Write the plan of a YAML file; whatever is wrong with it is told with its line, what is doubtful is warned of.

    Example: kvsearch plan build strategy.yaml -o plan.json
    """
    for line in () if console.as_json else jobs.uncounted(options.read()):
        console.say(line)
    make_and_show(jobs.build, options, console)


@command(jobs.YamlOptions, dry_run=True)
def yaml(options: jobs.YamlOptions, console: Console) -> None:
    """Write a plan in YAML to read and edit: layers by range, a budget for all heads or a list, no sums to keep.

    `kvsearch plan build` makes a plan of it again, byte by byte the same one if nothing was edited.

    Example: kvsearch plan yaml plan.json -o strategy.yaml
    """
    text = options.make() if console.dry_run else jobs.yaml(options, talk=console)
    if console.as_json:
        console.print_json({"yaml": str(options.output), "lines": text.count("\n")})
    else:
        output, verb = options.output, "would write" if console.dry_run else "wrote"
        console.say(f"{verb} {output}, to be edited")
        if not console.dry_run:
            made = output.with_suffix(".json")
            console.next(
                "plan", "build", output, "-o", made.with_stem(f"{made.stem}-edited") if made.exists() else made
            )


for verb in (uniform, pyramid, scale, convert, merge, diff, yaml, build):
    plan.command(no_args_is_help=True)(verb)
