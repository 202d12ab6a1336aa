"""The speed of a model, timed by short passes, for estimates of the time that work takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvsearch.models.architecture import describe, find_text_config
from kvsearch.models.work import ASSUMED_BATCH, SURE, StageCost, Work
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.decode.replies import Replies
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.program import PhaseProgram, Program
from kvsearch.runtime.shared_prefill import compress_layer, reply_after_prefill, split_programs

SHORT_PASS = 16  # tokens of the short pass
MIN_LONG_PASS = 256  # and of the long one, which is as long as what is going to be read, but for these limits
MOST = 4096
TIMES = 3  # that each is timed; the median counts
PATIENCE = 2.0  # seconds, after which a long pass is not repeated
TABLE_ROWS = 32  # of the attention table that is timed
DECODED_STEPS = 6  # that are timed
SIMILAR = 1.1  # times as long as the longest that was timed: as fast
COVERED = 0.5  # times as long as it: timed well enough, as passes of two lengths are
SPEEDS: WeakKeyDictionary[Any, Speed] = WeakKeyDictionary()  # that were timed last, by model
# seconds that programs take to compress a prompt as long as the long pass of a speed, by their kind
COMPRESSIONS: WeakKeyDictionary[Speed, dict[Hashable, float]] = WeakKeyDictionary()


class Speed:
    """The speed of a model on its device, timed by a short forward pass and one as long as the longest input.

    In seconds: `start` of a pass on `device`, whatever its length, `read` of each token, `pair` of each pair that
    attention compares, `table` of each pair whose attention is looked at, `step` of a step of decoding, and `decode` of
    each of its tokens, beside `read`. `tokens` is the length of the long pass.
    Times of the same pass were from `fastest` to `slowest` times their median.
    """

    def __init__(self, model: Any, longest: int = 0) -> None:
        self.longest = longest
        shape = describe(model)
        long_pass = min(max(longest, MIN_LONG_PASS), MOST, shape.max_positions or MOST)
        ids = make_ids(model, long_pass)
        queries = torch.ones(shape.query_heads, TABLE_ROWS, shape.head_dim, device=model.device)
        keys = torch.ones(shape.query_heads, shape.head_dim, long_pass, device=model.device)

        def read_tokens(length: int) -> None:
            model(input_ids=ids[:, :length], logits_to_keep=1).logits[0, -1, 0].item()  # waits for the device

        def make_table() -> None:
            (queries @ keys).softmax(-1).amax(1)[0, 0].item()

        with torch.inference_mode():
            first = min(SHORT_PASS, long_pass)
            times = [time_action(partial(read_tokens, length)) for length in (first, long_pass)]
            table, short, long = (median(seconds) for seconds in (time_action(make_table), *times))
            prompt = ids[0, : max(1, long_pass - 1 - DECODED_STEPS)]
            single, batched = time_steps(model, prompt)
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
        token = max(0.0, batched - single) / (ASSUMED_BATCH - 1)
        self.decode = max(0.0, token - self.read)
        self.step = max(0.0, single - token)
        self.fastest = min(min(seconds) / median(seconds) for seconds in times)
        self.slowest = max(max(seconds) / median(seconds) for seconds in times)

    @classmethod
    def of(cls, model: Any, stages: Iterable[StageCost]) -> Speed:
        """Time a model with inputs as long as the longest that these stages read."""
        return cls.at_length(model, max((stage.work.longest for stage in stages), default=0))

    @classmethod
    def at_length(cls, model: Any, longest: int) -> Speed:
        """Time a model with inputs of at most `longest` tokens, unless what was timed last covers that length."""
        last = SPEEDS.get(model)
        if last is None or not COVERED * last.longest <= longest <= SIMILAR * last.longest:
            last = SPEEDS[model] = cls(model, longest)
        return last

    @property
    def is_busy(self) -> bool:
        """Whether the same pass took more than 1.5 times as long as another time: the machine has other work."""
        return self.slowest > SURE * self.fastest

    def seconds(self, work: Work) -> float:
        """Estimate the seconds that work takes."""
        passes = work.passes * self.start + work.tokens * self.read + work.pairs * self.pair
        replies = work.steps * self.step + work.decoded * self.decode
        return passes + work.tables * self.table + replies + work.seconds

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Return the least and the most seconds that work may take which is estimated to take so many."""
        return seconds * min(self.fastest, 1 / SURE), seconds * max(self.slowest, SURE)


