"""What caches cost on this machine: time of the prompt, time of a token, bytes held and at the peak, side by side.

All caches take turns in every round, so that what else the machine does meets all of them; a first round warms up and
is not counted. Times are medians over the rounds, ratios medians of the ratios within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from kvsearch.evaluation.cache_costs import CacheCosts
from kvsearch.evaluation.launches import Launches, count_launches
from kvsearch.models.architecture import describe, text_config
from kvsearch.models.memory import accelerator, synchronise
from kvsearch.progress import Progress
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.cache import layer_state, stock_nbytes
from kvsearch.runtime.fork import prefill_all
from kvsearch.runtime.layer import EvictingLayer
from kvsearch.runtime.program import full_cache
from kvsearch.runtime.room import prompt_bytes
from kvsearch.runtime.shared_prefill import held_entries
from kvsearch.runtime.steps import FEWEST, stepping

STOCK = "sdpa"
DYNAMIC, STATIC, FULL = "DynamicCache", "StaticCache", "kvsearch, full"
COPIED = 2**27  # bytes that the bandwidth is measured with


@dataclass(frozen=True)
class CacheKind:
    """A kind of cache to be measured: how an empty one is made, and the attention that its model runs."""

    name: str
    make: Callable[[], Any]
    implementation: str = NAME


@dataclass(frozen=True)
class Workload:
    """What is read and how much is said: `batch` prompts of `length` tokens, `steps` new ones of each."""

    batch: int
    length: int
    steps: int
    rounds: int


@dataclass
class _Times:
    prefill: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


def cache_kinds(model: Any, programs: dict[str, Program], capacity: int) -> list[CacheKind]:
    """Return transformers' own caches, the full cache on ours, and one for each of the `programs`.

    `capacity` are the tokens that a `StaticCache` has room for; models with other than full-attention layers have none.
    """
    shape, config = describe(model), text_config(model)
    kinds = [CacheKind(DYNAMIC, lambda: DynamicCache(config=config), STOCK)]
    if len(shape.full_layers) == shape.layers:
        kinds.append(CacheKind(STATIC, lambda: StaticCache(config=config, max_cache_len=capacity), STOCK))
    ours = {FULL: full_cache(model), **programs}
    return kinds + [CacheKind(name, partial(PlanCache, model, program)) for name, program in ours.items()]


def cache_bytes(model: Any, programs: Mapping[str, Program], work: Workload) -> dict[str, int]:
    """Return about the bytes of every kind of cache with its new tokens, by name; all are in memory at once.

    Of layers with full attention alone, and without the room that is taken for tokens to come: it takes no less.
    """
    shape = describe(model)
    heads = work.batch * len(shape.full_layers) * shape.kv_heads
    token = heads * 2 * shape.head_dim * model.dtype.itemsize
    stock = dict.fromkeys((DYNAMIC, STATIC), (work.length + work.steps) * token)
    if len(shape.full_layers) < shape.layers:
        del stock[STATIC]
    lengths = [work.length] * work.batch
    ours = {name: prompt_bytes(model, one, lengths) for name, one in {FULL: full_cache(model), **programs}.items()}
    return stock | ours


def measure(
    model: Any, kinds: Sequence[CacheKind], work: Workload, progress: Progress | None = None
) -> list[CacheCosts]:
    """Measure kinds of caches, the first of which all are compared with."""
    ids = random_prompts(model, work.batch, work.length)
    times, before = {kind.name: _Times() for kind in kinds}, model.config._attn_implementation
    caches: dict[str, Any] = {}
    steps = iter(range(1, (2 * (work.rounds + 1) + 1) * len(kinds) + 1))

    def turn(kind: CacheKind) -> None:
        model.set_attn_implementation(kind.implementation)
        if progress is not None:
            progress(next(steps), (2 * (work.rounds + 1) + 1) * len(kinds))

    try:
        peaks = {}
        for kind in kinds:
            turn(kind)
            peaks[kind.name] = _peak(model, kind, ids, min(work.steps, 4))
        for kind in _turns(kinds, work.rounds):
            turn(kind)
            caches.pop(kind.name, None)  # before there is another
            caches[kind.name] = kind.make()
            times[kind.name].prefill.append(prefill_seconds(model, caches[kind.name], ids))
        held = {name: _held(model, cache, work) for name, cache in caches.items()}
        for kind in _turns(kinds, work.rounds):
            turn(kind)
            seconds = decode_seconds(model, caches[kind.name], work.batch, work.steps)
            times[kind.name].token.append(seconds / work.steps)
        launched = {kind.name: _launched(model, kind, caches[kind.name], work.batch) for kind in kinds}
    finally:
        model.set_attn_implementation(before)
    counted = {name: _Times(taken.prefill[1:], taken.token[1:]) for name, taken in times.items()}
    return _costs(model, work, counted, held, peaks, launched)


def random_prompts(model: Any, batch: int, length: int) -> Tensor:
    """Return prompts [B, T] on the model's device, the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def _costs(
    model: Any,
    work: Workload,
    times: Mapping[str, _Times],
    held: Mapping[str, tuple[float, int]],
    peaks: Mapping[str, int],
    launched: Mapping[str, Launches | None],
) -> list[CacheCosts]:
    """Put together what was measured; the first of the `times` is what the others are compared with."""
    bandwidth, weights, first = copy_bandwidth(model.device), read_weights(model), next(iter(times.values()))
    return [
        CacheCosts(
            cache=name,
            batch=work.batch,
            length=work.length,
            entries=held[name][0],
            held_bytes=held[name][1],
            peak_bytes=peaks[name],
            prefill_seconds=statistics.median(taken.prefill),
            prefill_speedup=statistics.median(map(truediv, first.prefill, taken.prefill)),
            token_seconds=statistics.median(taken.token),
            tokens_per_second=work.batch / statistics.median(taken.token),
            token_speedup=statistics.median(map(truediv, first.token, taken.token)),
            floor_seconds=(weights + held[name][1]) / bandwidth,
            kernels=None if (calls := launched[name]) is None else calls.kernels,
            waits=None if calls is None else calls.waits,
        )
        for name, taken in times.items()
    ]


