"""What is read off a profile, on profiles made for the purpose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvsearch.budgets.convex import compute_oracle_recall, compute_recall
from kvsearch.calibration.analysis import (
    compute_lost_mass,
    compute_ranking_gap,
    correlate_ranks,
    measure_stability,
)
from kvsearch.calibration.options import STABILITY_RATIOS
from kvsearch.plan import Profile, ProfileMetadata
from tests.budgets.samples import eviction_loss
from tests.examples import fixed
from tests.plan.builders import metadata_dict, ratio_table

LAYERS, HEADS = 2, 3
few = fixed(60)
UP = np.linspace(0.1, 0.9, LAYERS * HEADS).reshape(LAYERS, HEADS)
values = st.lists(st.integers(0, 5).map(float), min_size=3, max_size=30)


def profile(**arrays: Any) -> Profile:
    """A profile of 2 layers and 3 kv heads with some arrays of a calibration."""
    questions = len(arrays["question_context"]) if "question_context" in arrays else 1
    model = {**metadata_dict()["model"], "layers": LAYERS, "kv_heads": HEADS}
    metadata = ProfileMetadata.model_validate(metadata_dict(model=model, layers=[0, 1], questions=questions, floor=0))
    return Profile(metadata, {"evicted_ratio": ratio_table(LAYERS, HEADS), **arrays})


def asked(*tables: NDArray[Any], contexts: list[int]) -> Profile:
    """A profile whose questions have these local ratios at every global ratio."""
    ratios = np.stack([np.broadcast_to(table, (9, LAYERS, HEADS)) for table in tables]).astype(np.float32)
    return profile(question_ratio=ratios, question_context=np.array(contexts, dtype=np.int32))


@few
@given(a=values, seed=st.integers(0, 99))
def test_spearman_is_scipys(a: list[float], seed: int) -> None:
    from scipy.stats import spearmanr

    b = np.random.default_rng(seed).integers(0, 4, len(a)).astype(float)
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert correlate_ranks(np.array(a), b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    flat, rising = np.ones(4), np.arange(4.0)
    assert correlate_ranks(flat, 2 * flat) == 1.0
    assert correlate_ranks(flat, rising) == correlate_ranks(rising, flat) == 0.0


def test_questions_of_one_context_and_contexts_are_told_apart() -> None:
    """Two contexts that want the opposite of each other, two questions each that agree."""
    found = measure_stability(asked(UP, 1 - UP, UP, 1 - UP, contexts=[0, 1, 0, 1]), 0.8)
    assert (found.questions, found.texts, found.halves) == pytest.approx((1.0, -1.0, -1.0))
    assert found.verdict.startswith("unstable")


def test_half_agreement_is_doubtful() -> None:
    ranks = np.array([0, 1, 2, 3, 4, 5.0])
    other = np.array([2, 1, 0, 3, 5, 4.0])  # rank correlation 1 - 6 * 10 / 210 = 0.714
    tables = ranks.reshape(2, 3) / 10, other.reshape(2, 3) / 10
    found = measure_stability(asked(*tables, contexts=[0, 1]), 0.5)
    assert found.halves == pytest.approx(1 - 60 / 210)
    assert found.verdict.startswith("doubtful")
    assert math.isnan(found.questions)
    alone = measure_stability(asked(UP, contexts=[0]), 0.5)
    assert all(math.isnan(value) for value in (alone.questions, alone.texts, alone.halves))
    assert alone.verdict.startswith("unknown")


def test_the_nearest_stored_ratio_is_used() -> None:
    ratios = np.stack([np.broadcast_to(table, (9, LAYERS, HEADS)) for table in (UP, 1 - UP)]).astype(np.float32)
    ratios[1, STABILITY_RATIOS.index(0.8)] = UP  # the questions agree at this ratio only
    made = profile(question_ratio=ratios, question_context=np.zeros(2, np.int32))
    for ratio, stored in ((0.01, 0.1), (0.84, 0.8), (0.86, 0.9)):
        found = measure_stability(made, ratio)
        assert found.ratio == stored
        assert found.questions == pytest.approx(1.0 if stored == 0.8 else -1.0)


def random_importance(length: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).exponential(size=(LAYERS, HEADS, length)) ** 2


def mass_of(importance: NDArray[np.float64]) -> NDArray[np.float32]:
    """Importance kept at 0%, 1%, ... of a length that is a multiple of 100."""
    kept = np.concatenate([np.zeros((LAYERS, HEADS, 1)), importance.cumsum(-1)], -1)
    return kept[..., :: importance.shape[-1] // 100].astype(np.float32)


@few
@given(data=st.data())
def test_lost_mass_is_the_eviction_loss(data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([100, 200, 500]))
    importance = random_importance(length, data.draw(st.integers(0, 9)))
    percent = np.array(data.draw(st.lists(st.integers(0, 100), min_size=6, max_size=6))).reshape(LAYERS, HEADS)
    expected = eviction_loss(importance, percent * length // 100) / importance.sum()
    made = profile(mass=mass_of(importance))
    np.testing.assert_allclose(compute_lost_mass(made, percent / 100), expected, atol=1e-6)
    low, between, high = (compute_lost_mass(made, np.full((LAYERS, HEADS), at)) for at in (0.30, 0.3025, 0.31))
    np.testing.assert_allclose(between, 0.75 * low + 0.25 * high, rtol=1e-6)  # linear between points of the grid


def test_ranking_gap_is_the_area_between_the_recall_curves() -> None:
    importance = random_importance(100)
    importance[0, 0] = np.sort(importance[0, 0])[::-1]  # this head is ranked perfectly
    curves = {"recall": compute_recall(importance), "oracle_recall": compute_oracle_recall(importance)}
    gap = compute_ranking_gap(profile(**{name: curve.astype(np.float32) for name, curve in curves.items()}))
    np.testing.assert_allclose(gap, (curves["oracle_recall"] - curves["recall"]).mean(-1), atol=1e-6)
    assert gap[0, 0] == pytest.approx(0.0, abs=1e-6)
    assert gap[1, 1] > 0.1