def make_ids(model: Any, length: int) -> Tensor:
    """Return token ids [1, T] of a prompt to time."""
    vocabulary: int = find_text_config(model).vocab_size
    return (torch.arange(length, device=model.device) % vocabulary)[None]


def estimate_compression(model: Any, programs: Sequence[Program], longest: int) -> float:
    """Estimate how long compressing a prompt under some programs takes, beside reading it, in seconds per token.

    Programs of each kind are timed once, on a prompt about as long as the longest, as many together as fit into memory.
    """
    speed = Speed.at_length(model, longest)
    timed = COMPRESSIONS.setdefault(speed, {})
    kinds = [find_kind(program.prefill) for program in programs if program.prefill]
    evicting = [program for program in programs if program.prefill]
    unknown = {kind: program for kind, program in zip(kinds, evicting, strict=True) if kind not in timed}
    if unknown:
        for portion in split_programs(model, unknown, [speed.tokens]):
            timed |= zip(portion, time_compressions(model, list(portion.values()), speed.tokens), strict=True)
    return sum(timed[kind] for kind in kinds) / speed.tokens


def find_kind(phase: PhaseProgram) -> Hashable:
    """Return what the time to compress a prompt depends on: policies, how budgets are shared, what entries carry."""
    return frozenset(phase.policies.values()), type(phase.allocation), frozenset(phase.carries.values())


def time_compressions(model: Any, programs: Sequence[Program], length: int) -> list[float]:
    """Time how long each program takes to compress a prompt of `length` tokens that has been read, in seconds.

    Programs share what their policies compute of the prompt; the first one that needs it computes it.
    """
    ids = make_ids(model, length)
    caches = [PlanCache(model, program) for program in programs]
    needs = {
        index: [need for cache in caches if index in cache.planned for need in cache.planned[index].needs()]
        for index in describe(model).full_layers
    }
    seconds = [0.0] * len(caches)
    with run_attention(model), torch.no_grad():
        read_once = {index: [replace(need, reread=None) for need in wanted] for index, wanted in needs.items()}
        for read in DensePass(model, read_once, lambda prompt: prompt, ids).noted:
            scores = torch.rand(read.keys.shape[:3], device=ids.device)  # of a second reading: any scores do
            prompt = replace(read, rereads={need.reread: scores for need in needs[read.layer] if need.reread})
            for number, cache in enumerate(caches):
                started = perf_counter()
                compress_layer(cache.layers[read.layer], prompt)
                ids[0, 0].item()  # waits for the device
                seconds[number] += perf_counter() - started
    return seconds


def scale_to_first(model: Any, works: Sequence[Work], measure_first: Callable[[], object]) -> Work:
    """Add up the works of several contexts, where `measure_first` measures the first one and is timed; counts stay.

    What is done of a context beside plain passes is taken for the same share of the time in all of them.
    """
    total = sum(works, Work())
    speed = Speed.at_length(model, total.longest)
    (seconds,) = time_action(measure_first, 1)
    factor = seconds / speed.seconds(works[0])
    return total + Work(seconds=(factor - 1) * speed.seconds(total))


def time_steps(model: Any, prompt: Tensor) -> tuple[float, float]:
    """Time steps that decode one reply, and `ASSUMED_BATCH`, to a prompt of token ids [T], in seconds."""
    layers = dict.fromkeys(describe(model).full_layers, ())
    with run_attention(model), torch.no_grad():
        read = DensePass(model, layers, lambda _: None, prompt[None])
        batch = reply_after_prefill([read], [prompt], ASSUMED_BATCH, set(), None)

        def decode(replies: Replies, count: int, tokens: int) -> float:
            return median(time_action(partial(replies.ask, [prompt[:1]] * count, [tokens] * count), 1))

        single, batched = (
            (decode(replies, count, 1 + DECODED_STEPS) - decode(replies, count, 1)) / DECODED_STEPS
            for replies, count in ((batch.of_rows([0]), 1), (batch, ASSUMED_BATCH))
        )
        return single, batched


def time_action(action: Callable[[], object], times: int = TIMES) -> list[float]:
    """Time an action: seconds per call, without the first of several calls, which is slower."""
    seconds: list[float] = []
    while len(seconds) <= times and sum(seconds) < PATIENCE:
        started = perf_counter()
        action()
        seconds.append(perf_counter() - started)
    return seconds[1:] or seconds
