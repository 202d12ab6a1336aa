"""What code for stock caches finds in a layer: all keys and values where nothing is gone, else a clear error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.runtime.collector import DensePrompt


class StockStates(CacheLayerMixin):  # type: ignore[misc]
    """A layer with the `keys` and `values` [B, Hkv, T, D] of a stock one: None before the first token.

    Raises:
        UsageError: entries were evicted, or padding was left out, so that there are no such tensors.
    """

    index: int
    seen: int
    holder: Any  # RaggedStore, Decoding or None
    _prompt: DensePrompt

    @property
    def keys(self) -> Tensor | None:
        """All keys, in the order of the tokens; a view where that is possible."""
        states = self._states()
        return None if states is None else states[0]

    @keys.setter
    def keys(self, states: None) -> None:
        """Nothing is stored here: transformers says so of a new layer."""

    @property
    def values(self) -> Tensor | None:
        """All values, in the order of the tokens; a view where that is possible."""
        states = self._states()
        return None if states is None else states[1]

    @values.setter
    def values(self, states: None) -> None:
        """See `keys`."""

    def _states(self) -> tuple[Tensor, Tensor] | None:
        if self.holder is None:
            return self._prompt.states
        whole: tuple[Tensor, Tensor] | None = self.holder.dense(self.seen)
        if whole is not None:
            return whole
        held = self.holder.entries()
        raise UsageError(
            f"layer {self.index} of the cache has no tensor of all keys and values: of {self.seen} tokens its heads "
            f"hold {int(held.min())} to {int(held.max())} entries, each its own; cache.entries() and "
            "cache.kept_positions(layer, row, head) say which"
        )
