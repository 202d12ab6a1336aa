"""What RULER's examples are made of: drafts of a length, haystacks and words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.tasks.ruler.draft import FILL_FRACTION, Stream, find_largest_fit, make_vocabulary, read_words
from kvsearch.tasks.ruler.needles import Essay


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=300),
    base=st.integers(0, 50),
    room=st.integers(0, 1000),
    least=st.integers(0, 5),
)
def test_it_fits_and_fills(sizes: list[int], base: int, room: int, least: int) -> None:
    """Full, or the next unit would not fit, or there is no more."""
    least, most = min(least, len(sizes)), len(sizes)

    def size(units: int) -> int:
        return base + sum(sizes[:units])

    units = find_largest_fit(size, room, least, most)
    assert least <= units <= most
    if size(least) > room:
        assert units == least
    else:
        assert size(units) <= room
        assert size(units) >= FILL_FRACTION * room or units == most or size(units + 1) > room


@pytest.mark.parametrize("needles", [1, 5])
def test_every_depth_comes_once_in_forty_needles(needles: int) -> None:
    for cycle in range(2):
        some = range(cycle * 40 // needles, (cycle + 1) * 40 // needles)
        depths = [depth for index in some for depth in Stream("s", index).draw_depths(needles)]
        assert sorted(depths) == [place / 39 for place in range(40)]


def essay(folder: Path, text: str) -> Essay:
    path = folder / "essay.txt"
    path.write_text(text, encoding="utf-8")
    return Essay.load(path)


def test_sentences(tmp_path: Path) -> None:
    made = essay(tmp_path, 'One  two.\n\nMrs. B. Three "went!"\tFour')
    assert made.sentences(7) == ["One two.", 'Mrs. B. Three "went!"', "Four"]
    assert made.sentences(4) == ["One two.", "Mrs. B."]
    assert made.sentences(2) == ["One two."]
    assert made.sentences(1) == ["One"]
    assert made.sentences(0) == []
    assert made.sentences(10) == ["One two.", 'Mrs. B. Three "went!"', "Four", "One two.", "Mrs."]


def test_no_key_is_part_of_another_key() -> None:
    """old-oar would be part of gold-oar, and so would be bright-star of bright-starling."""
    nouns, adjectives = read_words("nouns"), read_words("adjectives")
    assert not [(a, b) for a in nouns for b in nouns if a != b and b.startswith(a)]
    assert not [(a, b) for a in adjectives for b in adjectives if a != b and b.endswith(a)]


def test_the_vocabulary_grows() -> None:
    small, large = make_vocabulary(10), make_vocabulary(25_000)
    assert len(small) == len({*read_words("nouns"), *read_words("adjectives"), *read_words("verbs")}) > 2000
    assert large[: len(small)] == small
    assert len(large) == len(set(large)) == 25_000
    assert make_vocabulary(6000) == large[:6000]
