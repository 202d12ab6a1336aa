"""What `show` prints of a PolyKV profile: the signals of every layer and pattern, in each phase and at each budget."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvsearch.cli.common import Common
from kvsearch.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from kvsearch.plan import Phase, Profile
    from kvsearch.signals.table import SignalTable

TITLES = {
    "cosine": "cosine of attention outputs with those of the full cache",
    "ppl": "what perplexity gains",
    "error": "relative distance of attention outputs from those of the full cache",
    "nll": "nats per token that are lost",
}
PREFERRED = ("cosine", "ppl")  # the paper's; the others are shown where none of them was measured
MOST_DECIMALS = 5
NOISE = 9  # decimals from which on differences are rounding
BEST, FULL = "*", "full"
WIDEST = 10_000  # columns of a page on which any table fits


def show_signals(profile: Profile, common: Common, with_plan: bool = False) -> None:
    """Print the means of the signals over all samples; a star is at the best pattern of a layer.

    Raises:
        UsageError: a plan was to be judged, which takes the importance of entries.
    """
    from kvsearch.signals.table import SignalTable

    if with_plan:
        raise UsageError("--plan needs a LU-KV profile: a polykv profile does not say what entries are worth")
    table = SignalTable(profile)
    if common.as_json:
        common.print_json(_as_json(table))
        return
    _print_facts(table, common)
    measures = [name for name in PREFERRED if name in table.routes] or list(table.routes)
    for phase in table.axes.phases:
        for budget in table.axes.budgets if measures else ():
            for measure in measures:
                _print_title(f"{phase} at {budget} entries per kv head: {TITLES[measure]}", common)
                for part in _by_pattern(table, measure, phase, budget, common, with_entropy=measure == measures[0]):
                    common.out.print(part)
        if not measures:
            _print_title(f"{phase}: entropy of attention", common)
            common.out.print(_by_layer(table, phase))
    if measures:
        _print_title(f"{BEST} the best pattern of a layer", common)


def _print_title(text: str, common: Common) -> None:
    """Print a line that may be longer than the table below it is wide."""
    common.out.print(text, markup=False, soft_wrap=True)


def _as_json(table: SignalTable) -> dict[str, Any]:
    names, routes, axes = table.patterns, table.routes, table.axes
    means: list[dict[str, Any]] = []
    for phase in axes.phases:
        for budget in axes.budgets:
            best = {name: _best(table, name, phase, budget) for name in routes}
            means.append(
                {
                    "phase": phase, "budget": budget,
                    "signals": {name: table.measured(name, phase, budget).tolist() for name in routes},
                    "best": {name: [None if at is None else names[at] for at in best[name]] for name in routes},
                }
            )  # fmt: skip
    entropies = {phase: _entropy(table, phase) for phase in axes.phases}
    return {
        "metadata": table.profile.metadata.model_dump(mode="json"), "perplexity": _perplexity(table),
        "patterns": names, "means": means,
        "entropies": {phase: {name: at.tolist() for name, at in found.items()} for phase, found in entropies.items()},
    }  # fmt: skip


def _print_facts(table: SignalTable, common: Common) -> None:
    from kvsearch.cli.show import show_facts

    metadata, axes = table.profile.metadata, table.axes
    perplexity = _perplexity(table)
    facts = {
        "model": metadata.model.short(), "method": metadata.method, "questions": metadata.questions,
        "policy": f"{metadata.policy.name} {metadata.policy.params}, where no signal chooses",
        "length": f"{metadata.length} tokens", "data": metadata.provenance.settings.get("data"),
        "protocol": axes.protocol, "signals": ", ".join([*table.routes, *_entropy(table, axes.phases[0])]),
    }  # fmt: skip
    facts |= {} if perplexity is None else {"perplexity": f"{perplexity:.6g} under the full cache"}
    show_facts(facts, common)


def _perplexity(table: SignalTable) -> float | None:
    """Perplexity under the full cache, where losses were measured."""
    return table.perplexity if "ppl" in table.routes else None


def _entropy(table: SignalTable, phase: Phase) -> dict[str, np.ndarray]:
    """Every reading of attention entropy that was measured, [L]; it does not depend on the budget."""
    from kvsearch.signals.table import ENTROPIES

    names = [name for name in table.sensitivities if name in ENTROPIES]
    return {name: table.sensitivity(name, phase, table.axes.budgets[0], ()) for name in names}


def _best(table: SignalTable, measure: str, phase: Phase, budget: int) -> list[int | None]:
    """The pattern that each layer prefers, the full cache aside; None where it does not matter."""
    from kvsearch.signals.table import is_constant

    rivals = [index for index, name in enumerate(table.patterns) if name != FULL]
    wanted = table.preference(measure, phase, budget)[:, rivals]
    return [None if is_constant(row) else rivals[int(row.argmax())] for row in wanted]


def _by_pattern(
    table: SignalTable, measure: str, phase: Phase, budget: int, common: Common, with_entropy: bool
) -> list[Table]:
    """Layers by patterns, and the entropies of the layers; several tables where one would be wider than the page."""
    import numpy as np

    values, best = table.measured(measure, phase, budget), _best(table, measure, phase, budget)
    form = "{:+.3g}" if measure in ("ppl", "nll") else _form(1 - values if measure == "cosine" else values)
    columns = {name.replace("_", "_\n"): [form.format(value) for value in np.round(values[:, at], NOISE)]
               for at, name in enumerate(table.patterns)}  # fmt: skip
    for cells, at in zip(columns.values(), range(len(columns)), strict=True):
        cells[:] = [f"[bold]{BEST}{cell}[/bold]" if at == best[row] else cell for row, cell in enumerate(cells)]
    for name, found in (_entropy(table, phase) if with_entropy else {}).items():
        columns[name] = [f"{value:.4f}" for value in found]
    return _fitting(columns, [str(layer) for layer in table.profile.metadata.layers], common)


def _fitting(columns: dict[str, list[str]], layers: list[str], common: Common) -> list[Table]:
    """The columns in as few tables as fit the page, with about as many in each."""
    from rich.measure import Measurement

    names = list(columns)
    for parts in range(1, len(names) + 1):
        ends = [len(names) * part // parts for part in range(parts + 1)]
        made = [_columns({name: columns[name] for name in names[first:end]}, layers) for first, end in pairwise(ends)]
        options = common.out.options.update(max_width=WIDEST)
        if max(Measurement.get(common.out, options, one).maximum for one in made) <= common.out.width:
            break
    return made


def _columns(columns: dict[str, list[str]], layers: list[str]) -> Table:
    from kvsearch.cli.show import plain_table

    shown = plain_table("", ["layer", *columns])
    shown.padding = (0, 0, 0, 1)  # nine patterns fit on a page of 120 columns
    for cells in zip(layers, *columns.values(), strict=True):
        shown.add_row(*cells)
    return shown


def _by_layer(table: SignalTable, phase: Phase) -> Table:
    from kvsearch.cli.show import plain_table

    entropies = _entropy(table, phase)
    shown = plain_table("", ["layer", *entropies])
    for row, layer in enumerate(table.profile.metadata.layers):
        shown.add_row(str(layer), *(f"{values[row]:.4f}" for values in entropies.values()))
    return shown


def _form(harm: np.ndarray) -> str:
    """A format in which the largest harm has four digits, as far as the page has room for them."""
    largest = float(harm.max())
    decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else MOST_DECIMALS
    return f"{{:.{min(max(decimals, 0), MOST_DECIMALS)}f}}"
