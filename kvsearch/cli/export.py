"""kvsearch export: turn a profile into a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.calibration.directory import profile_file
from kvsearch.cli.common import Common, command
from kvsearch.jobs.calibrated import comma_separated

if TYPE_CHECKING:
    from kvsearch.plan import PhasePlan, Plan, Profile, Size
    from kvsearch.strategies.from_signals import Strategy

PANEL, VALIDATION = "PolyKV", "validation.json"


@command
def export(
    profile: Annotated[Path, typer.Argument(help="Directory or file that `calibrate` wrote.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file.", show_default=False)],
    common: Common,
    ratio: Annotated[
        float | None, typer.Option(help="Share of the cache to evict, 0 to 1.", show_default=False)
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Entries to keep per kv head, on average.", min=1, show_default="polykv: that of the calibration"
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Prompt length the integer budgets are for.", min=1, show_default=False)
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            help="What every layer chooses its pattern by: cosine, error, ppl or nll; none: --policy everywhere.",
            show_default="as calibrated, or the first that was measured",
            rich_help_panel=PANEL,
        ),
    ] = None,
    budget_signal: Annotated[
        str | None,
        typer.Option(
            help="What shares the budget out between layers: uniform, entropy, ppl, error, cosine, nll or one of these "
            "with -chosen or -mean.",
            show_default="as calibrated, or uniform",
            rich_help_panel=PANEL,
        ),
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(
            help="When to evict: prefill, decode or both.",
            show_default="as calibrated, or prefill",
            rich_help_panel=PANEL,
        ),
    ] = None,
    inverse_route: Annotated[
        bool, typer.Option("--inverse-route", help="A control: the worst pattern.", rich_help_panel=PANEL)
    ] = False,
    inverse_budgets: Annotated[
        bool,
        typer.Option("--inverse-budgets", help="A control: least for the most sensitive.", rich_help_panel=PANEL),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="With --route none: the pattern of all layers.", show_default="as calibrated", rich_help_panel=PANEL
        ),
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Patterns that no layer may take.", show_default=False, rich_help_panel=PANEL
        ),
    ] = None,
    least: Annotated[
        int | None,
        typer.Option(
            help="Entries per kv head that every layer gets.",
            min=0,
            show_default="a tenth of the mean",
            rich_help_panel=PANEL,
        ),
    ] = None,
    full_layers: Annotated[
        int | None,
        typer.Option(
            help="So many layers keep the whole cache, at its full cost.",
            min=0,
            show_default="none",
            rich_help_panel=PANEL,
        ),
    ] = None,
    allow_harmful: Annotated[
        bool,
        typer.Option("--allow-harmful", help="Use signals that `validate` judged harmful.", rich_help_panel=PANEL),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the plan file.")] = False,
) -> None:
    """Write a plan that evicts a share of any prompt (--ratio) or keeps so many entries (--budget).

    Of a PolyKV profile: every layer takes the pattern that its signals prefer, and the share of the budget that its
    sensitivity asks for.

    Examples: kvsearch export runs/snapkv --ratio 0.8 -o plan.json

    kvsearch export runs/polykv --budget 512 --budget-signal entropy -o plan.json
    """
    from kvsearch.plan import Size, save_plan
    from kvsearch.plan.profile import load_profile
    from kvsearch.strategies.from_profile import plan_from_profile

    found = load_profile(profile_file(profile))
    typed: dict[str, Any] = {
        "route": route, "budget_signal": budget_signal, "phases": phases, "inverse_route": inverse_route,
        "inverse_budgets": inverse_budgets, "policy": policy, "exclude": exclude, "least": least,
        "full_layers": full_layers,
    }  # fmt: skip
    if found.metadata.signals is None:
        _refuse({**typed, "allow_harmful": allow_harmful}, found)
        plan = plan_from_profile(found, Size(budget, ratio, length))
    else:
        directory = profile if profile.is_dir() else profile.parent
        size = Size(_default_budget(found) if ratio is None and budget is None else budget, ratio, length)
        plan = _strategic(found, _strategy(found, typed), size, directory, allow_harmful, common)
    if not common.dry_run:
        save_plan(plan, output, overwrite=force)
    _report(plan, output, found.metadata.signals is not None, common)


def _refuse(typed: dict[str, Any], profile: Profile) -> None:
    """UsageError if one of the options for PolyKV was given with a profile of another method."""
    from kvsearch.errors import UsageError

    given = [f"--{name.replace('_', '-')}" for name, value in typed.items() if value is not None and value is not False]
    if given:
        raise UsageError(
            f"{', '.join(given)}: only for profiles of method polykv, this one is of method {profile.metadata.method}"
        )


def _default_budget(profile: Profile) -> int:
    """The budget that was measured, where it is one."""
    from kvsearch.errors import UsageError

    measured = profile.metadata.signals.budgets if profile.metadata.signals else ()
    if len(measured) == 1:
        return measured[0]
    raise UsageError(
        f"give --budget or --ratio: the profile was measured at {', '.join(map(str, measured))} entries per kv head"
    )


def _strategy(profile: Profile, typed: dict[str, Any]) -> Strategy:
    """What was typed, or else what the calibration was told, or else the defaults of a strategy."""
    from kvsearch.errors import UsageError
    from kvsearch.signals.table import SignalTable
    from kvsearch.strategies.from_signals import UNIFORM, Strategy

    recorded = profile.metadata.provenance.settings
    route = next(iter(SignalTable(profile).routes), "none")  # cosine, the paper's, where it was measured
    asked = {"route": route, "budget_signal": UNIFORM, "phases": "prefill"}
    asked |= {name: value for name in asked if isinstance(value := recorded.get(name), str)}
    asked |= {name: typed[name] for name in asked if typed[name] is not None}
    if typed["least"] is not None and asked["budget_signal"] == UNIFORM:
        raise UsageError("--least is for budgets by a signal: name a --budget-signal")
    return Strategy(
        route=None if asked["route"] == "none" else asked["route"],
        budgets=asked["budget_signal"],
        phases=asked["phases"],
        exclude=tuple(comma_separated("--exclude", typed["exclude"]) or ()),
        full_layers=typed["full_layers"] or 0,
        **{name: typed[name] for name in ("inverse_route", "inverse_budgets", "policy", "least")},
    )


def _strategic(
    profile: Profile, strategy: Strategy, size: Size, directory: Path, allow_harmful: bool, common: Common
) -> Plan:
    """The plan of a strategy; UsageError if one of its signals was judged harmful and that is not allowed."""
    from kvsearch.errors import UsageError
    from kvsearch.runtime.plan_checks import check_plan
    from kvsearch.strategies.from_signals import strategy_plan

    plan = strategy_plan(profile, strategy, size)
    check_plan(plan, "the plan of this strategy")
    if (directory / VALIDATION).exists():
        from kvsearch.choose.verdicts import harmful

        warning = harmful(directory, strategy, plan.total / (profile.metadata.shape[0] * profile.metadata.shape[1]))
        if warning is not None and not allow_harmful:
            raise UsageError(f"{warning}; --allow-harmful to write it all the same")
        if warning is not None:
            common.warn(warning)
    return plan


def _report(plan: Plan, output: Path, strategic: bool, common: Common) -> None:
    """Say what was written; of a strategy, too, what every phase does."""
    parts = {name: part for name in ("prefill", "decode") if (part := getattr(plan, name)) is not None}
    layers = len(next(iter(parts.values())).planned_layers)
    summary = {
        "plan": str(output), "total": plan.total, "length": plan.length, "scaling": plan.scaling,
        "layers": layers, "kv_heads": plan.model.kv_heads,
    }  # fmt: skip
    if common.as_json:
        phases = {"phases": {name: _patterns(part) for name, part in parts.items()}} if strategic else {}
        common.print_json({**summary, **phases})
        return
    mean = plan.total / (layers * plan.model.kv_heads)
    common.say(
        f"{'would write' if common.dry_run else 'wrote'} {output}: {plan.total} entries, {mean:.1f} per kv head "
        f"of a {plan.length}-token prompt, {plan.scaling}"
    )
    for name, part in parts.items() if strategic else ():
        common.say(f"{name}: {_in_words(part)}")


def _patterns(phase: PhasePlan) -> dict[str, list[int]]:
    """The layers of every pattern."""
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(phase.layers):
        if layer is not None:
            found.setdefault(layer.policy.name, []).append(index)
    return found


def _in_words(phase: PhasePlan) -> str:
    from kvsearch.plan.yaml import layer_ranges

    places: list[str] = []
    for name, layers in _patterns(phase).items():
        *ranges, last = layer_ranges(layers)
        noun = "" if places else "layer " if len(layers) == 1 else "layers "
        places.append(f"{name} in {noun}{', '.join(ranges)}{' and ' if ranges else ''}{last}")
    kept = [count for layer in phase.layers if layer and layer.policy.name != "full" for count in layer.budget]
    low, high = min(kept), max(kept)
    return f"{', '.join(places)}; {low if low == high else f'{low} to {high}'} entries per kv head"
