"""Made-up names and the shipped words."""

from __future__ import annotations

import random
import re

import pytest

from kvsearch.tasks.ruler import words as made_up
from kvsearch.tasks.ruler.words import Fresh, Maker, vocabulary, words


def test_no_key_is_part_of_another_key() -> None:
    """old-oar would be part of gold-oar, and so would be bright-star of bright-starling."""
    nouns, adjectives = words("nouns"), words("adjectives")
    assert not [(a, b) for a in nouns for b in nouns if a != b and b.startswith(a)]
    assert not [(a, b) for a in adjectives for b in adjectives if a != b and b.endswith(a)]


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (made_up.word, "[a-z]+-[a-z]+"),
        (made_up.number, "[1-9][0-9]{6}"),
        (made_up.uuid4, "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
        (made_up.amount, "[1-9][0-9]{4}"),
        (made_up.variable(5), "[A-Z]{5}"),
        (made_up.variable(3), "[A-Z]{3}"),
        (made_up.coded, "[a-z]{6}"),
    ],
)
def test_what_names_look_like(make: Maker, form: str) -> None:
    rng = random.Random(0)
    drawn = [make(rng) for _ in range(50)]
    assert all(re.fullmatch(form, name) for name in drawn)
    assert len(set(drawn)) == 50


def test_nothing_is_drawn_twice_or_from_the_text() -> None:
    fresh = Fresh(random.Random(0), "Not C, please", taken=("A",))
    drawn = [fresh.draw(lambda rng: rng.choice("ABCDF")) for _ in range(3)]
    assert sorted(drawn) == ["B", "D", "F"]
    assert fresh.taken == {"A", "B", "D", "F"}


def test_the_vocabulary_grows() -> None:
    small, large = vocabulary(10), vocabulary(5000)
    assert len(small) == len({*words("nouns"), *words("adjectives"), *words("verbs")}) > 2000
    assert large[: len(small)] == small
    assert len(large) == len(set(large)) == 5000
    assert vocabulary(6000)[:5000] == large
