"""Stories and noise as haystacks."""

from __future__ import annotations

from itertools import chain, islice, repeat
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.resources import resource
from kvsearch.tasks.ruler.needles import NOISE, Essay, noise_sentences
from tests.tasks.ruler.helpers import STORY


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


@given(st.integers(0, 20_000))
def test_the_story_is_read_from_its_beginning_and_again(units: int) -> None:
    made = Essay.load(None)
    story = resource(STORY).read_text(encoding="utf-8").split()
    told = " ".join(made.sentences(units)).split()
    assert told == list(islice(chain.from_iterable(repeat(story)), units))


def test_sentences_of_the_story_are_sentences() -> None:
    made = Essay.load(None)
    whole = made.sentences(len(made.words))
    assert sum(len(sentence.split()) > 55 for sentence in whole) < 0.02 * len(whole)
    assert 8 < len(made.words) / len(whole) < 25
    assert not [sentence for sentence in whole if sentence.endswith(("Mrs.", "Mr."))]
    assert made.text == " ".join(whole)


def test_noise() -> None:
    line = " ".join(NOISE)
    assert len(NOISE) == 5
    assert noise_sentences(0) == []
    assert noise_sentences(2) == [f"{NOISE[0]} {NOISE[1]}"]
    assert noise_sentences(10) == [line, line]
    assert noise_sentences(11) == [line, line, NOISE[0]]