def _turns(kinds: Sequence[CacheKind], rounds: int) -> Iterator[CacheKind]:
    """Yield every kind once a round, another one first each time, in one round more than is counted."""
    for number in range(rounds + 1):
        first = number % len(kinds)
        yield from (*kinds[first:], *kinds[:first])


@torch.no_grad()
def prefill_seconds(model: Any, cache: Any, ids: Tensor) -> float:
    """Return the seconds that reading prompts [B, T] into an empty cache takes."""
    planned = cache.planned.values() if isinstance(cache, PlanCache) else ()
    rereads = any(need.reread is not None for layer in planned for need in layer.needs())
    synchronise(model.device)
    start = time.perf_counter()
    if rereads:
        prefill_all(model, [cache], ids, torch.ones_like(ids))
    else:
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    synchronise(model.device)
    return time.perf_counter() - start


@torch.no_grad()
def decode_seconds(model: Any, cache: Any, batch: int, steps: int) -> float:
    """Return the seconds that `steps` greedy decode steps of a batch take; the cache forgets them again."""
    with _forgotten(cache):
        return step_seconds(model, cache, batch, steps)


@torch.no_grad()
def step_seconds(model: Any, cache: Any, batch: int, steps: int) -> float:
    """Return the seconds that `steps` greedy decode steps of a batch take; the cache keeps the tokens.

    Where steps are captured, as `generate` does on CUDA, some that are not counted come before: these are captured.
    """
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    planned = isinstance(cache, PlanCache)
    with stepping(model, cache, FEWEST + steps) if planned else nullcontext(model) as stepped:
        if stepped is not model:
            token = _decoded(stepped, cache, token, FEWEST)
        synchronise(model.device)
        start = time.perf_counter()
        _decoded(stepped, cache, token, steps)
        synchronise(model.device)
        return time.perf_counter() - start


def _decoded(model: Any, cache: Any, token: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
    return token


@contextmanager
def _forgotten(cache: Any) -> Iterator[None]:
    """Let tokens come into a cache, and forget them."""
    length = int(cache.get_seq_length())
    marks = [(layer, layer.mark()) for layer in cache.layers if isinstance(layer, EvictingLayer)]
    states = [(layer, layer_state(layer)) for layer in cache.layers if not isinstance(layer, EvictingLayer)]
    yield
    for planned, mark in marks:
        planned.rewind(mark)
    for layer, state in states:
        vars(layer).update(state)
        if isinstance(layer, StaticLayer):  # which counts in place
            layer.cumulative_length.fill_(length)


def _launched(model: Any, kind: CacheKind, cache: Any, batch: int) -> Launches | None:
    model.set_attn_implementation(kind.implementation)
    return count_launches(model.device, lambda steps: decode_seconds(model, cache, batch, steps))


def _held(model: Any, cache: Any, work: Workload) -> tuple[float, int]:
    """Return entries per kv head and bytes after the prompt."""
    if not isinstance(cache, PlanCache):
        return float(work.length), cache_nbytes(cache)
    shape = describe(model)
    entries = sum(held_entries(model, cache, [work.length] * work.batch))
    return entries / (work.batch * len(shape.full_layers) * shape.kv_heads), cache_nbytes(cache)


def cache_nbytes(cache: Any) -> int:
    """Return the bytes that a cache of any kind holds."""
    return cache.nbytes() if isinstance(cache, PlanCache) else sum(map(stock_nbytes, cache.layers))


@torch.no_grad()
def _peak(model: Any, kind: CacheKind, ids: Tensor, steps: int) -> int:
    """Return the most bytes allocated beyond the weights while prompts are read and a few tokens come."""
    model.set_attn_implementation(kind.implementation)

    def pass_through() -> None:
        cache = kind.make()
        prefill_seconds(model, cache, ids)
        token = ids[:, -1:]
        for _ in range(steps):
            token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)

    return peak_bytes(model.device, pass_through)


def peak_bytes(device: torch.device, action: Callable[[], object]) -> int:
    """Return the most bytes that torch allocates at a time during `action`, by the records of its allocators."""
    if (module := accelerator(device)) is not None:
        devices = range(module.device_count())
        for one in devices:
            module.reset_peak_memory_stats(one)
        held = sum(map(module.memory_allocated, devices))
        action()
        synchronise(device)
        return int(sum(map(module.max_memory_allocated, devices)) - held)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    now = most = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def copy_bandwidth(device: torch.device, tries: int = 5) -> float:
    """Return the bytes per second that a copy reads and writes, at best."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(tries + 1):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * COPIED / min(seconds[1:])


def read_weights(model: Any) -> int:
    """Return the bytes of weights that every token reads: all but an input embedding that is not the output's, too."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is None or output.weight is embedding.weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return int(total if tied else total - embedding.weight.nbytes)
