"""What caches cost on this machine: time of the prompt, time of a token, bytes held and at the peak, side by side.

All caches take turns in every round, so that what else the machine does meets all of them; a first round warms up and
is not counted. Times are medians over the rounds, ratios medians of the ratios within a round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from operator import truediv
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from kvsearch.benchmark.cache_costs import CacheCosts, Roofline
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.core.items import Progress
from kvsearch.models.architecture import describe, find_text_config
from kvsearch.models.memory import find_accelerator, synchronise
from kvsearch.models.weights import count_numbers, count_stored_bytes
from kvsearch.plan import Phase
from kvsearch.plan.rounding import water_fill
from kvsearch.plan.size import Size
from kvsearch.policies import Policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.decode.steps import MIN_CAPTURED_TOKENS, CompiledModel, use_steps
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import count_held_entries, prefill_all
from kvsearch.runtime.stock import CACHE, count_stock_bytes, read_layer_state

STOCK_ATTENTION = "sdpa"
SMALLEST_SHARE = 0.2
MAX_SKEW = 2.5  # budgets of heads before they are brought to their mean, as multiples of it
DYNAMIC = "DynamicCache"
STATIC_CACHE = "StaticCache"
FULL_PROGRAM = "kvsearch, full"
COPIED_BYTES = 2**27  # bytes that the bandwidth is measured with
MAX_MATRIX = 8192  # rows and columns of the largest matrices that are multiplied
MIN_PRODUCT_SECONDS = 0.005  # seconds of a product that is long enough to be believed


@dataclass(frozen=True)
class CacheKind:
    """A kind of cache to measure: a factory of empty caches, and the attention implementation of the model."""

    name: str
    make: Callable[[], Any]
    implementation: str = NAME


@dataclass(frozen=True)
class Workload:
    """A workload: `batch` prompts of `length` tokens, and `steps` new tokens of each, in `rounds` repetitions."""

    batch: int
    length: int
    steps: int
    rounds: int


def list_cache_kinds(model: Any, programs: dict[str, Program], capacity: int) -> list[CacheKind]:
    """List the kinds of caches: transformers' own, the full cache on ours, and one for each of the `programs`.

    `capacity` are the tokens that a `StaticCache` has room for; models with other than full-attention layers have none.
    """
    shape = describe(model)
    config = find_text_config(model)
    kinds = [CacheKind(DYNAMIC, lambda: DynamicCache(config=config), STOCK_ATTENTION)]
    if len(shape.full_layers) == shape.layers:
        kinds.append(
            CacheKind(STATIC_CACHE, lambda: StaticCache(config=config, max_cache_len=capacity), STOCK_ATTENTION)
        )
    ours = {FULL_PROGRAM: make_full_program(model), **programs}
    return kinds + [CacheKind(name, partial(PlanCache, model, program)) for name, program in ours.items()]


def make_skewed_budgets(layers: int, heads: int, mean: int, floor: int = 1, upper: int | None = None) -> Ints:
    """Draw budgets [L, Hkv] int64 with a spread like calibrated ones; deterministic.

    Logarithms of the shares are uniform, of a fifth to two and a half; every layer's mean is `mean` exactly.
    """
    low = np.log(SMALLEST_SHARE)
    high = np.log(MAX_SKEW)
    drawn = [np.exp(np.random.default_rng(layer).uniform(low, high, heads)) for layer in range(layers)]
    return np.stack([water_fill(weights, mean * heads, floor, upper) for weights in drawn])


def make_program(model: Any, policy: Policy, size: Size, phases: tuple[Phase, ...], skewed: bool = False) -> Program:
    """Make a program of one policy in all full-attention layers, at one size in every phase.

    Budgets are made by `make_skewed_budgets`, or uniform. In a prefill phase no budget is larger than the prompt.

    Raises:
        UsageError: a budget is below what the policy always keeps.
    """
    shape = describe(model)
    heads = (len(shape.full_layers), shape.kv_heads)
    if size.budget is not None and size.budget < policy.least:
        raise UsageError(f"--budget {size.budget} is below the {policy.least} entries that {policy.name} always keeps")

    def table(length: int) -> Ints:
        mean = min(max(round(size.mean(length)), policy.least), length)
        if not skewed:
            return np.full(heads, mean, np.int64)
        return make_skewed_budgets(*heads, mean, min(policy.least, mean), length)

    return Program.of_policy(model, policy, dict.fromkeys(phases, table))


def measure(
    model: Any,
    kinds: Sequence[CacheKind],
    work: Workload,
    roofline: Roofline,
    progress: Progress | None = None,
    compiled: CompiledModel | None = None,
) -> list[CacheCosts]:
    """Measure kinds of caches; all are compared with the first one and with the `roofline` of the machine.

    With a `compiled` model decode steps of ours are measured a second time, by it.
    """
    ids = draw_prompts(model, work.batch, work.length)
    prefill = defaultdict[str, list[float]](list)
    token = defaultdict[str, list[float]](list)
    compiled_token = defaultdict[str, list[float]](list)
    before = model.config._attn_implementation
    caches: dict[str, Any] = {}
    turns = (1 + 2 * (1 + work.rounds)) * len(kinds)
    steps = count(1)

    def turn(kind: CacheKind) -> None:
        model.set_attn_implementation(kind.implementation)
        if progress is not None:
            progress(next(steps), turns)

    try:
        peaks = {}
        for kind in kinds:
            turn(kind)
            peaks[kind.name] = _measure_peak(model, kind, ids, min(work.steps, 4))
        for kind in _iterate_rounds(kinds, work.rounds):
            turn(kind)
            caches.pop(kind.name, None)  # before there is another
            caches[kind.name] = kind.make()
            prefill[kind.name].append(time_prefill(model, caches[kind.name], ids))
        held = {name: _measure_held(model, cache, work) for name, cache in caches.items()}
        for kind in _iterate_rounds(kinds, work.rounds):
            turn(kind)
            cache = caches[kind.name]
            token[kind.name].append(time_decode(model, cache, work.batch, work.steps) / work.steps)
            if compiled is not None and not compiled.failed and isinstance(cache, PlanCache):
                seconds = time_decode(model, cache, work.batch, work.steps, compiled)
                compiled_token[kind.name].append(seconds / work.steps)
    finally:
        model.set_attn_implementation(before)
    for rounds in (*prefill.values(), *token.values(), *compiled_token.values()):
        del rounds[0]  # the first round warms up
    first = kinds[0].name
    costs = []
    for name in prefill:
        entries, size = held[name]
        costs.append(
            CacheCosts(
                cache=name,
                batch=work.batch,
                length=work.length,
                entries=entries,
                held_bytes=size,
                peak_bytes=peaks[name],
                prefill_seconds=statistics.median(prefill[name]),
                prefill_speedup=statistics.median(map(truediv, prefill[first], prefill[name])),
                token_seconds=statistics.median(token[name]),
                tokens_per_second=work.batch / statistics.median(token[name]),
                token_speedup=statistics.median(map(truediv, token[first], token[name])),
                floor_seconds=roofline.floor(*estimate_token_work(model, work.batch, entries, size)),
                prefill_floor_seconds=roofline.floor(*estimate_prompt_work(model, work.batch, work.length)),
                compiled_seconds=statistics.median(compiled_token[name]) if compiled_token[name] else None,
            )
        )
    return costs


def draw_prompts(model: Any, batch: int, length: int) -> Tensor:
    """Draw prompts [B, T] on the model's device, the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def _iterate_rounds(kinds: Sequence[CacheKind], rounds: int) -> Iterator[CacheKind]:
    """Yield every kind once per round, in rotated order, with one round to warm up."""
    for number in range(rounds + 1):
        first = number % len(kinds)
        yield from (*kinds[first:], *kinds[:first])


