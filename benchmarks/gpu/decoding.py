"""Part 3, about 8 minutes: `kvsearch bench` at 32k, batch 1 and 4, one phase and both, and 600 tokens.

    python benchmarks/gpu/decoding.py

The shape of Llama-3.1-8B with random weights, a tenth of the entries in budgets that differ as calibrated ones do. If
4 prompts do not fit, fewer are read. In 600 tokens room runs out and steps are captured anew: only ours are measured.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from steps import Settings, Step, benched, main

from kvsearch.benchmark.speed import Workload, list_cache_kinds, make_program, measure, measure_roofline
from kvsearch.models.shapes import make_random_model
from kvsearch.plan import parse_phases
from kvsearch.plan.size import Size
from kvsearch.policies import create_policy

RATIO = 0.9  # evicted
PHASES = {"snapkv": "prefill", "h2o": "both"}


def length_of(where: Settings) -> int:
    return 512 if where.small else 32_768


def bench(where: Settings, policy: str, batch: int) -> dict[str, Any]:
    """What `kvsearch bench` prints with --json."""
    sizes = [{"length": (length_of(where),), "batch": (count,)} for count in range(batch, 0, -1)]
    return benched(where, sizes, policy=policy, phases=PHASES[policy], ratio=RATIO, new_tokens=2 if where.small else 64)


def long_reply(where: Settings, policy: str) -> dict[str, Any]:
    """Our cache alone, over a reply that is longer than the room that is made at a time."""
    model = make_random_model(where.shape, device=where.device).model
    tokens = 20 if where.small else 600
    program = make_program(model, create_policy(policy), Size(None, RATIO), parse_phases(PHASES[policy]), skewed=True)
    [*_, kind] = list_cache_kinds(model, {policy: program}, 0)
    work = Workload(1, length_of(where), tokens, 1)
    [costs] = measure(model, [kind], work, measure_roofline(model.device, model.dtype))
    return {**asdict(costs), "floor_share": costs.floor_share, "new_tokens": tokens}


if __name__ == "__main__":
    every = {}
    for name in PHASES:
        every[f"{name}-1"] = Step(partial(bench, policy=name, batch=1), 90)
        every[f"{name}-long"] = Step(partial(long_reply, policy=name), 90)
        every[f"{name}-4"] = Step(partial(bench, policy=name, batch=4), 170)
    main(__doc__, 8, every)
