"""Variable tracking: one chain of five variables, behind a solved one of other variables."""

from __future__ import annotations

import re

import pytest

from kvsearch.tasks.base import Example, TokenCount
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.needles import LONGEST_EXAMPLE, NOISE_SENTENCES
from tests.combinations import in_turn
from tests.tasks.ruler.helpers import bpe, whole, words


def made(length: int, count: TokenCount = words, samples: int = 8) -> list[Example]:
    return RulerTask("vt", length).examples(samples, 0, count)


def halves(example: Example) -> tuple[str, str]:
    """The solved example and the text that is asked about."""
    solved, text = example.context.split("\n\n")
    return solved, text


def solve(text: str) -> dict[str, list[str]]:
    """Value to variables, by carrying out the assignments line by line."""
    held: dict[str, str] = {}
    for left, right in re.findall(r"^LET (\S+) = (\S+)$", text, re.MULTILINE):
        assert left not in held
        held[left] = held.get(right, right)
    values: dict[str, list[str]] = {}
    for name, value in held.items():
        values.setdefault(value, []).append(name)
    return values


@pytest.mark.parametrize("length", [512, 4096])
def test_the_answer_is_what_the_assignments_give(length: int) -> None:
    """Behind a solved example of other variables; names occur in their assignments alone."""
    for example in made(length):
        (query,) = example.queries
        solved, text = halves(example)
        ((value, names),) = solve(text).items()
        assert tuple(names) == query.answers
        assert len(names) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
        assert re.fullmatch("[1-9][0-9]{4}", value)
        assert value in query.question
        assert query.prefix.endswith(f"the 5 variables with the value {value} are")
        ((value, others),) = solve(solved).items()
        assert solved.endswith(f"with the value {value} are {', '.join(others)}")
        assert all(re.fullmatch("[A-Z]{3}", name) for name in others)
        assert value not in text + query.question
        assert [whole(example).count(name) for name in names] == [2, 2, 2, 2, 1]
        noise = " ".join(line for line in text.split("\n")[1:] if not line.startswith("LET"))
        assert set(noise.split(". ")) <= {sentence.rstrip(".") for sentence in NOISE_SENTENCES} | set(NOISE_SENTENCES)


@in_turn(sizes=[(512, 128), (1024, 256), (8192, LONGEST_EXAMPLE)], count=[words, bpe()])
def test_the_length_of_the_example(sizes: tuple[int, int], count: TokenCount) -> None:
    length, longest = sizes
    for example in made(length, count, 3):
        solved = halves(example)[0]
        bare = "\n".join(line for line in solved.split("\n") if not line.startswith(NOISE_SENTENCES[0]))
        assert 0.9 * longest <= count(solved) <= longest or (solved == bare and longest == 128)
