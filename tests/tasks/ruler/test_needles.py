"""The niah tasks and variable tracking: what is hidden is what is asked, and nowhere else."""

from __future__ import annotations

import re
from itertools import cycle, islice
from pathlib import Path

import pytest

from kvsearch.tasks.base import Example, TokenCount
from kvsearch.tasks.catalog import describe_tasks
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.needles import LONGEST_EXAMPLE, NIAH, NOISE_SENTENCES
from tests.combinations import in_turn
from tests.tasks.ruler.helpers import bpe, whole, words

NEEDLE = re.compile(r"One secret (number|uuid) of (\S+) is (\S+)\.(?=\s|$)")
NUMBER, WORD = r"[1-9][0-9]{6}", r"[a-z]+-[a-z]+"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
EXPECTED = {  # needles without those of the haystack, keys asked, form of keys and values
    "niah_single_1": (1, 1, WORD, NUMBER),
    "niah_single_2": (1, 1, WORD, NUMBER),
    "niah_single_3": (1, 1, WORD, UUID),
    "niah_multikey_1": (4, 1, WORD, NUMBER),
    "niah_multikey_2": (None, 1, WORD, NUMBER),
    "niah_multikey_3": (None, 1, UUID, UUID),
    "niah_multivalue": (4, 1, WORD, NUMBER),
    "niah_multiquery": (4, 4, WORD, NUMBER),
    "niah_turns": (4, 4, WORD, NUMBER),
}


def body(example: Example) -> str:
    """The context without its instruction, which is one line."""
    return example.context.partition("\n")[2]


def asked(example: Example) -> list[str]:
    keys = []
    for query in example.queries:
        found = re.search(r" of (.*) that the text above tells\?", query.question)
        assert found
        keys += re.split(", | and ", found[1])
    return keys


def answers(example: Example) -> list[str]:
    return [answer for query in example.queries for answer in query.answers]


@in_turn(name=NIAH, length=[512, 2048, 8192])
def test_what_is_hidden(name: str, length: int) -> None:
    """Each value once, each key in its own needles only, no answer in the question, no key inside another one."""
    needles, queries, key_form, value_form = EXPECTED[name]
    for example in RulerTask(name, length).examples(6, 0, words):
        told = [(key, value) for _, key, value in NEEDLE.findall(body(example))]
        right = answers(example)
        keys = asked(example)
        assert len(keys) == len(set(keys)) == queries
        assert needles is None or len(told) == needles
        assert all(re.fullmatch(key_form, key) and re.fullmatch(value_form, value) for key, value in told)
        assert sorted(right) == sorted(value for key, value in told if key in keys)
        for number, key in enumerate(keys):
            share = len(right) // len(keys)
            of_key = sorted(value for other, value in told if other == key)
            assert sorted(right[number * share : (number + 1) * share]) == of_key
            assert body(example).count(key) == len(of_key) == share
            assert whole(example).count(key) == len(of_key) + 2
        values = [value for _, value in told]
        assert len(set(values)) == len(values)
        assert not {key for key, _ in told} & set(values)
        assert all(whole(example).count(answer) == 1 for answer in right)


def test_turns_ask_for_one_key_each() -> None:
    (example,) = RulerTask("niah_turns", 512).examples(1, 0, words)
    assert example.turns
    assert [query.category for query in example.queries] == [f"turn {turn}" for turn in range(1, 5)]
    assert all(len(query.answers) == 1 for query in example.queries)
    assert "ruler:niah_turns" not in {entry.spec for entry in describe_tasks("ruler")}


@pytest.mark.parametrize("name", [name for name, spec in NIAH.items() if spec.haystack == "essay"])
def test_the_rest_is_the_story(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("The sea was grey. Nobody sang! " * 3)
    (example,) = RulerTask(name, 512, haystack=path).examples(1, 0, words)
    rest = NEEDLE.sub("", body(example)).split()
    assert rest == list(islice(cycle(path.read_text().split()), len(rest)))
    assert len(rest) > 0.4 * 512


# --- one chain of five variables, behind a solved one -----------------------------------------------------------------


def traced(length: int, count: TokenCount = words, samples: int = 8) -> list[Example]:
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
    for example in traced(length):
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
    for example in traced(length, count, 3):
        solved = halves(example)[0]
        bare = "\n".join(line for line in solved.split("\n") if not line.startswith(NOISE_SENTENCES[0]))
        assert 0.9 * longest <= count(solved) <= longest or (solved == bare and longest == 128)
