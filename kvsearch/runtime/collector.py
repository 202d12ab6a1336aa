"""What a policy needs of the prompt's queries, gathered while the prompt passes, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsearch.models.architecture import unrotate
from kvsearch.policies.base import Needs, QueryStatistics

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


class QueryCollector:
    """Keeps the last rows and the running first and second moments of the unrotated queries, if asked for."""

    def __init__(self, needs: Needs, rotary: Rotary) -> None:
        self.needs, self.rotary = needs, rotary
        self.rows: Tensor | None = None
        self._count: Tensor | None = None
        self._sum: Tensor | None = None
        self._outer: Tensor | None = None

    def add(self, query: Tensor, positions: Tensor, valid: Tensor) -> None:
        """One chunk: query [B, Hq, q, D] as attention sees it, positions [B, q] (rotary), valid [B, q] bool."""
        if self.needs.query_rows:
            self.rows = query if self.rows is None else torch.cat([self.rows, query], 2)
            # a copy, so that the rest of the prompt's queries can be freed
            self.rows = self.rows[:, :, -self.needs.query_rows :].clone()
        if self.needs.query_statistics_from is not None:
            self._accumulate(query, positions, valid & (positions >= self.needs.query_statistics_from))

    def _accumulate(self, query: Tensor, positions: Tensor, chosen: Tensor) -> None:
        batch, count = positions.shape
        cos, sin = (table.view(batch, count, -1) for table in self.rotary(positions.flatten()))
        plain = unrotate(query.float(), cos, sin) * chosen[:, None, :, None]
        count_now, sum_now = chosen.sum(-1), plain.sum(2)
        outer_now = plain.transpose(-1, -2) @ plain
        if self._sum is None or self._outer is None or self._count is None:
            self._count, self._sum, self._outer = count_now, sum_now, outer_now
        else:
            self._count, self._sum, self._outer = (
                self._count + count_now,
                self._sum + sum_now,
                self._outer + outer_now,
            )

    def statistics(self) -> QueryStatistics | None:
        """Mean and covariance (divided by N) of what was added; zero where a sequence had no such query."""
        if self._sum is None or self._outer is None or self._count is None:
            return None
        count = self._count.clamp(min=1).float()[:, None, None]
        mean = self._sum / count
        second = self._outer / count[..., None]
        return QueryStatistics(mean, second - mean[..., :, None] * mean[..., None, :])
