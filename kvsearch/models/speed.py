"""How fast a model runs on this machine, by short passes of it, and about how long work takes at that speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvsearch.core.progress import clock_words

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel

FIRST = 32  # tokens of the first pass
MOST = 512  # and of the longest
ENOUGH = 0.5  # seconds of a pass that is long enough to be believed
ROWS = 8  # sequences that are answered at a time
STEPS = 3  # tokens of each


@dataclass(frozen=True)
class Work:
    """What a model has to do: `passes` over `tokens` of prompts in all, and at most so many tokens of `replies`."""

    passes: int
    tokens: int
    replies: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.passes + other.passes, self.tokens + other.tokens, self.replies + other.replies)


@dataclass(frozen=True)
class Speed:
    """Seconds per token that is read and per token of a reply, on `device`; `tokens` are those of the pass."""

    device: str
    tokens: int
    read: float
    reply: float

    def seconds(self, work: Work) -> float:
        """Return about how long work takes; what policies compute is not counted."""
        return work.tokens * self.read + work.replies * self.reply

    def estimate(self, work: Work) -> dict[str, Any]:
        """Return work, speed and seconds, as JSON."""
        return {**asdict(work), "seconds": self.seconds(work), "measured": asdict(self)}

    def words(self, work: Work) -> str:
        """Return how long work takes, in words."""
        replies = f", at most {work.replies:,} tokens of replies" if work.replies else ""
        return (
            f"about {time_words(self.seconds(work))} on this machine ({self.device}): {work.passes:,} prompts of "
            f"{work.tokens:,} tokens in all{replies}"
        )


def time_words(seconds: float) -> str:
    """Return seconds with one digit, from a minute on as a clock shows them."""
    return f"{seconds:.2g} s" if seconds < 60 else clock_words(seconds)


def measure_speed(loaded: LoadedModel) -> Speed:
    """Time passes over more and more tokens until one takes half a second or has 512, then a few tokens of replies."""
    import torch

    from kvsearch.models.architecture import describe, text_config

    model: Any = loaded.model
    most = min(MOST, describe(model).max_positions or MOST)
    ids = (torch.arange(most, device=loaded.device) % text_config(model).vocab_size)[None]

    def seconds(tokens: Any, past: Any = None) -> tuple[float, Any]:
        started = perf_counter()
        out = model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        out.logits[0, -1, 0].item()  # waits for the device
        return perf_counter() - started, out.past_key_values

    with torch.inference_mode():
        length = min(FIRST, most)
        seconds(ids[:, :length])
        took, _ = seconds(ids[:, :length])
        while took < ENOUGH and 2 * length <= most:
            length *= 2
            took, _ = seconds(ids[:, :length])
        short = ids[:, : max(1, min(FIRST, most - STEPS))].expand(ROWS, -1)
        _, past = seconds(short)
        replied = 0.0
        for _ in range(STEPS):
            step, past = seconds(short[:, :1], past)
            replied += step
    return Speed(str(loaded.device), length, took / length, replied / (STEPS * ROWS))
