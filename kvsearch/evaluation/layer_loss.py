"""What a layer loses under a method, as evaluations measure it and reports show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerLoss:
    """What the output of a layer loses under a method, means over the `queries` of a task.

    The bounds are None where entries are merged: they hold for keys and values that stay as they are.
    """

    task: str
    method: str
    layer: int
    queries: int
    loss: float  # |y - yhat|_1
    evicted_mass: float  # attention on entries that are gone, mean over the query heads
    bound: float | None  # 2 C sum_h Vmax_h m_h
    bound_by_head: float | None  # 2 sum_h C_h Vmax_h m_h

    @property
    def ratio(self) -> float | None:
        """The loss in parts of its bound; None without a bound, or where it is 0."""
        return self.loss / self.bound if self.bound else None
