"""How many sequences a device decodes at once with a kind of cache, and how fast that is."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import count, product
from typing import Any

import torch
from transformers import StaticCache

from kvsearch.benchmark.break_even import CostModel, Forecaster, StepCosts, choose_checks
from kvsearch.benchmark.speed import (
    DYNAMIC,
    FULL_PROGRAM,
    STATIC_CACHE,
    CacheKind,
    Workload,
    count_cache_bytes,
    draw_prompts,
    list_cache_kinds,
    measure_peak_bytes,
    time_decode,
    time_prefill,
    time_steps,
)
from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.items import Progress, group_by_key
from kvsearch.models.architecture import describe
from kvsearch.models.memory import find_default_memory, is_out_of_memory, measure_free_bytes, release_memory
from kvsearch.models.weights import list_named_tensors
from kvsearch.models.work import Work
from kvsearch.runtime import Program
from kvsearch.runtime.attention import use_attention
from kvsearch.runtime.program import count_entries, estimate_memory, make_full_program
from kvsearch.runtime.speed import Speed

FREE_SHARE_FOR_BATCH = 0.95  # of what is free, for the largest batch
BATCH_REDUCTION = 16  # a batch that does not fit is tried again with a sixteenth less
SPARE_SHARE = 1 / 4  # of what a cache holds may be padding, or room for tokens to come
LONGEST_PROMPT = 8192  # of a curve, where no lengths are given
SHORTEST_PROMPT = 512
PROMPT_SECONDS = 120  # that the prompts of a curve may take
ROUNDS_SECONDS = 10.0  # after which a measurement is not repeated
PROBE_STEPS = 2  # steps that tell what a step takes beside the cache, and that warm a batch up


def require_memory(model: Any, programs: dict[str, Program], work: Workload, device: torch.device) -> dict[str, Any]:
    """Check that a workload fits into free memory; return both sizes as JSON, or raise EnvironmentFault.

    All caches, with their new tokens, are in memory at once; those that evict while decoding twice, as they are
    measured on a copy. Beside them is what it takes to read the prompts, or to decode, if that is more: DynamicCache is
    copied then, and ours have `SPARE_SHARE`. `device` is where a model without weights will have them.
    """
    shape = describe(model)
    lengths = [work.length] * work.batch
    ours = {FULL_PROGRAM: make_full_program(model), **programs}
    needs = {name: estimate_memory(model, program, lengths, tokens=work.steps) for name, program in ours.items()}
    entries = work.batch * (work.length + work.steps) * len(shape.full_layers) * shape.kv_heads
    stock = (DYNAMIC, STATIC_CACHE) if len(shape.full_layers) == shape.layers else (DYNAMIC,)
    caches = dict.fromkeys(stock, entries * 2 * shape.head_dim * model.dtype.itemsize)
    caches |= {name: need.cache * (2 if ours[name].decode else 1) for name, need in needs.items()}
    peak = replace(max(needs.values(), key=lambda need: need.scratch), cache=sum(caches.values()))
    decoding = caches[DYNAMIC] + int(SPARE_SHARE * sum(caches[name] for name in ours))
    if decoding > peak.dense + peak.activations + peak.masks + peak.scratch:
        peak = replace(peak, cache=peak.cache + decoding, dense=0, activations=0, masks=0, scratch=0)
    held = [tensor for _, tensor in list_named_tensors(model) if not tensor.is_meta]
    devices = {tensor.device for tensor in held}
    needed = peak.total - sum(tensor.nbytes for tensor in held)
    free = sum(map(measure_free_bytes, devices or {device}))
    if needed > free:
        raise EnvironmentFault(
            f"batch {work.batch} at {work.length:,} tokens needs {needed / 1e9:.1f} GB ({peak.cache / 1e9:.1f} of it "
            f"for all caches at once, {peak.activations / 1e9:.1f} to read the prompts) and {free / 1e9:.1f} GB are "
            f"free: lower {'--batch' if work.batch > 1 else '--length'}, or measure fewer plans"
        )
    return {"bytes": caches, "memory": asdict(peak), "needed_bytes": needed, "free_bytes": free}


def find_largest_batches(
    model: Any, programs: dict[str, Program], workloads: Sequence[Workload], progress: Progress
) -> dict[tuple[int, str], tuple[int, float]]:
    """Find the largest batch and its tokens per second, by context tokens and cache name.

    Caches take what a GPU has free, or the memory that work takes on a CPU. Errors as for `find_largest_batch`.
    """
    available = find_default_memory(model.device, gpu_share=FREE_SHARE_FOR_BATCH)
    kinds = [
        (work, kind)
        for work in workloads
        for kind in list_cache_kinds(model, programs, work.length + work.steps + PROBE_STEPS)
    ]
    capacities = {}
    with use_attention(model, model.config._attn_implementation):
        for number, (work, kind) in enumerate(kinds, 1):
            capacities[work.length, kind.name] = find_largest_batch(model, kind, work, available)
            progress(number, len(kinds))
    return capacities


@torch.no_grad()
def find_largest_batch(model: Any, kind: CacheKind, work: Workload, memory: int) -> tuple[int, float]:
    """Find the largest batch of contexts whose caches fit into `memory` bytes, and its tokens per second.

    Contexts have `work.length` tokens. The cache of `kind` has room for `PROBE_STEPS` tokens more than the steps of
    `work`.

    One prompt is read, and its cache repeated: how many prompts are read at a time is another matter. The batch follows
    from the bytes of one sequence, its cache and what a step takes beside it; where a device has less room than that,
    fewer are tried.

    Raises:
        EnvironmentFault: not one sequence fits.
    """
    model.set_attn_implementation(kind.implementation)
    single_cache = kind.make()
    time_prefill(model, single_cache, draw_prompts(model, 1, work.length))
    held = count_cache_bytes(single_cache)
    beside = measure_peak_bytes(model.device, lambda: time_decode(model, single_cache, 1, min(PROBE_STEPS, work.steps)))
    batch = memory // (held + beside)
    while batch > 0:
        try:
            cache = _repeat_cache(kind, single_cache, batch)
            time_steps(model, cache, batch, PROBE_STEPS)
            seconds = time_steps(model, cache, batch, work.steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            cache = None
            release_memory()
            batch -= max(1, batch // BATCH_REDUCTION)
        else:
            return batch, batch * work.steps / seconds
    raise EnvironmentFault(
        f"{kind.name} takes {(held + beside) / 1e9:.2f} GB for one context of {work.length:,} tokens, and "
        f"{memory / 1e9:.2f} GB may be used: give a shorter --length"
    )


def _repeat_cache(kind: CacheKind, single: Any, batch: int) -> Any:
    """Copy the cache of one sequence to `batch` equal sequences; the original is unchanged."""
    if isinstance(single, StaticCache):  # which cannot be repeated
        cache = kind.make()
        for layer, source in zip(cache.layers, single.layers, strict=True):
            keys, values = (states.expand(batch, *states.shape[1:]) for states in (source.keys, source.values))
            layer.lazy_initialization(keys, values)
            layer.keys.copy_(keys)
            layer.values.copy_(values)
            layer.cumulative_length.copy_(source.cumulative_length)
        return cache
    cache = deepcopy(single)
    cache.batch_repeat_interleave(batch)
    return cache


def choose_lengths(model: Any, programs: dict[str, Program], batches: Sequence[int], steps: int) -> tuple[int, ...]:
    """Choose four lengths of a curve, each twice the one before, that this device reads in time and has memory for.

    Raises:
        EnvironmentFault: not even short ones fit into memory.
    """
    limit = (describe(model).max_positions or LONGEST_PROMPT + steps) - steps
    longest = 2 ** (min(LONGEST_PROMPT, limit).bit_length() - 1)
    speed = None if model.device.type == "meta" else Speed(model, SHORTEST_PROMPT)
    while True:
        lengths = tuple(longest // share for share in (8, 4, 2, 1))
        prompts = [*lengths, *{length for length, _ in choose_checks(lengths, batches)}]
        in_time = speed is None or speed.seconds(Work.over(prompts, 2 + len(programs))) <= PROMPT_SECONDS
        try:
            require_memory(model, programs, Workload(max(batches), longest, steps, 1), model.device)
        except EnvironmentFault:
            if longest <= SHORTEST_PROMPT:
                raise
        else:
            if in_time or longest <= SHORTEST_PROMPT:
                return lengths
        longest //= 2


@torch.no_grad()
def measure_steps(
    model: Any, programs: dict[str, Program], workloads: Sequence[Workload], progress: Progress
) -> list[StepCosts]:
    """Measure decode steps of workloads, with transformers' own cache, the full cache on ours, and all `programs`.

    A prompt of every length is read into each kind of cache, which is repeated to the batches. Every round visits all
    workloads, so that what else the machine does for a while meets all of them, and the fastest round counts.
    """
    kinds = [kind for kind in list_cache_kinds(model, programs, 0) if kind.name != STATIC_CACHE]
    rounds = max(work.rounds for work in workloads)
    lengths = dict.fromkeys(work.length for work in workloads)
    turns = (len(lengths) + len(workloads) * rounds) * len(kinds)
    turn = count(1)
    prompts = {}
    seconds = defaultdict[tuple[CacheKind, Workload], list[float]](list)
    with use_attention(model, model.config._attn_implementation):
        for length, kind in product(lengths, kinds):
            prompts[length, kind.name] = _read_prompt(model, kind, length, rounds)
            progress(next(turn), turns)
        for _, work, kind in product(range(rounds), workloads, kinds):
            model.set_attn_implementation(kind.implementation)
            cache = _repeat_cache(kind, prompts[work.length, kind.name][0], work.batch)
            time_steps(model, cache, work.batch, PROBE_STEPS)
            seconds[kind, work].append(time_decode(model, cache, work.batch, work.steps) / work.steps)
            progress(next(turn), turns)
    return [
        StepCosts(
            kind.name, work.length, work.batch, *count_kept_entries(model, programs.get(kind.name), work.length),
            min(times), statistics.median(times) / min(times), *prompts[work.length, kind.name][1:],
        )
        for (kind, work), times in seconds.items()
    ]  # fmt: skip


def _read_prompt(model: Any, kind: CacheKind, length: int, rounds: int) -> tuple[Any, float, int]:
    """Read one prompt a few times; return its cache, the fastest's seconds, and its bytes with a step's."""
    ids = draw_prompts(model, 1, length)
    model.set_attn_implementation(kind.implementation)
    seconds = list[float]()
    while len(seconds) < rounds and sum(seconds) < ROUNDS_SECONDS:
        cache = kind.make()
        seconds.append(time_prefill(model, cache, ids))
    held = count_cache_bytes(cache)
    beside = measure_peak_bytes(model.device, partial(time_decode, model, cache, 1, PROBE_STEPS))
    return cache, min(seconds), held + beside


def count_kept_entries(model: Any, program: Program | None, length: int) -> tuple[int, int]:
    """Count the entries of a sequence that a decode step reads, and those after its prompt; None: the full cache."""
    if program is None:
        program = make_full_program(model)
    after_prompt = count_entries(model, program.prefill, length)
    if program.decode is None:
        return after_prompt, after_prompt
    return min(after_prompt, count_entries(model, program.decode, length)), after_prompt


def fit_forecaster(model: Any, programs: dict[str, Program], measured: Sequence[StepCosts]) -> Forecaster:
    """Fit the costs of every kind of cache that was measured, for the memory that `find_largest_batches` fills."""
    return Forecaster(
        {name: CostModel.fit(costs) for name, costs in group_by_key(measured, lambda cost: cost.cache).items()},
        cache(lambda name, length: count_kept_entries(model, programs.get(name), length)),
        (DYNAMIC, FULL_PROGRAM),
        find_default_memory(model.device, gpu_share=FREE_SHARE_FOR_BATCH),
    )
