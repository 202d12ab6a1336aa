"""What `bench` says: a table of caches for every batch and length; as JSON it is read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvsearch.errors import UsageError
from kvsearch.evaluation.cache_costs import CacheCosts
from kvsearch.report.numbers import percent
from kvsearch.report.screen import screen_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.models.loading import LoadedModel

COLUMNS = (
    "cache", "entries per head", "held MB", "peak MB", "prompt s", "speed", "ms per token", "tokens/s", "speed ",
    "floor ms", "floor",
)  # fmt: skip


SCHEMA = "kvsearch.speed/1"
ON_GPU = ("kernels", "waits")
LARGEST = ("largest batch", "its tokens/s")
MACHINE = ("model", "dtype", "device", "threads", "torch", "transformers", "new_tokens", "rounds")
MEANING = (
    "speed: how many times as fast as DynamicCache, median of the rounds. held: the cache after the prompt. peak: all "
    "that is allocated beyond the weights.",
    "floor: reading weights and cache once at the bandwidth of a copy on this device, and how near to it a token is.",
)


@dataclass(frozen=True)
class SpeedView:
    """Costs of caches, and where and how they were measured.

    Raises:
        UsageError: numbers that no measurement gives, as in a file that somebody changed.
    """

    machine: dict[str, Any]
    costs: tuple[CacheCosts, ...]

    def __post_init__(self) -> None:
        missing = [name for name in MACHINE if name not in self.machine]
        if missing:
            raise UsageError(f"machine: {missing[0]} is missing")
        if not self.costs:
            raise UsageError("costs: nothing was measured")
        for one in self.costs:
            if not one.token_seconds > 0:
                raise UsageError("costs: a token takes no time")
            known = [value is not None for value in (one.kernels, one.waits)]
            known += [value is not None for value in (one.largest_batch, one.largest_tokens_per_second)]
            first = self.costs[0]
            if known != [first.kernels is not None] * 2 + [first.largest_batch is not None] * 2:
                raise UsageError("costs: not the same is known of all caches")

    @classmethod
    def of(cls, loaded: LoadedModel, costs: Sequence[CacheCosts], steps: int, rounds: int) -> SpeedView:
        """Return a view of what was measured now."""
        import torch
        import transformers

        device = loaded.model.device
        machine = {
            "model": loaded.name,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "new_tokens": steps,
            "rounds": rounds,
        }
        return cls(machine, tuple(costs))

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        costs = [{**asdict(one), "floor_share": one.floor_share} for one in self.costs]
        return {"schema": SCHEMA, "machine": self.machine, "costs": costs}

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        yield self.measured()
        for (batch, length), some in groupby(self.costs, lambda one: (one.batch, one.length)):
            rows = list(some)
            on_gpu, largest = rows[0].kernels is not None, rows[0].largest_batch is not None
            columns = (*COLUMNS, *(ON_GPU if on_gpu else ()), *(LARGEST if largest else ()))
            table = screen_table(f"batch {batch}, {length:,} tokens", columns, left=COLUMNS[:1])
            for one in rows:
                table.add_row(*_cells(one, on_gpu, largest))
            yield table
        yield from MEANING

    def measured(self) -> str:
        """Return on what it was measured, and how."""
        at = self.machine
        return (
            f"{at['model']}, {at['dtype']}, {at['device']}, {at['threads']} threads, torch {at['torch']}, transformers "
            f"{at['transformers']}; medians of {at['rounds']} rounds of {at['new_tokens']} new tokens, caches in turn"
        )


def _cells(one: CacheCosts, on_gpu: bool, largest: bool) -> Iterator[str]:
    yield one.cache
    yield from (f"{one.entries:,.1f}", f"{one.held_bytes / 1e6:,.2f}", f"{one.peak_bytes / 1e6:,.2f}")
    yield from (f"{one.prefill_seconds:.4f}", f"{one.prefill_speedup:.2f}x", f"{1e3 * one.token_seconds:.3f}")
    yield from (f"{one.tokens_per_second:,.1f}", f"{one.token_speedup:.2f}x", f"{1e3 * one.floor_seconds:.3f}")
    yield f"{percent(one.floor_share, 0)}%"
    if on_gpu:
        yield from (f"{one.kernels:,.0f}", f"{one.waits:,.1f}")
    if largest:
        yield from (f"{one.largest_batch:,}", f"{one.largest_tokens_per_second:,.1f}")
