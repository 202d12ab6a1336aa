"""Part 4, about 8 minutes: 128k at batch 1, the candidate bank, LU-KV on one context, PolyKV's one pass.

    python benchmarks/gpu/long_context.py

Random weights in the shape of Llama-3.1-8B, which read the tokens of the bundled model. If 128k do not fit, fewer are
measured. What the papers do for the same numbers is extrapolated from a prefill: one for every candidate and
sample (EvolKV), and for every layer, phase and pattern (PolyKV).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from steps import Settings, Step, main

from kvsearch.benchmark.speed import (
    Workload,
    draw_prompts,
    list_cache_kinds,
    make_program,
    measure,
    measure_roofline,
    time_prefill,
)
from kvsearch.calibration.lukv import LukvCalibration
from kvsearch.calibration.options import LukvOptions
from kvsearch.calibration.polykv.measure import PolykvCalibration
from kvsearch.calibration.polykv.options import PolykvOptions, make_candidates
from kvsearch.calibration.prompts import make_task_data
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.models.memory import measure_free_bytes
from kvsearch.models.shapes import make_random_model
from kvsearch.plan.size import Size
from kvsearch.policies import create_policy
from kvsearch.report.costs import SpeedView
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.program import estimate_memory, make_full_program
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.samples import list_samples
from kvsearch.tasks.encode import encode_tasks
from kvsearch.tasks.synthetic.suite import SyntheticTask

SEARCH = 200  # candidates
POPULATION = 8
RATIO = 0.9  # evicted


def bench(where: Settings) -> dict[str, Any]:
    """What `kvsearch bench` prints with --json, of DynamicCache and SnapKV alone, at the longest length that fits."""
    loaded = make_random_model(where.shape, device=where.device)
    model = loaded.model
    full = make_full_program(model)
    tokens = 2 if where.small else 64
    program = make_program(model, create_policy("snapkv"), Size(None, RATIO), ("prefill",), skewed=True)
    for length in (768,) if where.small else (131_008, 98_304, 65_536):
        needs = estimate_memory(model, full, [length], tokens=tokens)
        beside = needs.total - needs.weights + estimate_memory(model, program, [length]).cache
        if beside <= measure_free_bytes(model.device):
            break
    kinds = list_cache_kinds(model, {"snapkv, 90% evicted, skewed": program}, 0)
    machine = measure_roofline(model.device, model.dtype)
    costs = measure(model, [kinds[0], kinds[-1]], Workload(1, length, tokens, 1), machine)
    return SpeedView.of(loaded, costs, tokens, 1, machine).as_json()


def reading(where: Settings) -> tuple[LoadedModel, SyntheticTask]:
    """A model of random weights with a tokenizer, and a task with one kind of question."""
    loaded = make_random_model(where.shape, device=where.device)
    tokenizer = load("bundled", LoadOptions(device="cpu")).tokenizer
    return replace(loaded, tokenizer=tokenizer), SyntheticTask("single", 512 if where.small else 8192)


def seconds_of(action: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return made, time.perf_counter() - start


def prefill(loaded: LoadedModel, length: int) -> float:
    """The seconds of one prompt under the full cache, the second time."""
    ids = draw_prompts(loaded.model, 1, length)
    with run_attention(loaded.model):
        for _ in range(2):
            seconds = time_prefill(loaded.model, PlanCache(loaded.model, make_full_program(loaded.model)), ids)
    return seconds


def bank(where: Settings) -> dict[str, Any]:
    """The prefill of 8 samples, and a population on them."""
    loaded, task = reading(where)
    samples = list_samples(encode_tasks(loaded, [task], 2 if where.small else 8), "question-agnostic")
    shape = describe(loaded.model)
    budget = task.length // 16
    rng = np.random.default_rng(0)
    population = [
        np.repeat(rng.integers(budget // 2, 2 * budget, (len(shape.full_layers), 1)), shape.kv_heads, 1)
        for _ in range(POPULATION)
    ]
    dense = prefill(loaded, len(samples[0].prompt))
    made, read = seconds_of(lambda: CandidateBank(loaded, create_policy("snapkv"), samples, cap=2 * budget))
    made.measure_losses(population)  # compiled, and brought to the device
    _, judged = seconds_of(lambda: made.measure_losses(population))
    each = judged / POPULATION
    return {
        "samples": len(samples), "tokens": task.length, "prefill_seconds": read, "dense_prefill_seconds": dense,
        "candidate_seconds": each, "search_of_prefill": (read + SEARCH * each) / read,
        "papers_seconds": SEARCH * len(samples) * dense,
    }  # fmt: skip


def lukv(where: Settings) -> dict[str, Any]:
    """LU-KV on one context with one question: seconds, and the share of them in which the GPU works."""
    loaded, task = reading(where)
    data = make_task_data(loaded, [task], 1, 0).limit_questions(1)
    options = LukvOptions(answers="given", normalization="layer", check=False)
    calibration = LukvCalibration(loaded, data, [create_policy("snapkv")], options)
    prompts = calibration.prepare()
    calibration.measure(prompts)  # the first pass of a process is slow
    _, seconds = seconds_of(lambda: calibration.measure(prompts))
    found = {"tokens": prompts[0].length, "seconds": seconds}
    if where.device.startswith("cuda"):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as record:
            calibration.measure(prompts)
            torch.cuda.synchronize()
        events = record.profiler.kineto_results.events()
        busy = sum(event.duration_ns() for event in events if event.device_type().name == "CUDA") / 1e9
        found["busy_share"] = busy / seconds
    return found


def polykv(where: Settings) -> dict[str, Any]:
    """All patterns in all layers and phases of one context in one pass, beside a run for each of them."""
    loaded, task = reading(where)
    data = make_task_data(loaded, [task], 1, 0).limit_questions(1)
    budget = 64 if where.small else 512
    options = PolykvOptions(budgets=(budget,), batch=1)
    policies, _ = make_candidates(("paper",), {}, options.measured_phases, options.budgets)
    calibration = PolykvCalibration(loaded, data, policies, options)
    prompts = calibration.prepare()
    _, seconds = seconds_of(lambda: calibration.measure(prompts))
    runs = len(policies) * len(options.measured_phases) * len(describe(loaded.model).full_layers)
    papers = runs * prefill(loaded, prompts[0].length)
    return {"tokens": prompts[0].length, "runs": runs, "seconds": seconds, "papers_seconds": papers}


if __name__ == "__main__":
    main(
        __doc__,
        8,
        {"bench": Step(bench, 180), "bank": Step(bank, 120), "lukv": Step(lukv, 120), "polykv": Step(polykv, 120)},
    )
