"""kvsearch plan yaml, kvsearch plan build: a plan as people read and edit it, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsearch.cli.common import Common, command
from kvsearch.cli.plan_output import Force, Output, check_output, deliver

if TYPE_CHECKING:
    from kvsearch.plan import PhasePlan, Plan


@command
def yaml(
    plan: Annotated[Path, typer.Argument(help="The plan file.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The YAML file.", show_default=False)],
    common: Common,
    force: Annotated[bool, typer.Option("--force", help="Replace the YAML file.")] = False,
) -> None:
    """Write a plan in YAML to read and edit: layers by range, a budget for all heads or a list, no sums to keep.

    `kvsearch plan build` makes a plan of it again, byte by byte the same one if nothing was edited.

    Example: kvsearch plan yaml plan.json -o strategy.yaml
    """
    from kvsearch.plan import load_plan
    from kvsearch.plan.files import atomic_write
    from kvsearch.plan.yaml import plan_to_yaml

    check_output(output, force)
    text = plan_to_yaml(load_plan(plan))
    if not common.dry_run:
        atomic_write(output, text.encode(), overwrite=force)
    if common.as_json:
        common.print_json({"yaml": str(output), "lines": text.count("\n")})
    else:
        verb = "would write" if common.dry_run else "wrote"
        common.say(f"{verb} {output}; next: edit it, then kvsearch plan build {output} -o plan.json")


@command
def build(
    strategy: Annotated[Path, typer.Argument(help="A YAML file as `plan yaml` writes it.", show_default=False)],
    output: Output,
    common: Common,
    force: Force = False,
) -> None:
    """Write the plan of a YAML file; whatever is wrong with it is told with its line, what is doubtful is warned of.

    Example: kvsearch plan build strategy.yaml -o plan.json
    """
    from kvsearch.errors import UsageError
    from kvsearch.plan.files import read_bytes
    from kvsearch.strategies.from_yaml import plan_from_yaml

    check_output(output, force)
    data = read_bytes(strategy)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{strategy} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error
    plan = plan_from_yaml(text, str(strategy))
    if not common.as_json:
        for line in _uncounted(plan):
            common.say(line)
    for line in _disagreements(plan):
        common.warn(line)
    deliver(plan, output, force, common)


def _uncounted(plan: Plan) -> Iterator[str]:
    """What no total counts, by phase."""
    for name, part in _phases(plan):
        if whole := len(part.layers) - len(part.planned_layers):
            keep = "layer keeps its" if whole == 1 else "layers keep their"
            yield f"{name}: {whole} {keep} full cache, which no total counts"


def _disagreements(plan: Plan) -> Iterator[str]:
    """Where phases, budgets and length do not fit together, which may be meant."""
    totals = {name: part.total for name, part in _phases(plan)}
    if len(set(totals.values())) > 1:
        yield (
            f"prefill budgets add up to {totals['prefill']} entries, decode budgets to {totals['decode']}: the total "
            "of the plan is that of prefill alone"
        )
    for name, part in _phases(plan):
        kept = [(layer.policy.name, entries) for layer in part.layers if layer for entries in layer.budget]
        above = sum(plan.length is not None and entries > plan.length for _, entries in kept)
        if above:
            yield (
                f"{name}: {above} budgets are above the length of {plan.length} tokens, so the total counts more than "
                "there is to keep"
            )
        if plan.length is None and any(policy == "full" for policy, _ in kept):
            yield f"{name}: policy full keeps a whole prompt, whatever its budget counts: give a length to check it by"


def _phases(plan: Plan) -> list[tuple[str, PhasePlan]]:
    return [(name, part) for name in ("prefill", "decode") if (part := getattr(plan, name)) is not None]
