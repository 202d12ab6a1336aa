"""Time estimates: the work of a job in passes and tokens, and the speed of a model timed by short passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import add
from statistics import median
from time import perf_counter
from typing import Any

SHORT_PASS = 16  # tokens of the short pass
MIN_LONG_PASS = 256  # and of the long one, which is as long as what is going to be read, but for these limits
MOST = 4096
TIMES = 3  # that each is timed; the median counts
PATIENCE = 2.0  # seconds, after which a long pass is not repeated
TABLE_ROWS = 32  # of the attention table that is timed
SURE = 1.5  # what is said and what is taken differ by at most so many times, where the machine has no other work
ASSUMED_BATCH = 12  # replies that are decoded in one batch, of several questions and methods


@dataclass(frozen=True)
class Work:
    """An amount of work for a model.

    Args:
        passes: of the model, whatever their lengths.
        tokens: of all passes.
        pairs: of a token and one before it that attention compares within whole sequences.
        tables: pairs of a token and a cached entry whose attention is made in fp32, to be looked at.
        seconds: of work that was timed by itself.
        longest: tokens of the longest sequence.
    """

    passes: float = 0
    tokens: float = 0
    pairs: float = 0
    tables: float = 0
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
        return cls(len(counts), tokens, pairs, tokens * behind, 0, max(counts, default=0)) * times

    @classmethod
    def replying(cls, tokens: float) -> Work:
        """Return the work of replies of so many tokens in all, decoded side by side, a pass for each step."""
        return cls(tokens / ASSUMED_BATCH, tokens)

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


class Speed:
    """The speed of a model on its device, timed by a short forward pass and one as long as the longest input.

    In seconds: `start` of a pass on `device`, whatever its length, `read` of each token, `pair` of each pair that
    attention compares, and `table` of each pair whose attention is looked at. `tokens` is the length of the long pass.
    Times of the same pass were from `fastest` to `slowest` times their median.
    """

    def __init__(self, model: Any, longest: int = 0) -> None:
        import torch

        from kvsearch.models.architecture import describe, find_text_config

        shape = describe(model)
        long_pass = min(max(longest, MIN_LONG_PASS), MOST, shape.max_positions or MOST)
        ids = (torch.arange(long_pass, device=model.device) % find_text_config(model).vocab_size)[None]
        queries = torch.ones(shape.query_heads, TABLE_ROWS, shape.head_dim, device=model.device)
        keys = torch.ones(shape.query_heads, shape.head_dim, long_pass, device=model.device)

        def read(length: int) -> None:
            model(input_ids=ids[:, :length], logits_to_keep=1).logits[0, -1, 0].item()  # waits for the device

        def make_table() -> None:
            (queries @ keys).softmax(-1).amax(1)[0, 0].item()

        with torch.inference_mode():
            first = min(SHORT_PASS, long_pass)
            times = [time_action(partial(read, length)) for length in (first, long_pass)]
            table, short, long = (median(seconds) for seconds in (time_action(make_table), *times))
        # Embeddings are looked up, not multiplied.
        embedding = model.get_input_embeddings().weight.numel()
        weights: int = max(sum(parameter.numel() for parameter in model.parameters()) - embedding, 1)
        # multiplications of a pair, of those of a token
        share = 2 * len(shape.full_layers) * shape.query_heads * shape.head_dim / weights
        more = long_pass - first + share * (long_pass**2 - first**2) / 2
        self.device = str(model.device)
        self.tokens = long_pass
        # Two passes give two unknowns: what a pass takes by itself, and what each token adds.
        self.read = max(0.0, long - short) / max(1, more)
        self.pair = self.read * share
        self.table = table * len(shape.full_layers) / (TABLE_ROWS * long_pass)
        self.start = max(0.0, short - first * self.read)
        self.fastest = min(min(seconds) / median(seconds) for seconds in times)
        self.slowest = max(max(seconds) / median(seconds) for seconds in times)

    @classmethod
    def of(cls, model: Any, stages: Iterable[StageCost]) -> Speed:
        """Time a model with inputs as long as the longest that these stages read."""
        return cls(model, max((stage.work.longest for stage in stages), default=0))

    @property
    def is_busy(self) -> bool:
        """Whether the same pass took more than 1.5 times as long as another time: the machine has other work."""
        return self.slowest > SURE * self.fastest

    def seconds(self, work: Work) -> float:
        """Estimate the seconds that work takes."""
        passes = work.passes * self.start + work.tokens * self.read + work.pairs * self.pair
        return passes + work.tables * self.table + work.seconds

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Return the least and the most seconds that work may take which is estimated to take so many."""
        return seconds * min(self.fastest, 1 / SURE), seconds * max(self.slowest, SURE)


def time_action(action: Callable[[], object], times: int = TIMES) -> list[float]:
    """Time an action: seconds per call, without the first of several calls, which is slower."""
    seconds: list[float] = []
    while len(seconds) <= times and sum(seconds) < PATIENCE:
        started = perf_counter()
        action()
        seconds.append(perf_counter() - started)
    return seconds[1:] or seconds
