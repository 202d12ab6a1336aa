"""What a command would cost, stage by stage; and what `bench` says, a table of caches for every batch and length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from kvsearch.benchmark.cache_costs import CacheCosts, Roofline
from kvsearch.core.items import format_clock
from kvsearch.models.work import StageCost
from kvsearch.report.table import Cell, Table
from kvsearch.results import Result

if TYPE_CHECKING:
    from kvsearch.models.loading import LoadedModel
    from kvsearch.runtime.speed import Speed

COST_NOTES = (
    "speed: how many times as fast as DynamicCache, median of the rounds. held: the cache after the prompt. peak: all "
    "that is allocated beyond the weights.",
    "floor: the least that this machine takes, the longer of reading what must be read (weights, the cache of a token) "
    "at the bandwidth of a copy and of computing at the speed of a matrix product, both measured here; and how near "
    "to it the time is.",
)

COUNT_COLUMNS = ("stage", "contexts", "questions", "passes", "tokens")


class Forecast:
    """What a command would do, as JSON, and what its stages cost; seconds where a `model` is there, which is timed.

    `start` are the seconds until the first stage begins: the model is loaded, and questions are prepared.
    """

    def __init__(self, content: Mapping[str, Any], stages: Sequence[StageCost] = (), model: Any = None) -> None:
        self.content = content
        self.stages = stages
        self.speed: Speed | None = None
        if model is not None:
            from kvsearch.runtime.speed import Speed

            self.speed = Speed.of(model, stages)
        self.start = 0.0

    @property
    def seconds(self) -> list[float | None]:
        """About how long every stage takes; None where no speed was measured."""
        return [None if self.speed is None else self.speed.seconds(stage.work) for stage in self.stages]

    @property
    def total(self) -> float | None:
        """About how long all takes; None where that of a stage is not known."""
        known = [seconds for seconds in self.seconds if seconds is not None]
        return self.start + sum(known) if len(known) == len(self.stages) else None

    @property
    def range(self) -> tuple[float, float] | None:
        """The least and the most that all may take; how long it takes to begin was seen."""
        if self.speed is None or self.total is None:
            return None
        fastest, slowest = self.speed.range_of(self.total - self.start)
        return self.start + fastest, self.start + slowest

    @property
    def work(self) -> dict[str, float]:
        """About how long every stage takes, by its name, where a speed was measured."""
        return {stage.name: time or 0.0 for stage, time in zip(self.stages, self.seconds, strict=True)}

    def words(self, name: str, pace: float | None = None) -> str:
        """Return what a stage has to do, and how long that may take: `pace` times what is said, if that is known."""
        [stage] = [stage for stage in self.stages if stage.name == name]
        seconds = self.work[name]
        takes = format_time(self.speed, seconds) if pace is None else f"about {format_clock(seconds * pace)}"
        counts = (
            f"{count} {noun}" for count, noun in zip(_list_counts(stage)[1:], COUNT_COLUMNS[1:], strict=True) if count
        )
        return f"{', '.join(counts)}; {takes}"

    def as_json(self) -> dict[str, Any]:
        """Return what would be done, and what that costs."""
        stages = []
        for stage, seconds in zip(self.stages, self.seconds, strict=True):
            fields = asdict(stage)
            stages.append({**fields.pop("work"), **fields, "seconds": seconds})
        measured = None if self.speed is None else vars(self.speed)
        estimate = {
            "stages": stages, "start": self.start, "seconds": self.total, "range": self.range, "measured": measured,
        }  # fmt: skip
        return {**self.content, "estimate": estimate}

    def parts(self) -> Iterator[Table]:
        """Yield a row for every stage, with about how long it takes here, and their total."""
        rows = [
            [*_list_counts(stage), format_time(self.speed, time)]
            for stage, time in zip(self.stages, self.seconds, strict=True)
        ]
        notes = ["no times: no pass was measured, as no weights are read here"]
        if self.speed is not None:
            rows.insert(0, ["load the model, prepare questions", *[""] * 4, format_clock(self.start)])
            notes = [f"by passes over {self.speed.tokens:,} tokens and a few, measured here, on {self.speed.device}"]
            if self.speed.is_busy:
                notes.append("this machine is busy: the same pass took more than 1.5 times as long as another time")
        total = ["total", *[""] * 4, _format_range(self.range)]
        yield Table.plain("", [*COUNT_COLUMNS, "time"], [*rows, total], notes=notes)


def format_time(speed: Speed | None, seconds: float | None) -> str:
    """Return the least and the most that something may take; a dash where that is not known."""
    return _format_range(None if speed is None or seconds is None else speed.range_of(seconds))


def _format_range(within: tuple[float, float] | None) -> str:
    return "-" if within is None else " to ".join(map(format_clock, within))


def _list_counts(stage: StageCost) -> list[str]:
    counts = (stage.contexts, stage.questions, round(stage.work.passes), round(stage.work.tokens))
    return [stage.name, *(f"{count:,}" if count else "" for count in counts)]


class SpeedView(Result):
    """Costs of caches, and where and how they were measured."""

    SCHEMA: ClassVar[str] = "kvsearch.speed/1"

    machine: dict[str, Any]
    costs: tuple[CacheCosts, ...]

    @classmethod
    def of(
        cls, loaded: LoadedModel, costs: Sequence[CacheCosts], steps: int, rounds: int, roofline: Roofline
    ) -> SpeedView:
        """Return a view of what was measured now."""
        return cls(machine=describe_machine(loaded, steps, rounds) | asdict(roofline), costs=tuple(costs))

    def as_json(self) -> dict[str, Any]:
        """Return the machine and all costs, for programs."""
        costs = [
            {
                **asdict(measured),
                "floor_share": measured.floor_share,
                "prefill_floor_share": measured.prefill_floor_share,
            }
            for measured in self.costs
        ]
        return {**super().as_json(), "costs": costs}

    def parts(self) -> Iterator[str | Table]:
        """Yield on what it was measured, a table for every batch and length, and what its columns mean."""
        yield self.measured()
        for (batch, length), group in groupby(self.costs, lambda costs: (costs.batch, costs.length)):
            rows = [_make_cells(costs) for costs in group]
            columns = [name for name in rows[0] if any(row[name].text != "-" for row in rows)]
            yield Table.plain(
                f"batch {batch}, {length:,} tokens", columns, [[row[name] for name in columns] for row in rows]
            )
        yield from COST_NOTES

    def measured(self) -> str:
        """Return on what it was measured, and how."""
        at = self.machine
        rates = f"here {at['bandwidth'] / 1e9:,.1f} GB/s, {at['flops'] / 1e12:,.2f} TFLOP/s"
        how = f"medians of {at['rounds']} rounds of {at['new_tokens']} new tokens, caches in turn"
        return f"{format_machine(at)}; {how}; {rates}"


def describe_machine(loaded: LoadedModel, steps: int, rounds: int) -> dict[str, Any]:
    """Return where and how something was measured, as JSON."""
    import torch
    import transformers

    from kvsearch.benchmark.speed import choose_clock

    device = loaded.model.device
    return {
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "clock": choose_clock(device).__name__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "new_tokens": steps,
        "rounds": rounds,
    }


def format_machine(at: Mapping[str, Any]) -> str:
    """Return where something was measured, in words."""
    clock = ", processor time" if at.get("clock") == "process_time" else ""
    return (
        f"{at['model']}, {at['dtype']}, {at['device']}, {at['threads']} threads{clock}, torch {at['torch']}, "
        f"transformers {at['transformers']}"
    )


def _make_cells(costs: CacheCosts) -> dict[str, Cell]:
    """Return the cells of a cache by column; what was not measured is a dash."""
    return {
        "cache": Cell(costs.cache),
        "entries per head": Cell.number(costs.entries, ",.1f"),
        "held MB": Cell.number(costs.held_bytes / 1e6, ",.2f"),
        "peak MB": Cell.number(costs.peak_bytes / 1e6, ",.2f"),
        "prompt s": Cell.number(costs.prefill_seconds, ".4f"),
        "speed": Cell.number(costs.prefill_speedup, ".2f", "x"),
        "floor s": Cell.number(costs.prefill_floor_seconds, ".4f"),
        "floor": Cell.number(costs.prefill_floor_share, ".0%"),
        "ms per token": Cell.number(1e3 * costs.token_seconds, ".3f"),
        "tokens/s": Cell.number(costs.tokens_per_second, ",.1f"),
        "speed ": Cell.number(costs.token_speedup, ".2f", "x"),
        "floor ms": Cell.number(1e3 * costs.floor_seconds, ".3f"),
        "floor ": Cell.number(costs.floor_share, ".0%"),
        "compiled ms": Cell.number(costs.compiled_seconds and 1e3 * costs.compiled_seconds, ".3f"),
        "largest batch": Cell.number(costs.largest_batch, ","),
        "its tokens/s": Cell.number(costs.largest_tokens_per_second, ",.1f"),
    }
