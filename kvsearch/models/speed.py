"""What a model has to do, how fast it does that on this machine by short passes of it, and so how long work takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

SHORT = 16  # tokens of the first pass
MOST = 1024  # and of the longest
ENOUGH = 0.25  # seconds of a pass that is long enough to be believed
ROWS = 8  # sequences that are answered at a time
STEPS = 3  # tokens of each
TIMES = 3  # that everything is timed: the shortest counts


@dataclass(frozen=True)
class Work:
    """What a model has to do: `passes` over `tokens` in all, and about so many tokens of `replies`."""

    passes: float = 0
    tokens: float = 0
    replies: float = 0

    @classmethod
    def over(cls, lengths: Iterable[int], times: float = 1) -> Work:
        """Return so many passes over each of some sequences of these lengths."""
        counts = list(lengths)
        return cls(len(counts), sum(counts)) * times

    def __add__(self, other: Work) -> Work:
        return Work(self.passes + other.passes, self.tokens + other.tokens, self.replies + other.replies)

    def __mul__(self, times: float) -> Work:
        return Work(self.passes * times, self.tokens * times, self.replies * times)


@dataclass(frozen=True)
class StageCost:
    """What a stage of a job reads and asks, each context and question once, and what the model has to do for it."""

    name: str
    contexts: int
    questions: int
    work: Work


@dataclass(frozen=True)
class Speed:
    """Seconds on `device` of a pass, whatever its length, of a token that it reads, and of a token of a reply."""

    device: str
    tokens: int
    start: float
    read: float
    reply: float

    def seconds(self, work: Work) -> float:
        """Return about how long work takes."""
        return work.passes * self.start + work.tokens * self.read + work.replies * self.reply


def measure_speed(model: Any) -> Speed:
    """Time a short pass and one over more and more tokens until it takes long enough, then a few tokens of replies."""
    import torch

    from kvsearch.models.architecture import describe, text_config

    most = min(MOST, describe(model).max_positions or MOST)
    ids = (torch.arange(most, device=model.device) % text_config(model).vocab_size)[None]

    def once(tokens: Any, past: Any = None) -> tuple[float, Any]:
        started = perf_counter()
        out = model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        out.logits[0, -1, 0].item()  # waits for the device
        return perf_counter() - started, out.past_key_values

    def shortest(tokens: Any) -> float:
        return min(once(tokens)[0] for _ in range(TIMES))

    with torch.inference_mode():
        length = first = min(SHORT, most)
        once(ids[:, :first])  # the first one of all takes longer
        short = took = shortest(ids[:, :first])
        while took < ENOUGH and 2 * length <= most:
            length *= 2
            took = shortest(ids[:, :length])
        read = max(0.0, took - short) / max(1, length - first)
        rows = ids[:, : max(1, min(first, most - STEPS))].expand(ROWS, -1)
        _, past = once(rows)
        steps = []
        for _ in range(STEPS):
            step, past = once(rows[:, :1], past)
            steps.append(step)
    return Speed(str(model.device), length, max(0.0, short - first * read), read, min(steps) / ROWS)
