"""kvsearch show: what is in a plan or a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.cli.calibrate_run import profile_file
from kvsearch.cli.common import Common, checked_plan, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import JustifyMethod
    from rich.table import Table

    from kvsearch.plan import AllocationSpec, Plan, Profile

STABILITY_SHOWN = (0.5, 0.8, 0.9)


@command
def show(
    path: Annotated[Path, typer.Argument(help="A plan, a profile, or the directory of one.", show_default=False)],
    common: Common,
    ratio: Annotated[float, typer.Option(help="Global eviction ratio at which a profile is shown.")] = 0.8,
    plan: Annotated[
        Path | None, typer.Option(help="With a profile: what this plan loses, layer by layer.", show_default=False)
    ] = None,
) -> None:
    """Show a plan or a profile: tables and a heat map of layers and heads.

    For a profile: local eviction ratios and whether they are stable across questions and texts; of LU-KV, how far the
    policy's ranking is from the oracle's, and the eviction loss of uniform budgets and of LU-KV's; of a dynamic method,
    how many entries a static table moves. Of PolyKV: what every pattern does to every layer, without --ratio.
    """
    from kvsearch.plan.profile import load_profile

    file = profile_file(path)
    if file.suffix == ".json":
        _show_plan(checked_plan(file), common)
    else:
        _show_profile(load_profile(file), ratio, checked_plan(plan) if plan is not None else None, common)


def _show_plan(plan: Plan, common: Common) -> None:
    if common.as_json:
        common.print_json(plan.model_dump(mode="json"))
        return
    import numpy as np

    from kvsearch.cli.heatmap import heatmap
    from kvsearch.plan.schema import STATIC

    facts: dict[str, Any] = {
        "model": plan.model.short(), "method": plan.provenance.method, "scaling": plan.scaling,
        "length": plan.length, "floor": plan.floor,
    }  # fmt: skip
    facts |= {} if plan.allocation.name == STATIC else {"allocation": _shared(plan.allocation)}
    for phase in ("prefill", "decode"):
        part = getattr(plan, phase)
        if part is None:
            continue
        layers = part.planned_layers
        each = [f"{p.policy.name} {p.policy.params}" for p in part.layers if p is not None]
        policies = sorted(set(each))
        alone = [index for index, layer in enumerate(part.layers) if layer is None]
        own = {"phase": phase, "total": f"{part.total} entries", "policy": "; ".join(policies)}
        show_facts({**facts, **own, **({"layers left alone": alone} if alone else {})}, common)
        budgets = np.array([part.budgets[layer] for layer in layers])
        shown = heatmap(f"{phase}: entries per layer and kv head", budgets, layers)
        names = [p.policy.name for p in part.layers if p is not None]
        if len(set(names)) < len(policies):
            names = each  # of one pattern there are several settings
        common.out.print(_with_column(shown, "pattern", names) if len(policies) > 1 else shown)


def _with_column(table: Table, header: str, cells: Sequence[str]) -> Table:
    """The table with one more column of words at its right."""
    from rich.table import Table
    from rich.text import Text

    wider = Table(title=table.title, title_justify=table.title_justify, box=table.box, padding=table.padding)
    for column in table.columns:
        wider.add_column(column.header, justify=column.justify)
    wider.add_column(f"  {header}", overflow="fold")
    for row in zip(*(column.cells for column in table.columns), cells, strict=True):
        wider.add_row(*row[:-1], Text(f"  {row[-1]}"))
    return wider


def _shared(allocation: AllocationSpec) -> str:
    """An allocation other than "static", and how to read the budgets then."""
    meaning = "budgets say what the entries of a prompt are shared out from, not what a head keeps"
    return f"{allocation.name} {allocation.params}: {meaning}"


def _show_profile(profile: Profile, ratio: float, plan: Plan | None, common: Common) -> None:
    from kvsearch.cli.show_dynamic import is_dynamic, show_dynamic
    from kvsearch.cli.show_signals import show_signals

    if profile.metadata.signals is not None:
        show_signals(profile, common, plan is not None)
        return
    if is_dynamic(profile):
        show_dynamic(profile, ratio, common, plan is not None)
        return
    import numpy as np

    from kvsearch.calibration.analysis import lost_mass, ranking_gap, stability
    from kvsearch.cli.heatmap import heatmap
    from kvsearch.plan.schema import STATIC

    metadata = profile.metadata
    ratios = profile.local_ratios(ratio)
    stable = [stability(profile, at) for at in STABILITY_SHOWN]
    losses = {
        "uniform": lost_mass(profile, np.full(ratios.shape, 1 - ratio)),
        metadata.method: lost_mass(profile, 1 - ratios),
    }
    if plan is not None:
        metadata.model.require(plan.model, "this profile")
        if plan.allocation.name != STATIC:
            common.warn(f"the loss shown for the plan is that of its budgets without allocation {plan.allocation.name}")
        budgets, length = plan.budgets("prefill"), plan.length or metadata.length
        everything = (length,) * metadata.model.kv_heads  # what a layer outside the plan keeps
        kept = np.array([budgets[layer] or everything for layer in metadata.layers], dtype=float)
        losses["plan"] = lost_mass(profile, kept / length)
    if common.as_json:
        common.print_json(
            {
                "metadata": metadata.model_dump(mode="json"), "ratio": ratio, "local_ratios": ratios.tolist(),
                "stability": [{**_without_nan(s), "verdict": s.verdict} for s in stable],
                "ranking_gap": ranking_gap(profile).tolist(),
                "eviction_loss": {name: loss.tolist() for name, loss in losses.items()},
            }
        )  # fmt: skip
        return
    show_facts(
        {
            "model": metadata.model.short(), "method": metadata.method, "questions": metadata.questions,
            "policy": f"{metadata.policy.name} {metadata.policy.params}", "length": f"{metadata.length} tokens",
            "data": metadata.provenance.settings.get("data"),
        },
        common,
    )  # fmt: skip
    layers = metadata.layers
    common.out.print(heatmap(f"local eviction ratio at {ratio:g}", ratios, layers, "{:.2f}", "mean"))
    common.out.print(heatmap("recall lost to the oracle ranking", ranking_gap(profile), layers, "{:.3f}", "mean"))
    common.out.print(_loss_table(losses, layers, ratio))
    common.out.print(_recall_table(profile))
    common.out.print(_stability_table(stable))
    common.out.print(f"at {stable[1].ratio:g}: {stable[1].verdict}", markup=False)


def _without_nan(stable: Any) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in stable.__dict__.items()}


def show_facts(facts: dict[str, Any], common: Common) -> None:
    """Print names and values, one pair a line, values aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        common.out.print(f"{name:<{width}}  {value}", markup=False, soft_wrap=True)


