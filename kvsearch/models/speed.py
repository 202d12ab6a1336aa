"""What a model has to do, how fast it does that on this machine by short passes of it, and so how long work takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

SHORT = 16  # tokens of the first pass
MOST = 1024  # and of the longest
ENOUGH = 0.25  # seconds of a pass that is long enough to be believed
ROWS = 12  # replies that are decoded in one batch, of several questions and methods
TIMES = 5  # that every length is read: other work on the machine slows down some of them


@dataclass(frozen=True)
class Work:
    """What a model has to do: `passes` over `tokens` in all."""

    passes: float = 0
    tokens: float = 0

    @classmethod
    def over(cls, lengths: Iterable[int], times: float = 1) -> Work:
        """Return so many passes over each of some sequences of these lengths."""
        counts = list(lengths)
        return cls(len(counts), sum(counts)) * times

    @classmethod
    def replying(cls, tokens: float) -> Work:
        """Return replies of so many tokens, side by side, each step of them a pass."""
        return cls(tokens / ROWS, tokens)

    def __add__(self, other: Work) -> Work:
        return Work(self.passes + other.passes, self.tokens + other.tokens)

    def __mul__(self, times: float) -> Work:
        return Work(self.passes * times, self.tokens * times)


@dataclass(frozen=True)
class StageCost:
    """What a stage of a job reads and asks, each context and question once, and what the model has to do for it."""

    name: str
    contexts: int
    questions: int
    work: Work


class Speed:
    """How fast a model runs where it is, timed by a short pass and by one over more and more tokens until that is long.

    `start` are the seconds of a pass on `device`, whatever its length, and `read` those of a token; `tokens` had the
    longest pass.
    """

    def __init__(self, model: Any) -> None:
        import torch

        from kvsearch.models.architecture import describe, text_config

        most = min(MOST, describe(model).max_positions or MOST)
        ids = (torch.arange(most, device=model.device) % text_config(model).vocab_size)[None]

        def once(length: int) -> float:
            started = perf_counter()
            model(input_ids=ids[:, :length], logits_to_keep=1).logits[0, -1, 0].item()  # waits for the device
            return perf_counter() - started

        def least(length: int) -> float:  # what else runs on the machine only adds
            return min(once(length) for _ in range(TIMES))

        with torch.inference_mode():
            length = first = min(SHORT, most)
            once(first)  # the first one of all takes longer
            short = took = least(first)
            while took < ENOUGH and 2 * length <= most:
                length *= 2
                took = least(length)
        self.device = str(model.device)
        self.tokens = length
        self.read = max(0.0, took - short) / max(1, length - first)
        self.start = max(0.0, short - first * self.read)

    def seconds(self, work: Work) -> float:
        """Return about how long work takes."""
        return work.passes * self.start + work.tokens * self.read