@torch.no_grad()
def time_prefill(model: Any, cache: Any, ids: Tensor) -> float:
    """Time the prefill of prompts [B, T] into an empty cache, in seconds."""
    synchronise(model.device)
    clock = choose_clock(model.device)
    start = clock()
    if isinstance(cache, PlanCache) and cache.program.reads_twice:
        prefill_all(model, [cache], ids, torch.ones_like(ids))
    else:
        model(input_ids=ids, logits_to_keep=1, **{CACHE: cache})
    synchronise(model.device)
    return clock() - start


def choose_clock(device: torch.device) -> Callable[[], float]:
    """Choose the clock of all times: of the processor on one thread of a CPU, where other work hardly changes it.

    With several threads, or on a GPU, it is that of the wall.
    """
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


@torch.no_grad()
def time_decode(model: Any, cache: Any, batch: int, steps: int, compiled: CompiledModel | None = None) -> float:
    """Time `steps` greedy decode steps of a batch, in seconds; the cache is restored."""
    with _forgetting_tokens(cache):
        return time_steps(model, cache, batch, steps, compiled)


@torch.no_grad()
def time_steps(model: Any, cache: Any, batch: int, steps: int, compiled: CompiledModel | None = None) -> float:
    """Time `steps` greedy decode steps of a batch, in seconds; the cache keeps the tokens.

    Where steps are captured, as `generate` does on CUDA, or `compiled`, some that are not counted come before.
    """
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    planned = isinstance(cache, PlanCache)
    with (
        use_steps(model, cache, MIN_CAPTURED_TOKENS + steps, compiled=compiled)
        if planned
        else nullcontext(model) as stepped
    ):
        if stepped is not model:
            token = _decode_steps(stepped, cache, token, MIN_CAPTURED_TOKENS)
        synchronise(model.device)
        clock = choose_clock(model.device)
        start = clock()
        _decode_steps(stepped, cache, token, steps)
        synchronise(model.device)
        return clock() - start


