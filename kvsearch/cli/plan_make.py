"""kvsearch plan uniform, kvsearch plan pyramid: plans without calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli.common import Common, command
from kvsearch.cli.plan_output import Force, Output, check_output, deliver

Model = Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)]
PolicyName = Annotated[str, typer.Option(help="Eviction policy; see `kvsearch policies`.", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A policy parameter, as in --set window=16; repeatable.")
]
Phases = Annotated[str, typer.Option(help="When to evict: prefill, decode or both.")]
Ratio = Annotated[float | None, typer.Option(help="Share of the prompt to evict, between 0 and 1.", show_default=False)]
Budget = Annotated[int | None, typer.Option(help="Entries to keep per kv head, on average.", min=1, show_default=False)]
Length = Annotated[int | None, typer.Option(help="Prompt length that a ratio's integer budgets are for.", min=1)]
AllocationText = Annotated[
    str,
    typer.Option(
        "--allocation",
        help="What to do with the budgets: static keeps to them; adakv, cake or lava share out what they add up to "
        "anew for every prompt. With options: lava:layers=planned,floor_share=0.",
    ),
]


@command
def uniform(
    model: Model,
    policy: PolicyName,
    output: Output,
    common: Common,
    settings: Settings = None,
    phases: Phases = "prefill",
    ratio: Ratio = None,
    budget: Budget = None,
    length: Length = None,
    allocation: AllocationText = "static",
    force: Force = False,
) -> None:
    """Write a plan of one policy with the same budget for every layer and kv head.

    prefill: evict once, when the prompt is read; the cache then grows. decode: the prompt stays whole until the first
    new token; from then on one entry leaves per token. both: the cache never holds more than the budget and one entry.

    Example: kvsearch plan uniform bundled --policy h2o --budget 128 --phases both -o h2o.json
    """
    _make(model, policy, settings, phases, (budget, ratio, length), allocation, None, output, force, common)


@command
def pyramid(
    model: Model,
    policy: PolicyName,
    output: Output,
    common: Common,
    settings: Settings = None,
    phases: Phases = "prefill",
    ratio: Ratio = None,
    budget: Budget = None,
    length: Length = None,
    beta: Annotated[
        float, typer.Option(help="How many times the mean budget is of the last layer's, protected entries aside.")
    ] = 20.0,
    allocation: AllocationText = "static",
    force: Force = False,
) -> None:
    """Write a plan of one policy with PyramidKV's budgets: many entries for the first layers, few for the last.

    Beyond what the policy always keeps, budgets fall in a straight line from layer to layer. Their total is that of
    `plan uniform` with the same --budget or --ratio. For --phases see there.

    Example: kvsearch plan pyramid bundled --policy pyramidkv --budget 64 -o pyramid.json
    """
    _make(model, policy, settings, phases, (budget, ratio, length), allocation, beta, output, force, common)


def _make(
    model: str,
    policy: str,
    settings: list[str] | None,
    phases: str,
    numbers: tuple[int | None, float | None, int | None],
    allocation: str,
    beta: float | None,
    output: Path,
    force: bool,
    common: Common,
) -> None:
    from kvsearch.budgets.pyramidkv import Pyramid
    from kvsearch.budgets.uniform import Uniform
    from kvsearch.config.options import parse_setting
    from kvsearch.plan import Size, phases_of
    from kvsearch.policies.registry import create_policy
    from kvsearch.strategies.direct import check_request, direct_plan, parse_allocation

    made = create_policy(policy, dict(parse_setting(item) for item in settings or []))
    shared = parse_allocation(allocation)
    when = phases_of(phases)
    allocator = Uniform() if beta is None else Pyramid(beta, made.floor)
    size = Size(*numbers)
    check_request(made, size, shared)
    check_output(output, force)
    plan = direct_plan(common.load(model), made, size, when, allocator, shared)
    deliver(plan, output, force, common)
