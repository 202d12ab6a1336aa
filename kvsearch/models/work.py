"""The work of a job, in passes and tokens: what a forecast is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from operator import add

ASSUMED_BATCH = 8  # replies that are decoded in one batch
SURE = 1.5  # what is said and what is taken differ by at most so many times, where the machine has no other work


@dataclass(frozen=True)
class Work:
    """An amount of work for a model.

    Args:
        passes: of the model, whatever their lengths.
        tokens: of all passes.
        pairs: of a token and one before it that attention compares within whole sequences.
        tables: pairs of a token and a cached entry whose attention is made in fp32, to be looked at.
        steps: of decoding, whatever the number of replies.
        decoded: how many of the `tokens` are decoded in these steps.
        seconds: of work that was timed by itself.
        longest: tokens of the longest sequence.
    """

    passes: float = 0
    tokens: float = 0
    pairs: float = 0
    tables: float = 0
    steps: float = 0
    decoded: float = 0
    seconds: float = 0
    longest: int = 0

    @classmethod
    def over(cls, lengths: Iterable[int], times: float = 1, behind: int = 0) -> Work:
        """Return the work of `times` passes over each of some sequences of these lengths.

        With `behind`, they follow so many cached tokens, and their attention to these is made as a table.
        """
        counts = list(lengths)
        tokens = sum(counts)
        pairs = sum(length**2 for length in counts) / 2
        return cls(len(counts), tokens, pairs, tokens * behind, longest=max(counts, default=0)) * times

    @classmethod
    def replying(cls, tokens: float, steps: float | None = None) -> Work:
        """Return the work of replies of so many tokens in all, in batches that take so many steps.

        By default they are decoded in batches of `ASSUMED_BATCH`.
        """
        return cls(tokens=tokens, steps=tokens / ASSUMED_BATCH if steps is None else steps, decoded=tokens)

    def __add__(self, other: Work) -> Work:
        sums = Work(*map(add, astuple(self), astuple(other)))
        return replace(sums, longest=max(self.longest, other.longest))

    def __mul__(self, times: float) -> Work:
        return replace(Work(*(part * times for part in astuple(self))), longest=self.longest)


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage of a job: its contexts and questions, each counted once, and the model's work."""

    name: str
    contexts: int
    questions: int
    work: Work
