"""Memory of candidate bank passes: how many candidates and samples fit at a time, and retries if memory ran out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import describe, find_text_config
from kvsearch.models.memory import FP32, is_out_of_memory, release_memory
from kvsearch.search.bank.samples import BankSample

PASS_TOKENS = 8192  # tokens of a pass; more of them gain nothing
RESERVED_CANDIDATES = 8  # batches of samples leave memory for so many candidates

SampleT = TypeVar("SampleT")
Loaded = TypeVar("Loaded")
BlockWork = Callable[[Loaded, list[SampleT], slice], None]  # on what was loaded of some samples, for some candidates


class SampleNeed(NamedTuple):
    """Bytes that a pass takes for a sample: its prompt tokens, and `read` tokens that follow at a time.

    Bytes: `shared` for all candidates together, `each` under every candidate.
    """

    prompt: int
    read: int
    shared: int
    each: int


class PassMemory:
    """Estimates bytes of stored prompts and passes on a model, whose sliding `windows` are in tokens."""

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

    def prompt_bytes(self, prompt: int, width: int) -> int:
        """Return the bytes of a stored prompt: `width` entries per full-attention head, and sliding windows."""
        kept = self.choices * len(self.shape.full_layers) * min(width, prompt)
        return (kept + sum(min(window - 1, prompt) for window in self.windows)) * self.entry

    def estimate(self, prompt: int, width: int, read: int, own: int, rows: int) -> SampleNeed:
        """Estimate a sample: attention is alive for one candidate at a time, all else for every candidate.

        `read` tokens follow the prompt at a time, and up to `own` in all; the last `rows` of them have logits.
        """
        widest = max([min(width, prompt), *self.windows]) + own
        # Logits, masked logits, weights and a cast of them, of one candidate.
        attention = 4 * FP32 * self.shape.query_heads * read * widest
        kept = 2 * self.shape.layers * own * self.entry
        each = read * self.token + kept + rows * self.logits
        return SampleNeed(prompt, read, self.prompt_bytes(prompt, width) + attention, max(each, 1))

    def estimate_forcing(self, sample: BankSample, width: int) -> SampleNeed:
        """Estimate the teacher-forced answer of a sample."""
        count = len(sample.following)
        return self.estimate(len(sample.prompt), width, count, count, sample.predicting)

    def estimate_reply(self, sample: BankSample, width: int) -> SampleNeed:
        """Estimate the longest reply to a sample."""
        question = len(sample.question_ids)
        return self.estimate(len(sample.prompt), width, max(question, 1), question + sample.limit, 1)


def split_into_blocks(needs: Sequence[SampleNeed], candidates: int, memory: int) -> Iterator[tuple[list[int], int]]:
    """Yield batches of samples, and for each the number of candidates that fit into `memory` bytes at a time.

    Samples of similar size are batched; batches do not depend on the number of candidates.

    Raises:
        UsageError: a sample does not fit even alone and under one candidate.
    """
    check_fits(needs, memory)

    def count_fitting(samples: Sequence[int]) -> int:
        """Count the candidates that fit, 0 or less for none; all samples are padded to the largest."""
        shared = max(needs[index].shared for index in samples)
        each = max(needs[index].each for index in samples)
        read = max(1, *(needs[index].read for index in samples))
        room = (memory - len(samples) * shared) // (len(samples) * each)
        return min(room, max(PASS_TOKENS // (len(samples) * read), 1))

    batches: list[list[int]] = []
    # By what is read, then by length: neighbours need little padding.
    for index in sorted(range(len(needs)), key=lambda index: (needs[index].read, needs[index].prompt, index)):
        # Independent of how many candidates come, so that rounding does not depend on it either.
        if batches and count_fitting([*batches[-1], index]) >= RESERVED_CANDIDATES:
            batches[-1].append(index)
        else:
            batches.append([index])
    for batch in batches:
        rounds = -(-candidates // count_fitting(batch))
        yield batch, -(-candidates // rounds)  # evenly


def check_fits(needs: Sequence[SampleNeed], memory: int) -> int:
    """Return the bytes of the largest sample under one candidate; UsageError if `memory` is less."""
    largest = max((need.shared + need.each for need in needs), default=0)
    if largest > memory:
        raise UsageError(
            f"one sample under one candidate takes {largest:,} bytes, there are {memory:,}: raise --max-memory by at "
            f"least {largest - memory:,} bytes, shorten the prompts or lower the largest budget"
        )
    return largest


class SplittingRunner:
    """Runs blocks of work, in smaller blocks once memory has run out."""

    def __init__(self) -> None:
        self.most: int | None = None  # candidates at a time, once memory has run out

    def run(
        self,
        samples: list[SampleT],
        size: int,
        candidates: int,
        load: Callable[[list[SampleT]], Loaded],
        act: BlockWork[Loaded, SampleT],
    ) -> None:
        """Load samples and run `act` for all candidates, `size` at a time; blocks may be repeated.

        Where memory runs out, half as many candidates are tried, down to one, then half of the samples. The error for
        a single sample and candidate is raised as it came.
        """
        error = self._try_block(samples, size, candidates, load, act)
        if error is None:
            return
        release_memory()
        middle = len(samples) // 2
        if not middle:
            raise error
        for half in (samples[:middle], samples[middle:]):
            self.run(half, size, candidates, load, act)

    def _try_block(
        self,
        samples: list[SampleT],
        size: int,
        candidates: int,
        load: Callable[[list[SampleT]], Loaded],
        act: BlockWork[Loaded, SampleT],
    ) -> Exception | None:
        """Return the error if memory ran out for one candidate, without its traceback: its frames hold what is big."""
        loaded: Loaded | None = None
        first = 0
        # What has failed once would fail again.
        size = min(size, self.most or size)
        while first < candidates:
            try:
                # Loading may run out of memory, too, so it stands inside.
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
