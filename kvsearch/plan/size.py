"""How much of a cache is kept: entries per kv head, or all but a share of the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvsearch.core.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.plan.profile import ProfileMetadata


ONE_SIZE = "give either a ratio to evict (--ratio 0.8) or entries to keep per kv head (--budget 512)"
LAID_OUT = 10_000  # tokens: budgets of a ratio with up to four decimals are exact there
GUARD = 1e-9  # shares are read to nine decimals


def round_half_up(value: float) -> int:
    """Round to the nearest integer, halves upward, e.g. the entries a ratio of a length stands for."""
    return math.floor(value + 0.5 + GUARD)


def round_down(value: float) -> int:
    """Round to the integer below, e.g. the part of a budget that a share of it stands for."""
    return math.floor(value + GUARD)


class Pool(NamedTuple):
    """Entries to share among the kv heads of several layers; no head may get more than `length`."""

    shape: tuple[int, int]  # layers, kv heads
    total: int
    length: int

    @property
    def mean(self) -> float:
        """Entries per kv head."""
        return self.total / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Size:
    """Keep `budget` entries per kv head on average, or evict the share `ratio` of any prompt.

    `length` is the prompt length, in tokens, that the integer budgets of a plan are for; default: the calibration's, or
    LAID_OUT where nothing is calibrated. The budgets of a ratio follow the prompt at hand, whatever `length` is.

    Raises:
        UsageError: not exactly one of budget and ratio, or a number out of range.
    """

    budget: int | None = None
    ratio: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"a budget of {self.budget} keeps nothing: give at least 1 entry per kv head")
        if (self.ratio is None) == (self.budget is None):
            raise UsageError(ONE_SIZE)
        if self.ratio is not None and not 0 < self.ratio < 1:
            hint = f"; did you mean {self.ratio / 100:g}?" if 5 <= self.ratio < 100 else ""
            raise UsageError(f"ratio {self.ratio} is outside (0, 1): it is the share to evict, 0.8 keeps a fifth{hint}")
        if self.length is not None and self.length < 1:
            raise UsageError(f"length {self.length} must be 1 token or more")
        # files hold plain numbers, whatever a caller computes with
        for name, plain in (("budget", int), ("ratio", float), ("length", int)):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else plain(value))

    def __str__(self) -> str:
        return str(self.ratio if self.budget is None else self.budget)

    @property
    def words(self) -> str:
        """The size for people."""
        if self.budget is not None:
            return f"{self.budget} {'entry' if self.budget == 1 else 'entries'} per kv head"
        return f"{100 * float(self.ratio or 0):g}% evicted"

    @property
    def scaling(self) -> Literal["fixed", "proportional"]:
        """The scaling of plans of this size: a ratio follows the prompt at hand."""
        return "proportional" if self.budget is None else "fixed"

    def laid_out(self) -> Size:
        """Return the size with a length that integer budgets are for: its own, or LAID_OUT of a ratio without one."""
        return self if self.ratio is None or self.length is not None else replace(self, length=LAID_OUT)

    def mean(self, length: int) -> float:
        """Return the entries per kv head of a prompt of `length` tokens, before rounding."""
        return (1 - float(self.ratio or 0)) * length if self.budget is None else self.budget

    def total(self, length: int, heads: int) -> int:
        """Return the entries of `heads` kv heads together for a prompt of `length` tokens.

        A budget counts in full where the prompt is shorter.
        """
        return self.budget * heads if self.budget is not None else round_half_up(self.mean(length) * heads)

    def held(self, length: int, heads: int) -> int:
        """Return the entries that a method holds of the prompt at hand: the total, but at least one for each head."""
        return max(self.total(length, heads), heads)

    def pool(self, metadata: ProfileMetadata) -> Pool:
        """Return what the layers of a profile share, of prompts as long as its own where the size has no length."""
        length = self.length or metadata.length
        layers, heads = metadata.shape
        return Pool((layers, heads), self.total(length, layers * heads), length)

    def as_json(self) -> dict[str, int | float]:
        """Return the one number that is given, by its name."""
        return {"budget": self.budget} if self.budget is not None else {"ratio": float(self.ratio or 0)}
