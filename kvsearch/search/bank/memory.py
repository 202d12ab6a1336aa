"""How much of candidates x samples fits into memory at a time, and what to do where it did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import describe, find_text_config
from kvsearch.models.memory import is_out_of_memory, release_memory
from kvsearch.search.bank.samples import BankSample

PASS_TOKENS = 8192  # tokens of a pass; more of them gain nothing
FP32 = 4
TOGETHER = 8  # candidates that portions of samples leave room for

S = TypeVar("S")
T = TypeVar("T")
Act = Callable[[T, list[S], slice], None]  # on what was loaded of some samples, for some candidates


class SampleNeed(NamedTuple):
    """What a pass takes for a sample whose prompt has so many tokens, of which `read` follow at a time.

    Bytes: `shared` for all candidates together, `each` under every candidate.
    """

    prompt: int
    read: int
    shared: int
    each: int


class Sizes:
    """Bytes that prompts and passes take on a model with sliding windows of so many tokens, under so many policies."""

    def __init__(self, model: Any, windows: Sequence[int], choices: int = 1) -> None:
        self.choices = choices
        shape = describe(model)
        config = find_text_config(model)
        item = int(model.dtype.itemsize)
        self.shape = shape
        self.windows = windows
        self.entry = 2 * shape.kv_heads * shape.head_dim * item  # of a token in one layer
        inner = int(getattr(config, "intermediate_size", None) or 4 * shape.hidden_size)
        heads = shape.query_heads + 2 * shape.kv_heads
        # what is alive of a token inside one layer: residual stream, attention and MLP with their temporaries
        self.token = (8 * shape.hidden_size + 2 * heads * shape.head_dim + 4 * inner) * item
        self.logits = int(config.vocab_size) * (item + 3 * FP32)  # of a token, and what a loss makes of them

    def stored(self, prompt: int, width: int) -> int:
        """Return the bytes of a prompt: the best `width` entries of full-attention layers, and sliding windows."""
        kept = self.choices * len(self.shape.full_layers) * min(width, prompt)
        return (kept + sum(min(window - 1, prompt) for window in self.windows)) * self.entry

    def need(self, prompt: int, width: int, read: int, own: int, rows: int) -> SampleNeed:
        """Return the need of a sample: attention is there for one candidate at a time, all else for every one.

        `read` tokens follow the prompt at a time, and up to `own` in all; the last `rows` of them have logits.
        """
        widest = max([min(width, prompt), *self.windows]) + own
        attention = 4 * FP32 * self.shape.query_heads * read * widest
        kept = 2 * self.shape.layers * own * self.entry
        each = read * self.token + kept + rows * self.logits
        return SampleNeed(prompt, read, self.stored(prompt, width) + attention, max(each, 1))

    def forcing(self, sample: BankSample, width: int) -> SampleNeed:
        """Return the need of the teacher-forced answer of a sample."""
        count = len(sample.following)
        return self.need(len(sample.prompt), width, count, count, sample.predicting)

    def replying(self, sample: BankSample, width: int) -> SampleNeed:
        """Return the need of a reply that is as long as it may be."""
        asked = len(sample.asked)
        return self.need(len(sample.prompt), width, max(asked, 1), asked + sample.limit, 1)


def blocks(needs: Sequence[SampleNeed], candidates: int, memory: int) -> Iterator[tuple[list[int], int]]:
    """Yield samples that are read together, and under how many candidates at a time they take at most `memory` bytes.

    Those of similar size are together.
    Which samples are together does not depend on the candidates.

    Raises:
        UsageError: a sample does not fit even alone and under one candidate.
    """
    check_fits(needs, memory)

    def fitting(samples: Sequence[int]) -> int:
        """Return how many candidates fit, 0 or less if none does; all samples are padded to the largest."""
        shared = max(needs[index].shared for index in samples)
        each = max(needs[index].each for index in samples)
        read = max(1, *(needs[index].read for index in samples))
        room = (memory - len(samples) * shared) // (len(samples) * each)
        return min(room, max(PASS_TOKENS // (len(samples) * read), 1))

    parts: list[list[int]] = []
    for index in sorted(range(len(needs)), key=lambda index: (needs[index].read, needs[index].prompt, index)):
        if parts and fitting([*parts[-1], index]) >= TOGETHER:
            parts[-1].append(index)
        else:
            parts.append([index])
    for some in parts:
        times = -(-candidates // fitting(some))
        yield some, -(-candidates // times)  # evenly


def check_fits(needs: Sequence[SampleNeed], memory: int) -> int:
    """Return the most bytes that one sample takes under one candidate; UsageError if there are fewer."""
    most = max((need.shared + need.each for need in needs), default=0)
    if most > memory:
        raise UsageError(
            f"one sample under one candidate takes {most:,} bytes, there are {memory:,}: raise --max-memory by at "
            f"least {most - memory:,} bytes, shorten the prompts or lower the largest budget"
        )
    return most


class Splitting:
    """Does blocks of work, and in smaller pieces from then on where memory ran out."""

    def __init__(self) -> None:
        self.most: int | None = None  # candidates at a time, once memory has run out

    def run(self, samples: list[S], size: int, candidates: int, load: Callable[[list[S]], T], act: Act[T, S]) -> None:
        """Run `act` on what was loaded of the samples, for all candidates, `size` at a time; pieces may be done twice.

        Where memory runs out, half as many candidates are tried, down to one, then half of the samples. The error for
        a single sample and candidate is raised as it came.
        """
        error = self._tried(samples, size, candidates, load, act)
        if error is None:
            return
        release_memory()
        middle = len(samples) // 2
        if not middle:
            raise error
        for half in (samples[:middle], samples[middle:]):
            self.run(half, size, candidates, load, act)

    def _tried(
        self, samples: list[S], size: int, candidates: int, load: Callable[[list[S]], T], act: Act[T, S]
    ) -> Exception | None:
        """Return the error if memory ran out for one candidate, without its traceback: its frames hold what is big."""
        loaded: T | None = None
        first = 0
        size = min(size, self.most or size)
        while first < candidates:
            try:
                loaded = load(samples) if loaded is None else loaded
                act(loaded, samples, slice(first, min(first + size, candidates)))
                first += size
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if loaded is None or size == 1:
                    return error.with_traceback(None)
                size = self.most = size // 2
            release_memory()  # once the error is gone
        return None
