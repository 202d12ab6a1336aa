"""Costs of kinds of caches as recorded, and their lower bounds on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from kvsearch.core.fields import Count, Index


@dataclass(frozen=True)
class Roofline:
    """Peak rates of a device: bytes of a copy (reads and writes), and operations of matrix products, per second."""

    bandwidth: float
    flops: float

    def floor(self, size: float, operations: float) -> float:
        """Return the minimum seconds to read `size` bytes and do `operations`, both at the same time."""
        return max(size / self.bandwidth, operations / self.flops)


@dataclass(frozen=True)
class CacheCosts:
    """Costs of one kind of cache under one workload.

    Seconds are medians; a speed-up is how many times as fast it is as `DynamicCache`; `entries` are the mean per kv
    head of the full-attention layers after the prompt, `held_bytes` the cache's bytes then, `peak_bytes` the most that
    was allocated at a time beyond the weights while the prompt was read and a few tokens came. `floor_seconds` is the
    floor of a token on this machine, `prefill_floor_seconds` that of the prompts. The largest batch is that of
    `kvsearch.benchmark.capacity`, where it was asked for, and `compiled_seconds` the time of a token in compiled steps.
    """

    cache: str
    batch: Count
    length: Count
    entries: float
    held_bytes: Index
    peak_bytes: Index
    prefill_seconds: float
    prefill_speedup: float
    token_seconds: float
    tokens_per_second: float
    token_speedup: float
    floor_seconds: float
    prefill_floor_seconds: float
    largest_batch: Count | None = None
    largest_tokens_per_second: float | None = None
    compiled_seconds: float | None = None

    @property
    def floor_share(self) -> float:
        """Ratio of the minimum time of a token to the measured one, at most about 1."""
        return self.floor_seconds / self.token_seconds

    @property
    def prefill_floor_share(self) -> float:
        """Ratio of the minimum time of the prompts to the measured one."""
        return self.prefill_floor_seconds / self.prefill_seconds
