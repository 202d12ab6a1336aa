"""Searching on hard questions alone."""

from __future__ import annotations

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel, load
from kvsearch.search import evolve
from kvsearch.search.evolve import keep_hard_questions, prepare_search
from kvsearch.search.start_plans import Base
from tests.search.evolving import BUDGET, POLICY, QUESTIONS, prepare, settings_of, splits

SCORES = {
    "wrong anyway": {"full": 0.99, "uniform": 0.0},
    "no longer hard": {"full": 1.0, "uniform": 0.6},
    "hard": {"full": 1.0, "uniform": 0.59},
    "lost": {"full": 1.0, "uniform": 0.0},
    "better without": {"full": 0.5, "uniform": 1.0},
    "half": {"full": 1.0, "uniform": 0.5},
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("bundled")


def test_what_the_full_cache_gets_right_and_eviction_below_the_bound(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evolve, "_measure_difficulty", lambda *_: SCORES)

    def kept(**changes: float) -> frozenset[str]:
        (search,), words = keep_hard_questions([prepare(loaded, **changes)])
        assert search.kept is not None
        assert words.startswith(f"searching on {len(search.kept)} of 6 questions: the full cache answers 4 right")
        return search.kept

    assert kept(hard_below=60) == {"hard", "lost", "half"}
    assert kept(hard_below=100) == {"hard", "lost", "half", "no longer hard"}
    assert kept(hard_below=60, hard_most=9) == {"hard", "lost", "half"}
    drawn = [kept(hard_below=60, hard_most=2, seed=seed) for seed in range(8)]
    assert {len(some) for some in drawn} == {2}
    assert len(set(drawn)) > 1
    assert drawn[5] == kept(hard_below=60, hard_most=2, seed=5)


def test_only_hard_questions_are_searched_on(loaded: LoadedModel) -> None:
    """With a bound of 100: whatever even budgets get wrong."""
    prepared = prepare(loaded, contexts=8, hard_below=100)
    (search,), _ = keep_hard_questions([prepared])
    scores = evolve._measure_difficulty(prepared, None)
    assert len(scores) == 8 * QUESTIONS
    assert search.kept == {name for name, score in scores.items() if score["full"] == 1 and score["uniform"] < 1}
    assert search.kept == {sample.sha256 for sample in search.samples}
    assert len(search.kept) >= 2


def test_too_few_hard_questions(loaded: LoadedModel) -> None:
    how = settings_of(hard_below=60)
    prepared = prepare_search(Base.of(loaded, POLICY), BUDGET, how, splits(answer="nowhere"), {})
    with pytest.raises(UsageError, match=r"of 8 questions the full cache answers 0 right, .* too few to search on"):
        keep_hard_questions([prepared])
