"""The search loop, by an evaluator without a model, and the fitness of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.arrays import Ints, Vector
from kvsearch.core.errors import EnvironmentFault
from kvsearch.search import loop
from kvsearch.search.loop import SearchOutcome, cache_score, fitness, loss_score, penalise_failures
from kvsearch.search.stages import BudgetBounds
from kvsearch.search.trials import Candidate, TrialLog
from tests.search.searching import (
    BUDGET,
    HEADS,
    LAYERS,
    Measure,
    NullReporter,
    frame_of,
    generations_of,
    mean_loss,
    run,
    search_of,
    smooth,
    starts_of,
    timeless,
    told,
)

MODES: list[dict[str, Any]] = [{}, {"parity": True}, {"space": "layers", "population": 4, "objective": "metric"}]
IDS = [",".join(f"{key}={value}" for key, value in mode.items()) or "default" for mode in MODES]


def score(table: Ints, sample: int) -> float:
    """The same as a metric."""
    return math.exp(-smooth(table, sample))


def measure_for(mode: dict[str, Any], **more: Any) -> Measure:
    return Measure(score if mode.get("objective") == "metric" else smooth, **more)


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_the_total_is_exact_and_the_result_no_worse_than_any_start(mode: dict[str, Any], tmp_path: Path) -> None:
    measure = measure_for(mode)
    outcome = run(tmp_path / "l", measure, **mode)
    value = (lambda table: -mean_loss(table, score)) if mode.get("objective") == "metric" else mean_loss
    for one in outcome.pool:
        assert one.table.sum() == BUDGET * LAYERS * HEADS
        assert one.table.min() >= 4
        assert one.value == pytest.approx(value(one.table), abs=1e-8)
    found, given = min(one.value for one in outcome.pool), min(map(value, starts_of(frame_of()).values()))
    assert found <= given + 1e-8
    if not mode.get("parity"):
        assert found < given
        assert [one.value for one in outcome.pool] == sorted(one.value for one in outcome.pool)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[2], marks=pytest.mark.nightly)], ids=IDS[::2])
def test_a_run_that_is_cut_anywhere_ends_the_same(mode: dict[str, Any], tmp_path: Path) -> None:
    """After any line of its ledger, and in the middle of it."""
    whole, mode = tmp_path / "whole", {**mode, "generations": 2}
    expected = run(whole, measure_for(mode), **mode)
    lines = whole.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        cut = tmp_path / f"cut-{kept}"
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][: 7 * (kept % 3)])
        again = run(cut, measure_for(mode), **mode)
        assert told(again) == told(expected), kept
        assert again.ended == expected.ended
        assert timeless(cut) == timeless(whole), kept


def test_searches_with_names_share_a_ledger(tmp_path: Path) -> None:
    with TrialLog(tmp_path / "l") as ledger:
        first = search_of(ledger, Measure(), name="a: ").run()
        measure, watcher = Measure(), NullReporter()
        second = search_of(ledger, measure, watcher=watcher, name="b: ").run()
        assert {line.stage[:3] for line in generations_of(ledger, "a: layers 0-1")} == {"a: "}
    assert watcher.stages[0] == "b: start plans"
    assert not any(table.tolist() == [[BUDGET] * HEADS] * LAYERS for table in measure.candidates)  # known by then
    assert told(first) != told(second)  # seeds differ by name


def test_no_candidate_is_measured_twice(tmp_path: Path) -> None:
    """Where budgets are few, points round to the same ones."""
    measure, starts = Measure(), {"uniform": np.full((LAYERS, HEADS), 5, dtype=np.int64)}
    run(tmp_path / "l", measure, frame=frame_of(budget=5), generations=8, starts=starts)
    keys = [table.tobytes() for table in measure.candidates]
    assert len(keys) == len(set(keys))
    with TrialLog(tmp_path / "l") as ledger:
        generations = [generations_of(ledger, f"layers {rows}") for rows in ("0-1", "2-3")]
    assert any(len(set(one.values)) < len(one.values) for found in generations for one in found)


@pytest.mark.parametrize(
    ("changes", "loss", "words"),
    [
        ({"parity": True}, 0.25, "plans and all the same: this budget does not matter here"),  # whatever they hold
        ({"objective": "metric"}, 0.0, "plans, so it tells none apart: search by nll"),
    ],
)
def test_equal_values_end_a_search_once_every_stage_was_tried(
    changes: dict[str, Any], loss: float, words: str, tmp_path: Path
) -> None:
    watcher, measure = NullReporter(), Measure(lambda *_: loss)
    outcome = run(tmp_path / "l", measure, watcher=watcher, **changes)
    assert outcome.flat
    assert outcome.ended.endswith(words)
    varied = np.unique(measure.candidates, axis=0).std(axis=0)
    assert (varied > 0).all(), "a layer that was never varied"
    assert watcher.ends == [outcome.ended]


def last_layer_retrieves(table: Ints, sample: int) -> float:
    """A metric that one layer alone decides, once it has twice the budget."""
    return float(table[-1, 0] >= 2 * BUDGET)


def test_a_flat_stage_says_nothing_of_the_others(tmp_path: Path) -> None:
    outcome = run(tmp_path / "l", Measure(last_layer_retrieves), objective="metric", generations=6, group_size=1)
    assert not outcome.flat
    assert outcome.ended == "all stages are finished"
    assert outcome.pool[0].value == -1
    assert outcome.pool[0].table[-1, 0] >= 2 * BUDGET


class TestFailures:
    def test_a_candidate_without_a_value_is_told_as_worse_than_all_others(self, tmp_path: Path) -> None:
        def loss(table: Ints, sample: int) -> float:
            return math.nan if table[0, 0] > 22 else smooth(table, sample)

        measure, watcher = Measure(loss), NullReporter()
        outcome = run(tmp_path / "l", measure, watcher=watcher)
        failed = [generation for generation in watcher.generations if any(map(math.isnan, generation[2]))]
        assert failed, "no candidate failed"
        with TrialLog(tmp_path / "l") as ledger:
            stages = [generations_of(ledger, f"layers {rows}") for rows in ("0-1", "2-3")]
        lines = {(line.stage, line.generation): line for stage in stages for line in stage}
        for stage, number, values in failed:
            known = lines[stage, number].values
            worst = max(value for value in values if not math.isnan(value))
            assert all(a > worst if math.isnan(b) else a == b for a, b in zip(known, values, strict=True))
        assert all(one.table[0, 0] <= 22 for one in outcome.pool)

    def test_a_failure_makes_no_difference_between_plans(self, tmp_path: Path) -> None:
        """One candidate fails, and the flat stages end as they do without it, in steps that double."""
        clean, watcher = NullReporter(), NullReporter()
        changes: dict[str, Any] = {"generations": 10, "group_size": 3}
        run(tmp_path / "clean", Measure(lambda *_: 0.25), watcher=clean, **changes)
        first = Measure(lambda *_: 0.25)
        run(tmp_path / "first", first, 3, **changes)
        bad = first.candidates[-1].tobytes()  # the first that is no start plan

        def loss(table: Ints, sample: int) -> float:
            return math.nan if table.tobytes() == bad else 0.25

        outcome = run(tmp_path / "l", Measure(loss), watcher=watcher, **changes)
        assert any(math.isnan(value) for _, _, values in watcher.generations for value in values)
        assert outcome.flat
        stages, clean_stages = ([stage for stage, _, _ in one.generations] for one in (watcher, clean))
        assert stages == clean_stages
        with TrialLog(tmp_path / "l") as ledger:
            lines = generations_of(ledger, "layers 0-2")
        assert len(lines) == loop.FLAT_GENERATIONS
        assert np.std(lines[-1].points, axis=0).max() > 1.5 * np.std(lines[1].points, axis=0).max()

    def test_more_than_half_of_a_generation_ends_it_and_resume_goes_on(self, tmp_path: Path) -> None:
        expected = run(tmp_path / "whole")
        starts = {table.tobytes() for table in starts_of(frame_of()).values()}

        def broken(table: Ints, sample: int) -> float:
            if table.tobytes() in starts:
                return smooth(table, sample)
            raise RuntimeError("the disk of the model is gone")

        with pytest.raises(
            EnvironmentFault, match=r"candidates failed .*the disk of the model is gone.*give the same command again"
        ):
            run(tmp_path / "l", Measure(broken))
        assert told(run(tmp_path / "l")) == told(expected)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1))
def test_a_failure_is_worse_than_everything_and_finite(values: list[float]) -> None:
    assert math.isfinite(penalise_failures(values))
    assert penalise_failures(values) > max(values)


class TestLimits:
    def test_evaluations_are_exact(self, tmp_path: Path) -> None:
        whole = Measure()
        run(tmp_path / "whole", whole)
        most = len(whole.candidates)
        for limit in (1, 5, most - 1, most, most + 1):
            measure = Measure()
            outcome = run(tmp_path / str(limit), measure, limit)
            assert len({table.tobytes() for table in measure.candidates}) == min(limit, most)
            # What is measured before the limit is what would be measured without one.
            assert [table.tolist() for table in measure.candidates] == [
                table.tolist() for table in whole.candidates[:limit]
            ]
            if limit < most:
                assert outcome.ended == f"{limit} candidates were evaluated, as many as allowed"
            assert {tuple(one.table.ravel()) for one in outcome.pool} == {
                tuple(table.ravel()) for table in whole.candidates[:limit]
            }


class Scripted:
    """An optimiser that asks for given points, one generation for each stage."""

    finished = None

    def __init__(self, script: list[list[list[float]]], log: list[tuple[Sequence[Vector], list[float]]]) -> None:
        self.points, self.log = script.pop(0), log

    def inject(self, points: Sequence[Vector]) -> None:
        assert not points

    def ask(self) -> list[Vector]:
        return [np.array(point) for point in self.points]

    def tell(self, points: Sequence[Vector], values: list[float], measured: Sequence[float]) -> None:
        assert list(measured) == values
        self.log.append((points, values))


def test_parity_is_algorithm_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked by hand: 4 layers, c = 8, groups of 2, two candidates in each group.

    Group 1: [12, 12] has CacheScore 0.5: 0.80 * 1.15 = 0.92; [4, 8] has 0.95: 0.70 * 1.285 = 0.8995. The first wins.
    Group 2: [4, 4] has 0.9: 0.72 * 1.27 = 0.9144, below the best of group 1; [4, 8]: 0.73 * 1.285 = 0.93805 wins.
    The result [12, 12, 4, 8] has 36 entries; as 32 they are [10.67, 10.67, 3.56, 7.11], so [11, 11, 3, 7].
    """
    scores = {
        (8, 8, 8, 8): 0.71, (12, 12, 8, 8): 0.80, (4, 8, 8, 8): 0.70, (12, 12, 4, 4): 0.72, (12, 12, 4, 8): 0.73,
    }  # fmt: skip
    completed = {(11, 11, 3, 7): 0.705}
    script = [[[1.5, 1.5], [0.5, 1.0]], [[0.5, 0.5], [0.5, 1.0]]]
    log: list[tuple[Sequence[Vector], list[float]]] = []
    monkeypatch.setattr(loop, "create_optimiser", lambda _: Scripted(script, log))
    asked: list[tuple[int, ...]] = []

    def loss(table: Ints, sample: int) -> float:
        key = tuple(int(entries) for entries in table[:, 0])
        if sample == 0:
            asked.append(key)
        return -math.log({**scores, **completed}[key])

    floors = np.ones((4, 1), dtype=np.int64)
    frame = BudgetBounds(8, floors, np.full_like(floors, 64))
    starts = {"uniform": np.full((4, 1), 8, dtype=np.int64)}
    outcome = run(tmp_path / "l", Measure(loss), frame=frame, starts=starts, parity=True, generations=1, finalists=1)
    assert asked[:5] == list(scores)
    told_values = [value for _, values in log for value in values]
    assert told_values == pytest.approx([-0.92, -0.8995, -0.9144, -0.93805])
    assert [point.tolist() for point in log[1][0]] == [[0.5, 0.5], [0.5, 1.0]]
    assert outcome.pool[0].table[:, 0].tolist() == [11, 11, 3, 7]
    assert outcome.pool[0].value == pytest.approx(-math.log(0.705))
    assert outcome.pool[0].where == "layers 2-3, generation 0, completed"
    assert outcome.result is outcome.pool[0]
    with TrialLog(tmp_path / "l") as ledger:
        assert [row[0] for row in ledger.best.candidate] == [12, 12, 4, 8]


