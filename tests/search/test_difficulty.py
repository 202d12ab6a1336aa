"""Searching on hard questions alone."""

from __future__ import annotations

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel, load
from kvsearch.search.difficulty import hard_questions, measure_difficulty, with_hard_questions
from kvsearch.search.evolve import PreparedSearch, prepare_search
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


def test_what_the_full_cache_gets_right_and_eviction_below_the_bound() -> None:
    found = hard_questions(SCORES, 60, None, 0)
    assert found.kept == {"hard", "lost", "half"}
    assert (found.asked, found.right, found.hard) == (6, 4, 3)
    assert hard_questions(SCORES, 100, None, 0).kept == found.kept | {"no longer hard"}


def test_at_most_so_many_by_seed() -> None:
    drawn = [hard_questions(SCORES, 60, 2, seed) for seed in range(8)]
    assert all(len(one.kept) == 2 and one.hard == 3 for one in drawn)
    assert len({one.kept for one in drawn}) > 1
    assert hard_questions(SCORES, 60, 2, 5) == drawn[5]
    assert hard_questions(SCORES, 60, 9, 0).kept == {"hard", "lost", "half"}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("bundled")


@pytest.fixture(scope="module")
def hard(loaded: LoadedModel) -> PreparedSearch:
    """With a bound of 100: whatever even budgets get wrong."""
    prepared = prepare(loaded, contexts=8, hard_below=100)
    (found,), counts = with_hard_questions([prepared])
    assert counts is not None
    assert found.kept == counts.kept
    assert 2 <= len(found.kept) == counts.hard < counts.right <= counts.asked == 8 * QUESTIONS
    return found


def test_only_hard_questions_are_searched_on(hard: PreparedSearch) -> None:
    scores = measure_difficulty(hard)
    assert {sample.sha256 for sample in hard.samples} == hard.kept
    assert hard.kept == {name for name, one in scores.items() if one["full"] == 1 and one["uniform"] < 1}
    assert len(scores) == 8 * QUESTIONS


def test_too_few_hard_questions(loaded: LoadedModel) -> None:
    how = settings_of(hard_below=60)
    prepared = prepare_search(Base.of(loaded, POLICY), BUDGET, how, splits(answer="nowhere"), {})
    message = (
        "of 8 questions the full cache answers 0 right, and 0 of these score below 60 under even budgets of 12 "
        "entries: too few to search on, raise --samples or --hard-below, or lower the budget"
    )
    with pytest.raises(UsageError) as error:
        with_hard_questions([prepared])
    assert str(error.value) == message