def plain_table(title: str, columns: Sequence[str], justify: JustifyMethod = "right") -> Table:
    """An empty table in the style of all results."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        table.add_column(column, justify=justify, overflow="fold")  # on a narrow page, too, every digit is shown
    return table


def _loss_table(losses: dict[str, Any], layers: Any, ratio: float) -> Any:
    table = plain_table(f"importance evicted at {ratio:g}, share of the model's", ["layer", *losses])
    for row, layer in enumerate(layers):
        table.add_row(str(layer), *(f"{loss[row].sum():.4f}" for loss in losses.values()))
    table.add_row("all", *(f"{loss.sum():.4f}" for loss in losses.values()), style="bold")
    return table


def _recall_table(profile: Profile) -> Any:
    shown = (1, 2, 5, 10, 20, 50)
    table = plain_table("importance kept at a budget, mean over heads", ["ranking", *(f"{at}%" for at in shown)])
    for label, name in (("policy", "recall"), ("oracle", "oracle_recall")):
        curve = profile.arrays[name].mean(axis=(0, 1))
        table.add_row(label, *(f"{curve[at]:.3f}" for at in shown))
    return table


def _stability_table(stable: list[Any]) -> Any:
    table = plain_table(
        "rank correlation of local ratios", ["ratio", "questions of one text", "texts", "odd/even questions"]
    )
    for s in stable:
        table.add_row(f"{s.ratio:g}", f"{s.questions:.2f}", f"{s.texts:.2f}", f"{s.halves:.2f}")
    return table
