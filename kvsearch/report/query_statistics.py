"""What `show` says of query statistics: how far the queries of every layer lie from their mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.plan import Profile
from kvsearch.plan.profile import QUERY_COVARIANCE, QUERY_MEAN
from kvsearch.report.lukv import origin
from kvsearch.report.screen import facts, screen_table

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, eq=False)
class QueryStatisticsView:
    """The length of the mean query, and how queries spread around it, mean over the query heads of a layer."""

    profile: Profile

    @property
    def mean(self) -> Floats:
        """Length of the mean query by layer and query head, [L, Hq]."""
        found: Floats = np.linalg.norm(self.profile.arrays[QUERY_MEAN], axis=-1)
        return found

    @property
    def spread(self) -> Floats:
        """Root of the summed variances by layer and query head, [L, Hq]."""
        found: Floats = np.sqrt(np.trace(self.profile.arrays[QUERY_COVARIANCE], axis1=-2, axis2=-1))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        return {
            "metadata": self.profile.metadata.model_dump(mode="json"),
            "mean": self.mean.tolist(),
            "spread": self.spread.tolist(),
        }

    def parts(self) -> Iterator[RenderableType]:
        """Yield where they come from, and a row per layer."""
        metadata = self.profile.metadata
        count = metadata.provenance.settings.get("queries")
        queries = {"queries": f"{count:,} of every head"} if isinstance(count, int) else {}
        yield from facts({**origin(metadata, "contexts"), **queries})
        table = screen_table("queries before their rotary embedding, mean over heads", ["layer", "|mean|", "spread"])
        for layer, mean, spread in zip(metadata.layers, self.mean.mean(1), self.spread.mean(1), strict=True):
            table.add_row(str(layer), f"{mean:.3g}", f"{spread:.3g}")
        yield table
