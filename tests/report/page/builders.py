"""Pages of made-up results, with everything that a page can have."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kvsearch.report.figures.data import Axis, CategoryMap, Estimated, Figure, HeatMap, Intervals, Lines, Panel, Series
from kvsearch.report.page.page import Group, Sheet, render
from kvsearch.report.table import Cell, RowGroup, Table

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e{{ 7 * 7 }}\x07\"'&"
METHODS = ("uniform", "snapkv", "lukv:snapkv", "joint", "adakv", "pyramid", "random")
BUDGETS = (32.0, 64.0, 128.0, 256.0)


def scores() -> Figure:
    """Score against entries, with intervals."""
    curves = [Series("full", (), (78.0,), style="level")]
    for at, name in enumerate(METHODS):
        means = tuple(76 - 60 * math.exp(-budget / (40 + 25 * at)) for budget in BUDGETS)
        curves.append(Series(name, BUDGETS, means, tuple(m - 3 for m in means), tuple(m + 3 for m in means)))
    body = Lines(Axis("entries per kv head", log=True), Axis("score, percent"), tuple(curves))
    return Figure("scores", "Score against entries", "20 contexts per task, split report; 95% intervals.", body)


def heat_map(name: str, layers: int, heads: int, panels: Sequence[str] = ("",), form: str = "{:.0f}") -> Figure:
    """A value for every layer and kv head."""
    rng = random.Random(0)
    found = tuple(
        Panel(panel, tuple(tuple(rng.random() * 100 for _ in range(heads)) for _ in range(layers))) for panel in panels
    )
    rows, columns = tuple(map(str, range(layers))), tuple(map(str, range(heads)))
    return Figure(name, name, "", HeatMap(rows, columns, "layer", "kv head", "entries", found, form))


def policies(layers: int) -> Figure:
    """A policy for every layer and phase."""
    rng = random.Random(1)
    values = tuple((rng.choice(METHODS[:4]), rng.choice((METHODS[1], ""))) for _ in range(layers))
    rows = tuple(map(str, range(layers)))
    return Figure("policies", "Policies", "", CategoryMap(rows, ("prefill", "decode"), "layer", "phase", values))


def search(evaluations: int) -> Figure:
    """A value for every candidate, and the best so far."""
    rng = random.Random(2)
    at = tuple(float(one) for one in range(1, evaluations + 1))
    values = tuple(2 + rng.random() * 4 * math.exp(-one / 200) for one in at)
    best = tuple(min(values[: one + 1]) for one in range(evaluations))
    series = (
        Series("uniform", (), (5.1,), style="level"), Series("candidates", at, values, style="points", muted=True),
        Series("best so far", at, best, style="steps"),
    )  # fmt: skip
    return Figure("search", "Convergence", "Loss.", Lines(Axis("candidates"), Axis("nats per token"), series))


def verdicts() -> Figure:
    """What signals are worth above their controls."""
    rng = random.Random(3)
    names = ("its inverse", "uniform", "random strategies")
    found = [
        (signal, tuple(Estimated(name, mean, mean - 2, mean + 3) for name in names if (mean := rng.uniform(-3, 8))))
        for signal in ("cosine as a route", "entropy for budgets")
    ]
    return Figure("verdicts", "What signals are worth", "", Intervals(Axis("points above"), tuple(found)))


def table() -> Table:
    """A table of scores, with intervals."""
    rows = [
        [Cell(name), Cell(f"{60 + 3 * at % 7:.2f} [{55 + at:.2f}, {66 + at:.2f}]", at == 2), Cell(f"{1000 * at:,}")]
        for at, name in enumerate(METHODS)
    ]
    return Table("score in percent", ["method", "score", "entries"], [RowGroup("64 entries per kv head", rows)])


def hostile_page() -> bytes:
    """A page in which whatever may come from outside is hostile."""
    bad = Series(HOSTILE, (1.0, 2.0), (1.0, 2.0), (0.5, 1.0), (1.5, 3.0))
    cells = HeatMap(("0", HOSTILE), (HOSTILE,), HOSTILE, HOSTILE, HOSTILE, (Panel(HOSTILE, ((1.0,), (2.0,))),))
    figures = [
        Figure(HOSTILE, HOSTILE, HOSTILE, Lines(Axis(HOSTILE), Axis(HOSTILE), (bad,))),
        Figure("cells", HOSTILE, "", cells),
        Figure("intervals", HOSTILE, "", Intervals(Axis(HOSTILE), ((HOSTILE, (Estimated(HOSTILE, 1, 0, 2),)),))),
        Figure("names", HOSTILE, "", CategoryMap(("0",), (HOSTILE,), HOSTILE, HOSTILE, ((HOSTILE,),))),
    ]
    rows = Table(
        HOSTILE, [HOSTILE, HOSTILE], [RowGroup(HOSTILE, [[Cell(HOSTILE), Cell(HOSTILE)]])], (HOSTILE,), (HOSTILE,)
    )
    sheet = Sheet(
        HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, [HOSTILE], figures, [rows], [HOSTILE],
        {HOSTILE: [(HOSTILE, HOSTILE)]},
    )  # fmt: skip
    return render([Group(HOSTILE, HOSTILE, [sheet, sheet])], HOSTILE, HOSTILE)


def page(layers: int = 32, heads: int = 8, evaluations: int = 400) -> bytes:
    """A page of a model of a size and a search of a length."""
    maps = [
        heat_map("budgets", layers, heads, ("prefill", "decode")),
        heat_map("eviction loss", layers, heads, ("uniform", "pyramid", "lukv", "plan"), "{:.3f}"),
        heat_map("signals", layers, 6, ("cosine", "perplexity"), "{:.3f}"),
    ]
    found = Sheet(
        "runs/evolve", "search", "Which budgets serve the tasks best?",
        "joint beats snapkv, the best of 14 baselines, beyond doubt: +3.1 points [+1.2, +5.0].", None,
        ["a remark"], [scores(), *maps, policies(layers), search(evaluations), verdicts()], [table()],
        ["kvsearch evolve bundled --budget 64 -o runs/evolve"], {"resolved options": [("budget", "64")] * 40},
    )  # fmt: skip
    going_on = Sheet("runs/longer", "search", "Which?", "100 candidates.", "not finished", figures=[search(100)])
    return render(
        [Group("a model", "llama, 32 layers x 8 kv heads", [found, going_on])], "kvsearch report", "2 results"
    )
