"""Attention masks of tokens that a cache has read: which are padding, and which are hidden now.

transformers hands every layer of a forward pass the same mask, [B, 1, q, T] over all columns that were read and those
that come. Entries know the index of their token in its sequence, not its column, so the mask is turned into that form
once per forward pass, for all planned layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvsearch.core.errors import UsageError
from kvsearch.runtime.attention import make_causal_mask

# what a mask leaves visible: [B, q] bool, which of the tokens that come are no padding, and [B, T] bool, which tokens
# are seen, by their index in the sequence; None: all
Visible = tuple[Tensor | None, Tensor | None]


class ReadMask:
    """The padding of one cache's sequences, and what the mask of the current forward pass hides of their tokens."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.begun = False
        self.padding = 0  # columns before the longest sequence
        self.real: Tensor | None = None  # [B, n] bool: no padding; columns from n on are tokens; None: all are
        self._current: tuple[int, Visible] | None = None

    def begin(self, valid: Tensor, lengths: Sequence[int]) -> None:
        """Store the padding of a prompt: `valid` [B, T] bool is False there, `lengths` [B] are the tokens of each."""
        self.begun = True
        self.padding = valid.shape[1] - max(lengths)
        self.real = None if min(lengths) == valid.shape[1] else valid.clone()

    def read(self, mask: Tensor | None, batch: int, seen: int, count: int) -> Visible:
        """Return what is visible to the last `count` of `seen` columns; waits for the device where there is a mask.

        Args:
            mask: [B or 1, 1, count, seen], True or 0 where visible; None: everything is.
            batch: sequences.
            seen: columns that were read, those that come included.
            count: columns that come.

        Raises:
            UsageError: the mask has another size, shows padding, hides everything, or hides other tokens from one row
                than from the next.
        """
        if mask is None:
            if self.real is not None and not bool(self.real.all()):
                raise _is_padding_visible(~self.real.all(-1))
            self.real = None  # padded sequences were dropped, or padding forgotten
            return None, None
        # All layers of a pass bring the same mask; the first one reads it for all.
        if self._current is None or self._current[0] != seen:  # another in every forward pass
            self._current = seen, self._read(mask, batch, seen, count)
        arrived, shown = self._current[1]
        device = mask.device  # a model on several devices gives each a copy of the mask
        return None if arrived is None else arrived.to(device), None if shown is None else shown.to(device)

    def shows_all(self, row: Tensor) -> bool:
        """Tell whether the row [B, T] bool of a mask shows every token, and no padding."""
        real = self.columns(row.shape[1])
        return bool((row if real is None else row == real.to(row.device)).all())

    def columns(self, seen: int) -> Tensor | None:
        """Return which of the first `seen` columns are no padding, [B, seen] bool; None: all."""
        if self.real is None:
            return None
        return torch.nn.functional.pad(self.real, (0, seen - self.real.shape[1]), value=True)

    def _read(self, mask: Tensor, batch: int, seen: int, count: int) -> Visible:
        if mask.shape[1:] != (1, count, seen):
            raise UsageError(
                f"attention_mask is {list(mask.shape)}: {seen - count} tokens were read and {count} come, so it is "
                f"[{batch}, {seen}], or {[batch, 1, count, seen]}"
            )
        shown = list_visible_columns(mask)[:, 0].expand(batch, -1, -1)
        row = shown[:, -1]
        # The usual decode step: nothing hidden, nothing padded.
        if count == 1 and self.shows_all(row):
            return None, None
        before = seen - count
        known = self.columns(before)
        real = row.new_ones(batch, before) if known is None else known.to(row.device)
        arrived = row[:, before:]
        padding_shown = (row[:, :before] & ~real).any(-1)
        nothing_shown = ~row.any(-1)
        # One copy to the host for all five answers.
        uneven, shows_padding, empty, hides, padded = torch.stack(
            [
                (shown != (row[:, None] & make_causal_mask(count, seen, row.device))).any(),
                padding_shown.any(),
                nothing_shown.any(),
                (real & ~row[:, :before]).any(),
                ~arrived.all(),
            ]
        ).tolist()
        if uneven:
            raise UsageError(
                "attention_mask hides other tokens from one row than from the next: under a plan all tokens of a "
                "forward pass see the same of what was read, and of each other those before them"
            )
        if shows_padding:
            raise _is_padding_visible(padding_shown)
        if empty:
            raise UsageError(
                f"attention_mask hides every token of sequence {_find_first(nothing_shown)}: show one at least"
            )
        # What is seen now is the padding that later masks are compared with.
        real = torch.cat([real, arrived], 1)
        if padded:
            self.real = real
        return arrived if padded else None, spread_by_token(real, row) if hides else None

    # --- rows and columns of the cache ----------------------------------------------------------------------------

    def rearrange(self, chosen: Callable[[Tensor], Tensor]) -> None:
        """Follow sequences that were selected, repeated or reordered: `chosen` maps [B, n] to [B', n]."""
        self._current = None
        if self.real is not None:
            self.real = chosen(self.real)

    def crop(self, seen: int) -> None:
        """Forget all but the first `seen` columns; 0: everything."""
        self._current = None
        if not seen:
            self._clear()
        elif self.real is not None:
            self.real = self.real[:, :seen]


def list_visible_columns(mask: Tensor) -> Tensor:
    """Return a mask as bool, True where visible.

    Raises:
        UsageError: it adds to logits something else than 0, or what hides them.
    """
    if not mask.dtype.is_floating_point:
        return mask.bool()
    shown = mask == 0
    if bool((~shown & (mask > torch.finfo(mask.dtype).min / 2)).any()):
        raise UsageError("attention_mask adds numbers to logits: under a plan it can only show (0) and hide (-inf)")
    return shown


def spread_by_token(real: Tensor, row: Tensor) -> Tensor:
    """Reorder a mask row [B, T] bool from columns to token indices; `real` [B, T] bool: no padding."""
    batch, columns = row.shape
    # Columns of padding all go to a spare one behind the last, which is cut off.
    index = torch.where(real, real.cumsum(-1) - 1, columns)
    shown = row.new_ones(batch, columns + 1)  # behind the last one, for padding
    return shown.scatter_(1, index, row)[:, :columns]


def _is_padding_visible(sequences: Tensor) -> UsageError:
    """Make the error of a mask that shows padding of some `sequences` [B] bool."""
    return UsageError(
        f"attention_mask shows padding of sequence {_find_first(sequences)}, "
        "of which nothing was kept, or is missing: give "
        "the mask of all tokens, read and to come"
    )


def _find_first(sequences: Tensor) -> int:
    """Return the number of the first sequence that is marked in `sequences` [B] bool."""
    return int(sequences.int().argmax())