def found(budget: int, value: float, where: str = "group 1") -> Candidate:
    return Candidate(np.array([[budget]]), value, where)


def test_a_pool_has_its_best_and_the_start_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_POOL", 3)
    outcome = SearchOutcome()
    outcome.add([found(1, 9.0, "start uniform"), found(2, 2.5, "start mine")])
    for number in range(10):
        outcome.add([found(10 + number, 5.0 - number / 4)])
    assert [(one.where, one.value) for one in outcome.pool] == [
        ("start mine", 2.5), ("group 1", 2.75), ("group 1", 3.0), ("start uniform", 9.0)
    ]  # fmt: skip
    outcome.add([found(10, 1.0), found(2, float("nan"))])
    assert [one.value for one in outcome.pool] == [1.0, 2.5, 2.75, 9.0]


def test_cache_scores_at_128() -> None:
    scores = {0: 0.8, 64: 0.9, 96: 0.95, 128: 1.0, 160: 0.75, 192: 0.5, 256: 0.0, 300: 0.0}
    assert {mean: cache_score(mean, 128) for mean in scores} == pytest.approx(scores)
    assert cache_score(64, 128, gamma=1.0) == pytest.approx(0.5)  # discounts what is left unused
    assert cache_score(160, 128, gamma=1.0) == cache_score(160, 128)


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 1))
def test_less_loss_is_fitter_at_the_same_budget(one: float, other: float, cache: float) -> None:
    less, more = sorted((one, other))
    assert fitness(loss_score(less), cache) >= fitness(loss_score(more), cache) > 0
