"""Attention rows averaged over all heads of a layer that hold an entry (TOVA), in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch.runtime.blocks import GROWTH, MIN_SPARE


class Board:
    """A column for every token of every sequence, in which segments add up what they have of it.

    `rows` are the sequences of the segments of each part, [S], of which it has `slots`; slots without an entry get
    `empty`, 0 or infinity.
    """

    def __init__(
        self, rows: Sequence[Tensor], slots: Sequence[int], batch: int, columns: int, empty: float = 0.0
    ) -> None:
        self.columns, self.empty = columns, empty
        width = columns + 1  # in front, a column for slots without an entry
        self.sums = torch.empty(2, batch * width, device=rows[0].device)  # of attention, and how many hold the entry
        self.made_anew = self.sums.view(2, batch, width)[..., 1 if empty else 0 :]
        if empty:
            self.sums[0].fill_(empty)  # in front nothing but 0 is added to it
            self.sums[1].fill_(1.0)
        self.first = [sequences[:, None] * width + 1 for sequences in rows]  # [S, 1]
        # what is added up: attention, to be written by who makes it, and 1
        self.parts = [self.sums.new_ones(2, len(one), count) for one, count in zip(rows, slots, strict=True)]

    @classmethod
    def growing(
        cls, rows: Sequence[Tensor], slots: Sequence[int], batch: int, columns: int, empty: float = 0.0
    ) -> Board:
        """Make a board with room for more tokens."""
        return cls(rows, slots, batch, columns + max(MIN_SPARE, int(columns * GROWTH)), empty)

    def holds(self, columns: int) -> bool:
        """Tell whether there is a column for so many tokens."""
        return columns <= self.columns

    def own(self, part: int, count: int) -> Tensor:
        """Return where the rows [S, C] of a part are to be written, for its first slots."""
        return self.parts[part][0, :, :count]

    def layer_rows(self, positions: Sequence[Tensor]) -> list[Tensor]:
        """Average the rows over all heads of the layer that hold an entry, [S, C] fp32, for positions of each part."""
        self.made_anew.zero_()
        places = []
        for held, first, own in zip(positions, self.first, self.parts, strict=True):
            place = (held + first).view(-1)
            self.sums.scatter_add_(1, place.expand(2, -1), own[:, :, : held.shape[1]].detach().reshape(2, -1))
            places.append(place)
        mean = self.sums[0] / self.sums[1]
        return [mean.gather(0, place).view_as(held) for place, held in zip(places, positions, strict=True)]
