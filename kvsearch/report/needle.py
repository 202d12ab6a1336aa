"""Needle in a haystack as grids: mean scores by depth and context length, one grid per method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.evaluation.samples import Sample
from kvsearch.report.figures.style import is_light
from kvsearch.report.screen import screen_table
from kvsearch.tasks.niah import Grid, NiahTask, grid_of

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# red (nothing recalled), yellow, green (all of it), as in the usual plots
RAMP = ((196, 40, 60), (238, 190, 70), (40, 160, 95))


def needle_grids(samples: Sequence[Sample]) -> dict[str, Grid]:
    """Return the grid of every method, from its replies to the task `niah`; other samples are left out.

    Cells that were not asked are NaN. Without samples of that task there is no grid.
    """
    mine = [sample for sample in samples if sample.task == NiahTask.name]
    methods = dict.fromkeys(sample.method for sample in mine)
    return {method: grid_of(sample for sample in mine if sample.method == method) for method in methods}


def grids_json(grids: Mapping[str, Grid]) -> dict[str, dict[str, Any]]:
    """Return per method: lengths, depths, and scores as a list of rows, one per depth, null where nothing was asked."""
    return {
        method: {
            "lengths": list(grid.lengths),
            "depths": list(grid.depths),
            "scores": [[None if math.isnan(score) else score for score in row] for row in grid.means.tolist()],
            "mean": _mean(grid.means),
        }
        for method, grid in grids.items()
    }


def grid_table(method: str, grid: Grid) -> Table:
    """Return a row per depth, a column per length in tokens, cells coloured by score; means over both at the edges."""
    columns = [f" {column} " for column in ("depth", *map(str, grid.lengths), "mean")]
    table = screen_table(f"{method}: needle by depth and length", columns, padding=(0, 0))
    for depth, row in zip(grid.depths, grid.means, strict=True):
        table.add_row(f" {depth}% ", *map(_cell, row.tolist()), _plain(_mean(row)))
    below = [_plain(_mean(column)) for column in grid.means.T]
    table.add_row(" mean ", *below, _plain(_mean(grid.means)))
    return table


def _mean(scores: Floats) -> float:
    """Return the mean of what was asked; NaN where nothing was."""
    asked = scores[~np.isnan(scores)]
    return float(asked.mean()) if asked.size else math.nan


def _cell(score: float) -> Text:
    from rich.text import Text

    if math.isnan(score):
        return Text("  - ")
    red, green, blue = _colour(score)
    letters = "black" if is_light((red, green, blue)) else "white"
    return Text(_plain(score), style=f"{letters} on rgb({red},{green},{blue})")


def _plain(score: float) -> str:
    return f" {score:.2f} "


def _colour(score: float) -> tuple[int, int, int]:
    """Return the colour of a score in [0, 1], between its neighbours of the ramp."""
    place = min(max(score, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(place), len(RAMP) - 2)
    red, green, blue = (
        round(low + (high - low) * (place - index)) for low, high in zip(RAMP[index], RAMP[index + 1], strict=True)
    )
    return red, green, blue
