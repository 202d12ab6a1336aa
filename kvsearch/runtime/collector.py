"""What a policy needs of the prompt's queries, gathered while the prompt passes, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvsearch.models.architecture import unrotate
from kvsearch.policies.base import Needs, Observation, QueryStatistics

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


CHUNK = 4096  # query rows turned back at a time, which bounds the scratch memory


class QueryCollector:
    """Keeps the last rows and the running mean and scatter of the unrotated queries, if asked for."""

    def __init__(self, needs: Needs, rotary: Rotary) -> None:
        self.needs, self.rotary = needs, rotary
        self.rows: Tensor | None = None
        self._seen: Tensor | None = None  # [B] real tokens so far
        self._moments: Moments | None = None

    def add(self, query: Tensor, positions: Tensor, valid: Tensor) -> None:
        """One chunk: query [B, Hq, q, D] as attention sees it, positions [B, q] (rotary), valid [B, q] bool."""
        if self.needs.query_rows:
            self.rows = query if self.rows is None else torch.cat([self.rows, query], 2)
            # a copy, so that the rest of the prompt's queries can be freed
            self.rows = self.rows[:, :, -self.needs.query_rows :].clone()
        if self.needs.query_statistics_from is not None:
            index = valid.cumsum(-1) - 1 if self._seen is None else self._seen[:, None] + valid.cumsum(-1) - 1
            self._seen = index[:, -1] + 1
            chosen = valid & (index >= self.needs.query_statistics_from)
            for start in range(0, query.shape[2], CHUNK):
                part = slice(start, start + CHUNK)
                self._accumulate(query[:, :, part], positions[:, part], chosen[:, part])

    def _accumulate(self, query: Tensor, positions: Tensor, chosen: Tensor) -> None:
        batch, count = positions.shape
        cos, sin = (table.view(batch, count, -1) for table in self.rotary(positions.flatten()))
        plain = unrotate(query.float(), cos, sin)
        weight = chosen[:, None, :, None].float()
        rows = chosen.sum(-1).float()
        mean = (plain * weight).sum(2) / rows.clamp(min=1)[:, None, None]
        centred = (plain - mean[:, :, None]) * weight
        moments = Moments(rows, mean, centred.transpose(-1, -2) @ centred)
        self._moments = moments if self._moments is None else self._moments.merged(moments)

    def statistics(self) -> QueryStatistics | None:
        """Mean and covariance (divided by N) of what was added; zero where a sequence had no such query."""
        if self._moments is None:
            return None
        rows = self._moments.rows.clamp(min=1)[:, None, None, None]
        return QueryStatistics(self._moments.mean, self._moments.scatter / rows)

    def observation(
        self, key: Tensor, value: Tensor, valid: Tensor, positions: Tensor, scaling: float, softcap: float | None
    ) -> Observation:
        """The layer as a policy sees it once the whole prompt was added; `positions` [B, q] are the last chunk's."""
        return Observation(
            key, value, valid, scaling, self.rows, softcap, self.statistics(), self.rotary, positions[:, -1] + 1
        )


class Moments(NamedTuple):
    """Sums of a set of vectors that stay accurate when the mean is large against the spread."""

    rows: Tensor  # [B] how many
    mean: Tensor  # [B, Hq, D]
    scatter: Tensor  # [B, Hq, D, D], the sum of the outer products of the centred vectors

    def merged(self, other: Moments) -> Moments:
        """The moments of both sets together (Chan et al. 1983)."""
        rows = self.rows + other.rows
        share = (other.rows / rows.clamp(min=1))[:, None, None]
        apart = other.mean - self.mean
        between = apart[..., :, None] * apart[..., None, :] * (self.rows[:, None, None] * share)[..., None]
        return Moments(rows, self.mean + apart * share, self.scatter + other.scatter + between)
