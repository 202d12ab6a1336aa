"""kvsearch plan scale, convert, merge: plans made of other plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsearch.calibration.directory import PROFILE
from kvsearch.cli.common import Common, checked_plan, command
from kvsearch.cli.plan_output import Force, Output, check_output, deliver

if TYPE_CHECKING:
    from kvsearch.plan import Plan


@command
def scale(
    plan: Annotated[Path, typer.Argument(help="The plan to scale.", show_default=False)],
    output: Output,
    common: Common,
    budget: Annotated[
        int | None, typer.Option(help="Entries to keep per kv head, on average.", min=1, show_default=False)
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Share of the prompt to evict, between 0 and 1.", show_default=False)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Prompt length the integer budgets are for.", min=1, show_default="that of the plan"),
    ] = None,
    force: Force = False,
) -> None:
    """Write a plan with the shape of another at another size: all budgets times one factor.

    With --budget the new budgets hold for prompts of every length, with --ratio they scale with the prompt at hand. In
    a plan with both phases, --budget and --ratio are about the prefill phase; the decode phase follows in proportion.

    Example: kvsearch plan scale plan.json --ratio 0.9 -o smaller.json
    """
    from kvsearch.plan import scale as scaled

    check_output(output, force)
    deliver(scaled(checked_plan(plan), budget=budget, ratio=ratio, length=length), output, force, common)


@command
def convert(
    plan: Annotated[
        Path, typer.Argument(help="A plan that scales with the prompt, or a profile with --ratio.", show_default=False)
    ],
    length: Annotated[int, typer.Option(help="Prompt length, in tokens.", min=1, show_default=False)],
    output: Output,
    common: Common,
    ratio: Annotated[
        float | None, typer.Option(help="With a profile: share of the cache to evict.", show_default=False)
    ] = None,
    force: Force = False,
) -> None:
    """Write the entries that a plan made by --ratio keeps of prompts of one length, for that length only.

    A profile, or the directory of one, is exported at --ratio first.

    Example: kvsearch plan convert plan.json --length 8192 -o plan8192.json
    """
    from kvsearch.plan import convert as converted

    check_output(output, force)
    deliver(converted(_plan_at(plan, ratio), length), output, force, common)


@command
def merge(
    policies: Annotated[Path, typer.Option(help="Take the policies of this plan.", show_default=False)],
    budgets: Annotated[Path, typer.Option(help="Take the budgets of this plan, and all else.", show_default=False)],
    output: Output,
    common: Common,
    force: Force = False,
) -> None:
    """Write a plan with the policies of one plan and the budgets of another.

    Both must be of the same model and plan the same layers in the same phases, and the budgets must cover what the
    policies always keep.

    Example: kvsearch plan merge --policies searched.json --budgets lukv.json -o both.json
    """
    from kvsearch.plan import merge as merged

    check_output(output, force)
    deliver(merged(checked_plan(policies), checked_plan(budgets)), output, force, common)


def _plan_at(path: Path, ratio: float | None) -> Plan:
    """The plan in a file, or that of a profile at `ratio`."""
    from kvsearch.errors import UsageError
    from kvsearch.plan import Size, load_profile
    from kvsearch.strategies.from_profile import plan_from_profile

    file = path / PROFILE if path.is_dir() else path
    if file.suffix == Path(PROFILE).suffix:
        profile = load_profile(file)
        if ratio is None:
            raise UsageError(f"{file} is a profile: give the --ratio at which to make a plan of it")
        return plan_from_profile(profile, Size(ratio=ratio))
    plan = checked_plan(file)
    if ratio is not None:
        raise UsageError(f"{file} is a plan, and --ratio is for profiles: give another ratio by `kvsearch plan scale`")
    return plan
