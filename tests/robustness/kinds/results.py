"""Results of commands, which `show`, `report` and `verify` read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kvsearch.benchmark.break_even import BreakEven, CostModel, Forecaster, StepCosts
from kvsearch.benchmark.cache_costs import CacheCosts
from kvsearch.report.break_even import BreakEvenView
from kvsearch.report.costs import SpeedView
from kvsearch.strategies.names import FULL
from tests.robustness.forms import Json
from tests.robustness.kinds.kind import Kind, show
from tests.robustness.valid import stored


def kinds() -> Iterator[Kind]:
    """Return these kinds."""
    results = {
        "evaluation": ("evaluation.json", "evaluation-needle.json", "evaluation-losses.json"),
        "headroom": ("headroom.json",), "selection": ("selection.json",),
        "search": ("search.json", "front.json"), "run": ("run.json",),
        "reproduction": ("reproduction.json", "reproduction-2.json"),
    }  # fmt: skip
    for name, files in results.items():
        yield Kind(f"result-{name}", "report.json", partial(stored, *files), Json(), show)
    yield Kind("result-speed", "speed.json", speeds, Json(), show)
    yield Kind("result-break-even", "curve.json", curves, Json(), show)


def speeds() -> list[bytes]:
    """Return what `bench --json` prints, without and with the largest batches."""
    machine = make_machine() | {"bandwidth": 1e9, "flops": 1e12}
    costs = [
        CacheCosts(cache, 2, length, 20.5, 4096, 9000, 0.25, 1.5, 0.01, 100.0, 1.25, 0.004, 0.1)
        for length in (64, 128)
        for cache in ("DynamicCache", "snapkv")
    ]
    full = [replace(one, largest_batch=8, largest_tokens_per_second=512.0) for one in costs]
    views = SpeedView(machine=machine, costs=tuple(costs)), SpeedView(machine=machine, costs=tuple(full))
    return [json.dumps(view.as_json()).encode() for view in views]


def make_machine() -> dict[str, object]:
    """Return where something was measured."""
    names = ("model", "dtype", "device", "threads", "torch", "transformers", "new_tokens", "rounds")
    return {name: 1 if name in ("threads", "new_tokens", "rounds") else name for name in names}


def curves() -> list[bytes]:
    """Return what `bench --curve --json` prints."""
    caches = ("DynamicCache", "kvsearch, full", "snapkv")
    measured = [
        StepCosts(cache, length, batch, 8 * length, 8 * length, 0.01, 2.0, 0.25, 4096 * length)
        for length in (64, 256)
        for batch in (1, 4)
        for cache in caches
    ]
    costs = {cache: CostModel.fit([cost for cost in measured if cost.cache == cache]) for cache in caches}
    forecaster = Forecaster(costs, lambda _, length: (8 * length, 8 * length), caches[:2], 10**8)
    view = BreakEvenView(
        machine=make_machine(),
        memory=10**8,
        measured=tuple(measured),
        checks=tuple(costs[cost.cache].check(replace(cost, length=128)) for cost in measured[:3]),
        costs=costs,
        points=tuple(
            forecaster.foretell(cache, length, batch, 256)
            for cache in (FULL, "snapkv")
            for length in (64, 256, 512)
            for batch in (1, 4)
        ),
        break_evens=(forecaster.find_break_even("snapkv", 1, 64, 512), BreakEven("snapkv", 4, 64)),
    )
    return [json.dumps(view.as_json()).encode()]
