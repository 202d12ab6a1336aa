"""What a search writes into its ledger, and finds there when it is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsearch.errors import InternalError
from kvsearch.search.ledger import Ledger
from kvsearch.search.outcome import Found
from kvsearch.search.records import Line
from kvsearch.search.space import Vector


@dataclass(frozen=True)
class Journal:
    """The lines of one search in a ledger, each written once; `name` is in front of the names of its stages."""

    ledger: Ledger
    name: str = ""

    def begin(self, stage: str) -> Line:
        """The line where a stage began, or begins now."""
        for line in self.ledger.stages():
            if line.name == self.name + stage and line.begins:
                return line
        return self.ledger.append("stage", name=self.name + stage, begins=True)

    def asked(self, stage: str, generation: int, points: Sequence[Vector]) -> Line:
        """The line that says which points [d] a generation has.

        Raises:
            InternalError: the ledger has other ones.
        """
        known = self.ledger.asked(self.name + stage)
        if generation >= len(known):
            return self.ledger.append("asked", stage=self.name + stage, generation=generation, points=list(points))
        if not np.array_equal(known[generation].vectors, points):
            raise InternalError(
                f"stage {stage!r}, generation {generation}: the search asks for other points than its ledger says"
            )
        return known[generation]

    def told(self, stage: str, generation: int, points: Sequence[Vector], values: Sequence[float]) -> None:
        """What the optimiser is told of a generation."""
        if generation >= len(self.ledger.told(self.name + stage)):
            data = {"points": list(points), "values": list(values)}
            self.ledger.append("told", stage=self.name + stage, generation=generation, **data)

    def best(self, found: Found) -> None:
        """The best candidate so far, if it is better than the one that was written last."""
        written = self.ledger.best
        if written is None or found.value < written.value:
            self.ledger.append("best", candidate=found.table, value=found.value, where=self.name + found.where)
