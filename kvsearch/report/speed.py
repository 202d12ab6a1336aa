"""What `bench` says: a table of caches for every batch and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvsearch.report.screen import screen_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.evaluation.speed import CacheCosts
    from kvsearch.models.loading import LoadedModel

COLUMNS = (
    "cache", "entries per head", "held MB", "peak MB", "prompt s", "speed", "ms per token", "tokens/s", "speed ",
    "floor ms",
)  # fmt: skip


@dataclass(frozen=True)
class SpeedView:
    """Costs of caches, and where and how they were measured."""

    machine: dict[str, Any]
    costs: tuple[CacheCosts, ...]

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
        return {"machine": self.machine, "costs": [asdict(one) for one in self.costs]}

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        at = self.machine
        yield (
            f"{at['model']}, {at['dtype']}, {at['device']}, {at['threads']} threads, torch {at['torch']}, transformers "
            f"{at['transformers']}; medians of {at['rounds']} rounds of {at['new_tokens']} new tokens, caches in turn"
        )
        for (batch, length), some in groupby(self.costs, lambda one: (one.batch, one.length)):
            table = screen_table(f"batch {batch}, {length:,} tokens", COLUMNS, left=COLUMNS[:1])
            for one in some:
                table.add_row(
                    one.cache, f"{one.entries:,.1f}", f"{one.held_bytes / 1e6:,.2f}", f"{one.peak_bytes / 1e6:,.2f}",
                    f"{one.prefill_seconds:.4f}", f"{one.prefill_speedup:.2f}x", f"{1e3 * one.token_seconds:.3f}",
                    f"{one.tokens_per_second:,.1f}", f"{one.token_speedup:.2f}x", f"{1e3 * one.floor_seconds:.3f}",
                )  # fmt: skip
            yield table
        yield (
            "speed: how many times as fast as DynamicCache, median of the rounds. held: the cache after the prompt. "
            "peak: all that is allocated beyond the weights."
        )
        yield "floor: reading weights and cache once at the bandwidth of a copy on this device."
