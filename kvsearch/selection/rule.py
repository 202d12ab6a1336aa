"""How sure one has to be of a plan that is written, and what can be said of it; it imports nothing that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsearch.core.errors import UsageError

LEAST_CONTEXTS = 8  # with fewer nothing beats

Verdict = Literal["beats", "likely", "baseline"]


@dataclass(frozen=True)
class Rule:
    """How sure one has to be.

    Args:
        sure: level of the one-sided bound by which a candidate has to lead the best baseline to be written. From .95 on
            only candidates that beat the baselines are written.
        level: chance that a candidate is said to beat the baselines although it does not; at most 1 - `sure`.

    Raises:
        UsageError: one of them is out of range.
    """

    sure: float = 0.9
    level: float = 0.05

    def __post_init__(self) -> None:
        if not 0.5 <= self.sure < 1:
            raise UsageError(f"--sure {self.sure:g} is outside [0.5, 1): 0.9 is 'likely better', 0.95 'beats'")
        if not 0 < self.level < 1:
            raise UsageError(f"a level of {self.level:g} is no probability of a wrong choice")
        object.__setattr__(self, "level", min(self.level, round(1 - self.sure, 12)))

    @property
    def writes_likely(self) -> bool:
        """Whether a candidate that is not proven to be better is written."""
        return self.sure < 1 - Rule.level


@dataclass
class SharedLevel:
    """The level of a rule as several races share it by Holm's rule: whoever beats the baselines leaves his part.

    `races` is how many there are, `beaten` in how many of those that have ended a candidate beat the baselines.
    """

    level: float
    races: int
    beaten: int = 0

    @property
    def part(self) -> float:
        """The level of the next race, or after the last one that of all in which nobody beat the baselines."""
        return self.level / max(self.races - self.beaten, 1)
