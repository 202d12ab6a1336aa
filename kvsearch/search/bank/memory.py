"""How much of candidates x samples fits into memory at a time, and what to do where it did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import describe, text_config
from kvsearch.models.memory import free_memory, is_out_of_memory
from kvsearch.search.bank.samples import BankSample

PASS_TOKENS = 8192  # tokens of a pass; more of them gain nothing
FP32 = 4
TOGETHER = 8  # candidates that portions of samples leave room for

T = TypeVar("T")
Act = Callable[[T, list[int], slice], None]


@dataclass(frozen=True)
class SampleWork:
    """What a pass does for one sample: a prompt of `prompt` tokens of which `width` entries a head are there at most.

    `read` tokens follow it at a time, and up to `own` in all; the last `rows` of them have logits.
    """

    prompt: int
    width: int
    read: int
    own: int
    rows: int

    @classmethod
    def forcing(cls, sample: BankSample, width: int) -> SampleWork:
        """Return the work of the teacher-forced answer of a sample."""
        count = len(sample.following)
        return cls(len(sample.prompt), width, count, count, sample.predicting)

    @classmethod
    def replying(cls, sample: BankSample, width: int, limit: int) -> SampleWork:
        """Return the work of a reply of up to `limit` tokens."""
        asked = len(sample.asked)
        return cls(len(sample.prompt), width, max(asked, 1), asked + limit, 1)


class Need(NamedTuple):
    """Bytes that samples take: each of them for all candidates together, and under every candidate; tokens it reads."""

    samples: int
    shared: int
    each: int
    read: int

    def with_one(self, other: Need) -> Need:
        """Return the need of one more sample; all are padded to the largest."""
        return Need(self.samples + 1, *map(max, self[1:], other[1:]))

    def candidates(self, memory: int) -> int:
        """Return how many candidates fit; 0 or less if none does."""
        room = (memory - self.samples * self.shared) // (self.samples * self.each)
        return min(room, max(PASS_TOKENS // (self.samples * self.read), 1))


class Sizes:
    """Bytes that prompts and passes take on a model with sliding windows of so many tokens, under so many policies."""

    def __init__(self, model: Any, windows: Sequence[int], choices: int = 1) -> None:
        self.choices = choices
        shape = describe(model)
        config = text_config(model)
        item = int(model.dtype.itemsize)
        self.shape = shape
        self.windows = windows
        self.entry = 2 * shape.kv_heads * shape.head_dim * item  # of a token in one layer
        inner = int(getattr(config, "intermediate_size", None) or 4 * shape.hidden_size)
        heads = shape.query_heads + 2 * shape.kv_heads
        # what is alive of a token inside one layer: residual stream, attention and MLP with their temporaries
        self.token = (8 * shape.hidden_size + 2 * heads * shape.head_dim + 4 * inner) * item
        self.logits = int(config.vocab_size) * (item + 3 * FP32)  # of a token, and what a loss makes of them

    def stored(self, work: SampleWork) -> int:
        """Return the bytes of a prompt: the best entries of full-attention layers, and sliding windows."""
        kept = self.choices * len(self.shape.full_layers) * min(work.width, work.prompt)
        return (kept + sum(min(window - 1, work.prompt) for window in self.windows)) * self.entry

    def need(self, work: SampleWork) -> Need:
        """Return the need of one sample: attention is there for one candidate at a time, all else for every one."""
        widest = max([min(work.width, work.prompt), *self.windows]) + work.own
        attention = 4 * FP32 * self.shape.query_heads * work.read * widest
        own = 2 * self.shape.layers * work.own * self.entry
        each = work.read * self.token + own + work.rows * self.logits
        return Need(1, self.stored(work) + attention, max(each, 1), max(work.read, 1))


def blocks(works: Sequence[SampleWork], sizes: Sizes, candidates: int, memory: int) -> Iterator[tuple[list[int], int]]:
    """Yield samples that are read together, and under how many candidates at a time they take at most `memory` bytes.

    Those of similar size are together.
    Which samples are together does not depend on the candidates.

    Raises:
        UsageError: a sample does not fit even alone and under one candidate.
    """
    check_fits(sizes, works, memory)
    order = sorted(range(len(works)), key=lambda index: (works[index].read, works[index].prompt, index))
    some: list[int] = []
    need = Need(0, 0, 0, 0)
    for index in order:
        more = need.with_one(sizes.need(works[index]))
        if some and more.candidates(memory) < TOGETHER:
            yield _block(some, need, candidates, memory)
            some = []
            more = sizes.need(works[index])
        some.append(index)
        need = more
    if some:
        yield _block(some, need, candidates, memory)


def check_fits(sizes: Sizes, works: Sequence[SampleWork], memory: int) -> int:
    """Return the most bytes that one sample takes under one candidate; UsageError if there are fewer."""
    needs = [sizes.need(work) for work in works]
    most = max((need.shared + need.each for need in needs), default=0)
    if most > memory:
        raise UsageError(
            f"one sample under one candidate takes {most:,} bytes, there are {memory:,}: raise --max-memory by at "
            f"least {most - memory:,} bytes, shorten the prompts or lower the largest budget"
        )
    return most


def _block(some: list[int], need: Need, candidates: int, memory: int) -> tuple[list[int], int]:
    times = -(-candidates // need.candidates(memory))
    return some, -(-candidates // times)  # evenly


class Splitting:
    """Does blocks of work, and in smaller pieces from then on where memory ran out."""

    def __init__(self) -> None:
        self.most: int | None = None  # candidates at a time, once memory has run out

    def run(self, samples: list[int], size: int, candidates: int, load: Callable[[list[int]], T], act: Act[T]) -> None:
        """Run `act` on what was loaded of the samples, for all candidates, `size` at a time; pieces may be done twice.

        Where memory runs out, half as many candidates are tried, down to one, then half of the samples. The error for
        a single sample and candidate is raised as it came.
        """
        error = self._tried(samples, size, candidates, load, act)
        if error is None:
            return
        free_memory()
        middle = len(samples) // 2
        if not middle:
            raise error
        for half in (samples[:middle], samples[middle:]):
            self.run(half, size, candidates, load, act)

    def _tried(
        self, samples: list[int], size: int, candidates: int, load: Callable[[list[int]], T], act: Act[T]
    ) -> Exception | None:
        """Return the error if memory ran out for one candidate."""
        loaded: list[T] = []
        error = _shortage(lambda: loaded.append(load(samples)))
        first = 0
        size = min(size, self.most or size)
        while error is None and first < candidates:
            some = slice(first, min(first + size, candidates))
            error = _shortage(lambda some=some: act(loaded[0], samples, some))  # type: ignore[misc]
            if error is None:
                first += size
            elif size > 1:
                size = self.most = size // 2
                error = None
                free_memory()
        return error


def _shortage(action: Callable[[], None]) -> Exception | None:
    """Return the error if memory ran out, without its traceback, whose frames would hold on to what is big."""
    try:
        action()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)
    return None