def _decode_steps(model: Any, cache: Any, token: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        token = model(input_ids=token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
    return token


@contextmanager
def _forgetting_tokens(cache: Any) -> Iterator[None]:
    """Restore a cache after tokens were added to it."""
    length = int(cache.get_seq_length())
    marks = [(layer, layer.mark()) for layer in cache.layers if isinstance(layer, EvictingLayer)]
    states = [(layer, read_layer_state(layer)) for layer in cache.layers if not isinstance(layer, EvictingLayer)]
    yield
    for planned, mark in marks:
        planned.rewind(length, mark)
    for layer, state in states:
        vars(layer).update(state)
        if isinstance(layer, StaticLayer):  # which counts in place
            layer.cumulative_length.fill_(length)


def _measure_held(model: Any, cache: Any, work: Workload) -> tuple[float, int]:
    """Measure entries per kv head and bytes after the prompt."""
    if not isinstance(cache, PlanCache):
        return float(work.length), count_cache_bytes(cache)
    shape = describe(model)
    entries = sum(count_held_entries(model, cache, [work.length] * work.batch))
    return entries / (work.batch * len(shape.full_layers) * shape.kv_heads), count_cache_bytes(cache)


def count_cache_bytes(cache: Any) -> int:
    """Count the bytes that a cache of any kind holds."""
    return cache.nbytes() if isinstance(cache, PlanCache) else sum(map(count_stock_bytes, cache.layers))


@torch.no_grad()
def _measure_peak(model: Any, kind: CacheKind, ids: Tensor, steps: int) -> int:
    """Measure the peak bytes beyond the weights during prefill and a few decode steps."""

    def pass_through() -> None:
        cache = kind.make()
        time_prefill(model, cache, ids)
        _decode_steps(model, cache, ids[:, -1:], steps)

    return measure_peak_bytes(model.device, pass_through)


def measure_peak_bytes(device: torch.device, action: Callable[[], object]) -> int:
    """Measure the peak bytes that torch allocates during `action`, by the records of its allocators."""
    gc.collect()  # what is garbage already must not be freed during the action, which would seem to take less
    if (module := find_accelerator(device)) is not None:
        devices = range(module.device_count())
        for index in devices:
            module.reset_peak_memory_stats(index)
        held = sum(map(module.memory_allocated, devices))
        action()
        synchronise(device)
        return int(sum(map(module.max_memory_allocated, devices)) - held)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return int(max(accumulate(changes, initial=0)))


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure the peak rates of a device by a large copy, and matrix products of growing size."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED_BYTES / _time_best(device, lambda: target.copy_(source))
    size = 128
    seconds = flops = 0.0
    while size < MAX_MATRIX and seconds < MIN_PRODUCT_SECONDS:
        size *= 2
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _time_best(device, partial(torch.mm, matrix, matrix))
        flops = max(flops, 2 * size**3 / seconds)
    return Roofline(bandwidth, flops)


def _time_best(device: torch.device, action: Callable[[], object]) -> float:
    """Time an action: the minimum seconds of five runs after a warm-up."""
    seconds = []
    clock = choose_clock(device)
    for _ in range(6):
        synchronise(device)
        start = clock()
        action()
        synchronise(device)
        seconds.append(clock() - start)
    return min(seconds[1:])


def estimate_prompt_work(model: Any, batch: int, length: int) -> tuple[int, int]:
    """Estimate the bytes to read for a batch of prompts, and the operations, with the head on last tokens only.

    The operations of attention are of full-attention layers, where a token sees those before it.
    """
    shape = describe(model)
    modules = find_read_modules(model)
    head = find_text_config(model).vocab_size * shape.hidden_size
    multiplied = count_numbers(modules) - head
    attention = 2 * len(shape.full_layers) * shape.query_heads * shape.head_dim * length
    return count_stored_bytes(modules), 2 * batch * (length * multiplied + head) + batch * length * attention


def estimate_token_work(model: Any, batch: int, entries: float, held: int) -> tuple[int, float]:
    """Estimate the bytes to read for one token of each sequence, and the operations.

    The caches hold so many `entries` per kv head of full-attention layers on average, and `held` bytes in all.
    """
    shape = describe(model)
    modules = find_read_modules(model)
    attention = 4 * len(shape.full_layers) * shape.query_heads * shape.head_dim * entries
    return count_stored_bytes(modules) + held, batch * (2 * count_numbers(modules) + attention)


def find_read_modules(model: Any) -> list[nn.Module]:
    """Find the modules whose weights every token reads: all but an input embedding.

    The output's embedding is one of them; where it is the input's, that is read, too.
    """
    output = model.get_output_embeddings()
    left_out = [] if output is None else list(model.get_input_embeddings().modules())
    return [module for module in model.modules() if not any(module is part for part in left_out)]
