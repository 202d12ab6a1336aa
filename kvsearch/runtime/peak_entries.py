"""The most entries that a batch holds at a time while its replies are made."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kvsearch.arrays import Ints
from kvsearch.models.architecture import describe
from kvsearch.runtime import PlanCache
from kvsearch.runtime.decoding import Decoding


class PeakEntries:
    """The largest sum over all full-attention layers and kv heads at any token so far, per sequence.

    A head counts with the token that is coming in, as it evicts after that. What each head has held at most would add
    up to more: under two phases with different budgets some heads shrink while others grow. All is counted on the host,
    nothing waits for the device. Of several tokens that come in at once, as those of a question, the sum is exact at
    the first, and from the second on as if no head dropped more than it has to: never too low.

    Args:
        model: the model, for its layers outside the plan, which hold every token.
        cache: holds the prompts, and takes in the tokens of `step`.
        lengths: tokens of the prompts, [B].
    """

    def __init__(self, model: Any, cache: PlanCache, lengths: Tensor) -> None:
        shape, planned = describe(model), [layer.holder for layer in cache.planned.values()]
        self._deciding = [holder for holder in planned if isinstance(holder, Decoding)]
        growing = [holder for holder in planned if holder is not None and not isinstance(holder, Decoding)]
        self._heads = len(self._deciding) * shape.kv_heads
        self._growing_heads = len(shape.full_layers) * shape.kv_heads - self._heads
        unplanned = len(shape.full_layers) - len(planned)
        self._grown: Ints = unplanned * shape.kv_heads * lengths.cpu().numpy().astype(np.int64)
        for holder in growing:
            self._grown += holder.entries().sum(1).numpy()
        self._limits = _beside(
            [holder.rule.budgets.reshape(len(lengths), -1) for holder in self._deciding], len(lengths)
        )
        self._held = self._now(len(lengths))
        self.most: Ints = self._held.sum(axis=1) + self._grown

    def step(self, tokens: Ints) -> None:
        """Take note that so many tokens of each sequence, [B], came into the cache, padding not counted."""
        came, later = np.minimum(tokens, 1), np.maximum(tokens - 1, 0)
        first = self._held.sum(axis=1) + self._heads * came + self._grown + self._growing_heads * came
        lasting = np.minimum(self._held + later[:, None], self._limits).sum(axis=1) + self._heads * came
        self._grown = self._grown + self._growing_heads * tokens
        last = np.where(later > 0, lasting + self._grown, 0)
        self.most = np.maximum(self.most, np.maximum(first, last))
        self._held = self._now(len(tokens))

    def _now(self, batch: int) -> Ints:
        """Return the entries of the heads that evict while they decode, [B, heads]."""
        return _beside([holder.entries().numpy() for holder in self._deciding], batch)


def _beside(parts: list[Ints], batch: int) -> Ints:
    return np.concatenate([np.zeros((batch, 0), dtype=np.int64), *parts], axis=1)
