"""Where a plan starts to pay: costs that are known are found again, and foretold as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.benchmark import capacity
from kvsearch.benchmark.break_even import (
    PAYS,
    CostModel,
    Forecaster,
    StepCosts,
    choose_checks,
    list_lengths,
)
from kvsearch.benchmark.speed import make_program
from kvsearch.core.errors import EnvironmentFault
from kvsearch.evaluation.names import FULL
from kvsearch.models.work import Work
from kvsearch.plan.size import Size
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.speed import Speed
from tests.families import build

LENGTHS = (512, 1024, 2048, 4096)
BATCHES = (1, 4, 16)
HEADS = 90  # 30 layers of 3 kv heads
STEP = (0.02, 0.001, 3e-8)
PROMPT = (0.05, 4e-4, 2e-8)
REQUEST = (5e5, 256.0)


def costs_of(step: Sequence[float], share: float = 1.0, noise: Sequence[float] = (1.0,) * 12) -> list[StepCosts]:
    """What a machine without any noise but this measures of a cache that keeps this share."""
    return [
        StepCosts(
            "cache", length, batch, entries := int(share * length) * HEADS, entries,
            token_seconds=(step[0] + step[1] * batch + step[2] * batch * entries) * factor,
            token_spread=1.0,
            prefill_seconds=PROMPT[0] + PROMPT[1] * length + PROMPT[2] * length**2,
            request_bytes=int(REQUEST[0] + REQUEST[1] * entries),
        )
        for (length, batch), factor in zip(product(LENGTHS, BATCHES), noise, strict=False)
    ]  # fmt: skip


def test_costs_are_found_again() -> None:
    model = CostModel.fit(costs_of(STEP))
    assert model.step == pytest.approx(STEP)
    assert model.prompt == pytest.approx(PROMPT)
    assert model.request == pytest.approx(REQUEST)
    # a step of 8 sequences of 3,000 tokens: 0.02 + 0.008 + 3e-8 * 8 * 270,000
    assert model.estimate_step(8, 3000 * HEADS) == pytest.approx(0.0928)
    assert model.estimate_prompt(3000) == pytest.approx(1.43)
    assert model.estimate_request(3000 * HEADS) == pytest.approx(69.62e6)
    measured = replace(costs_of(STEP)[0], length=3000, batch=8, entries=3000 * HEADS, token_seconds=0.08)
    assert model.check(measured).error == pytest.approx(0.16)


@given(st.lists(st.floats(0.1, 10), min_size=12, max_size=12), st.integers(1, 64), st.integers(0, 10**6))
def test_more_work_never_takes_less(noise: list[float], batch: int, entries: int) -> None:
    model = CostModel.fit(costs_of(STEP, noise=noise))
    seconds = model.estimate_step(batch, entries)
    assert 0 < seconds <= model.estimate_step(batch, entries + 1000)
    assert seconds <= model.estimate_step(batch + 1, entries)
    assert 0 < model.estimate_prompt(batch) <= model.estimate_prompt(batch + 1)
    assert 0 < model.estimate_request(entries) <= model.estimate_request(entries + 1)


def forecaster() -> Forecaster:
    """A plan of a tenth whose step takes 4 ms more beside what it reads; one of two full caches is slow."""
    costs = {
        "slow": CostModel((1.0, 0.001, 3e-8), PROMPT, REQUEST),
        "fast": CostModel(STEP, PROMPT, REQUEST),
        "plan": CostModel((0.024, 0.001, 3e-8), PROMPT, REQUEST),
    }

    def count(name: str, length: int) -> tuple[int, int]:
        entries = HEADS * (length // 10 if name == "plan" else length)
        return entries, entries

    return Forecaster(costs, count, ("slow", "fast"), memory=10**9)


def test_where_a_plan_starts_to_pay() -> None:
    foretold = forecaster()
    for batch in (1, 4):
        start = foretold.find_break_even("plan", batch, 512, 8192).length
        # .02 + .001 B + r B T = PAYS (.024 + .001 B + r B T / 10), with r seconds for a token of every head
        seconds = STEP[2] * HEADS * (1 - PAYS / 10) * batch
        expected = (PAYS * (0.024 + 0.001 * batch) - 0.02 - 0.001 * batch) / seconds
        assert start == pytest.approx(expected, rel=0.02)
    assert foretold.find_break_even("plan", 1, 64, 1024).length is None
    assert foretold.find_break_even("plan", 64, 512, 8192).length == 512
    full = foretold.foretell(FULL, 1000, 4, longest=999)
    assert full.tokens_per_second == pytest.approx(4 / (0.024 + 4 * 0.0027))  # of the fast one
    assert (full.speedup, full.is_measured) == (1, False)
    assert full.requests == int(1e9 / (5e5 + 256 * 90_000))
    plan = foretold.foretell("plan", 1000, 4, longest=1000)
    assert plan.speedup == pytest.approx(plan.tokens_per_second / full.tokens_per_second)
    assert plan.requests == int(1e9 / (5e5 + 256 * 9_000)) > full.requests
    assert plan.requests_per_second == pytest.approx(plan.requests / (0.024 + plan.requests * 0.00127))
    assert replace(foretold, memory=10).foretell("plan", 1000, 4, 1000).requests_per_second == 0


@pytest.mark.parametrize(
    ("lengths", "batches", "checks"),
    [
        (LENGTHS, BATCHES, [(724, 2), (1448, 2), (2896, 8)]),
        ((512, 2048), (1, 2), [(1024, 1), (1024, 2)]),
        ((512, 513), (1, 4), []),
    ],
)
def test_checks_are_between_what_is_measured(
    lengths: tuple[int, ...], batches: tuple[int, ...], checks: list[tuple[int, int]]
) -> None:
    assert choose_checks(lengths, batches) == checks
    assert not set(checks) & set(product(lengths, batches))


def test_lengths_of_a_curve_go_on_to_what_the_model_takes() -> None:
    assert list_lengths((512, 1024), 3000) == [512, 1024, 2048]
    assert list_lengths((512, 1024), 0) == [512, 1024, 2048, 4096]


def program_of(model: Any, phases: Any = ("prefill",), kept: int = 6) -> Program:
    return make_program(model, create_policy("snapkv", {"window": 4}), Size(kept), phases)


def test_entries_that_a_step_reads() -> None:
    model = build("llama")  # 4 layers of 2 kv heads
    count = capacity.count_kept_entries
    assert count(model, None, 20) == (160, 160)
    assert count(model, program_of(model), 20) == (48, 48)
    assert count(model, program_of(model), 5) == (40, 40)
    assert count(model, program_of(model, ("decode",)), 20) == (48, 160)


def test_lengths_that_a_device_reads_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    programs = {"snapkv": program_of(model)}
    monkeypatch.setattr(capacity, "SHORTEST_PROMPT", 16)
    monkeypatch.setattr(capacity, "LONGEST_PROMPT", 128)
    slow: list[float] = []

    def seconds(speed: Speed, work: Work) -> float:
        slow.append(work.tokens)
        return 1e9 if len(slow) < 3 else 0.0

    monkeypatch.setattr(Speed, "seconds", seconds)
    assert capacity.choose_lengths(model, programs, (1, 4), 8) == (4, 8, 16, 32)
    assert slow[0] == 3 * (16 + 32 + 64 + 128 + 22 + 45 + 90)  # with those of the checks, for three kinds of caches
    monkeypatch.setattr(capacity, "measure_free_bytes", lambda _: 0)
    with pytest.raises(EnvironmentFault, match="lower --batch"):
        capacity.choose_lengths(model, programs, (1, 4), 8)
