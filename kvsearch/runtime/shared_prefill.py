"""A batch of prompts under many methods: read once, compressed as each of them says, answered together.

Evicting a prompt does not change what the model computes for it, so one prefill serves all methods; methods that evict
nothing while decoding then decode as one batch, their sequences side by side. Every method holds what it would hold
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from kvsearch.models.architecture import describe
from kvsearch.models.memory import default_memory
from kvsearch.models.positions import check_length
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.fork import can_join, joined, prefill_all
from kvsearch.runtime.replies import Finished, Replies, left_padded, next_tokens
from kvsearch.runtime.room import prompt_bytes, require_room

T = TypeVar("T")


@dataclass(frozen=True)
class CompressedSize:
    """What a method holds of every sequence once the prompts are compressed: entries, and bytes of the whole batch."""

    entries: list[int]
    bytes: int


@dataclass(frozen=True)
class JointReplies:
    """Methods that reply together: method m's sequence b is row m * B + b of `replies`.

    `seconds` is what reading the prompts and compressing them took, for all methods they were read for, and `logits`
    [B, 1, V] are those of the prompts' last tokens: the same object as long as the prompts were read once.
    """

    methods: tuple[str, ...]
    replies: Replies
    held: dict[str, CompressedSize]
    seconds: float
    logits: Tensor


def compressed(
    model: Any,
    programs: Mapping[str, Program],
    prompts: Sequence[Tensor],
    pad: int,
    stop: set[int],
    finished: Finished | None = None,
    memory: int | None = None,
) -> Iterator[JointReplies]:
    """Read and compress the batch under every program, in their order as far as they reply together.

    Prompts are token ids [T] each. `memory` is the most bytes that the compressed caches of one prefill may take; where
    that is too little for all programs the prompts are read again. Default: 8 GiB, or half of what a GPU has free.

    Raises:
        IncompatibleError: a prompt is longer than the model takes.
        NonFiniteError: the model emits NaN for a prompt.
    """
    ids, mask = left_padded(prompts, pad, model.device)
    check_length(model, ids.shape[1])
    lengths = [len(prompt) for prompt in prompts]
    for some in _portions(model, programs, lengths, memory):
        started = perf_counter()
        caches = {method: PlanCache(model, program) for method, program in some.items()}
        logits = prefill_all(model, list(caches.values()), ids, mask)
        first = next_tokens(logits)
        held = {
            method: CompressedSize(held_entries(model, cache, lengths), cache.nbytes())
            for method, cache in caches.items()
        }
        seconds = perf_counter() - started
        for methods in _groups(caches):
            cache = joined([caches[method] for method in methods])
            times = len(methods)
            replies = Replies(model, cache, mask.repeat(times, 1), first.repeat(times, 1), pad, stop, finished)
            yield JointReplies(methods, replies, {method: held[method] for method in methods}, seconds, logits)


def batches(items: Sequence[T], size: int, alike: Callable[[T], object]) -> Iterator[list[T]]:
    """Yield batches of at most `size` items of which `alike` says the same."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(alike(item), []).append(item)
    for group in groups.values():
        for first in range(0, len(group), size):
            yield group[first : first + size]


def read(
    model: Any, cache: PlanCache, prompts: Sequence[Tensor], pad: int, stop: set[int], chunk: int | None = None
) -> Replies:
    """Read and compress prompts of token ids [T] for one cache alone, `chunk` tokens at a time (None: whole).

    Raises:
        IncompatibleError: a prompt is longer than the model takes.
        NonFiniteError: the model emits NaN for a prompt.
        EnvironmentFault: the device has too little memory for what is kept.
    """
    ids, mask = left_padded(prompts, pad, model.device)
    check_length(model, ids.shape[1])
    require_room(model, {"the plan": cache.program}, [len(prompt) for prompt in prompts], chunk)
    return Replies(model, cache, mask, next_tokens(prefill_all(model, [cache], ids, mask, chunk)), pad, stop)


def held_entries(model: Any, cache: PlanCache, lengths: Sequence[int]) -> list[int]:
    """Count the entries of all full-attention layers per sequence, right after its prompt of `lengths` tokens."""
    return with_unplanned(model, cache, cache.entries(), lengths)


def with_unplanned(model: Any, cache: PlanCache, entries: Tensor, lengths: Sequence[int]) -> list[int]:
    """Sum `entries` [planned layers, B, Hkv] per sequence, with those of layers outside the plan: all `lengths`."""
    shape = describe(model)
    unplanned = (len(shape.full_layers) - len(cache.planned)) * shape.kv_heads
    planned = entries.sum((0, 2)).tolist()
    return [kept + unplanned * length for kept, length in zip(planned, lengths, strict=True)]


def _groups(caches: Mapping[str, PlanCache]) -> Iterator[tuple[str, ...]]:
    """Group methods whose caches can be one batch: they plan the same layers and evict nothing while decoding."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for method, cache in caches.items():
        if can_join(cache):
            alike.setdefault(tuple(cache.planned), []).append(method)
        else:
            yield (method,)
    yield from (tuple(methods) for methods in alike.values())


def _portions(
    model: Any, programs: Mapping[str, Program], lengths: Sequence[int], memory: int | None
) -> Iterator[dict[str, Program]]:
    """Yield programs, in order, whose compressed caches fit into `memory` together; at least one at a time."""
    limit = default_memory(model.device) if memory is None else memory
    some: dict[str, Program] = {}
    taken = 0
    for method, program in programs.items():
        size = 2 * prompt_bytes(model, program, lengths)  # twice, for as long as caches are put together
        if some and taken + size > limit:
            yield some
            some, taken = {}, 0
        some[method] = program
        taken += size
    yield some
