"""What facts are hidden in: predictable sentences, and how evidence is spread among them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from kvsearch.tasks.synthetic import vocabulary as v

Sentence = tuple[str, ...]

FILLER_WORDS = 9
TOPIC_NOUNS = 6

_grammar = random.Random(20260)
_NOUN_VERBS = {noun: _grammar.sample(v.VERBS, 4) for noun in v.NOUNS}
_NOUN_ADJECTIVES = {noun: _grammar.sample(v.ADJECTIVES, 4) for noun in v.NOUNS}
_VERB_PLACES = {verb: _grammar.sample(v.PLACES, 3) for verb in v.VERBS}


def filler(rng: random.Random, topic: Sequence[str]) -> Sentence:
    """Return one nine-word sentence; nouns fix the likely adjectives and verbs, verbs the likely places."""
    noun = rng.choice(topic) if rng.random() < 0.7 else rng.choice(v.NOUNS)
    verb = rng.choice(_NOUN_VERBS[noun])
    return (
        "the", rng.choice(_NOUN_ADJECTIVES[noun]), noun, verb,
        "the", rng.choice(v.NOUNS), "in", rng.choice(_VERB_PLACES[verb]), ".",
    )  # fmt: skip


def interleave(rng: random.Random, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
    """Return a random merge of the groups that keeps the order inside each."""
    order = [i for i, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    iterators = [iter(group) for group in groups]
    return [next(iterators[i]) for i in order]


class Haystack(Protocol):
    """A kind of text around the evidence."""

    def __init__(self, rng: random.Random) -> None:
        """Draw what the whole text has in common."""
        ...

    def tell(self, count: int, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
        """Tell `count` fillers with all sentences of the groups among them; the order inside each group stays."""
        ...


class Prose:
    """Sentences about a few nouns, evidence anywhere between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._topic = rng.sample(v.NOUNS, TOPIC_NOUNS)

    def tell(self, count: int, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
        return interleave(self._rng, [[filler(self._rng, self._topic) for _ in range(count)], *groups])


class Repetition:
    """One sentence again and again, evidence anywhere between."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sentence = filler(rng, v.NOUNS)

    def tell(self, count: int, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
        return interleave(self._rng, [[self._sentence] * count, *groups])


class Paragraphs:
    """One paragraph of even length for each evidence sentence, about nouns of its own."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def tell(self, count: int, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
        facts = interleave(self._rng, groups)
        ends = [count * number // len(facts) for number in range(len(facts) + 1)]
        return [
            sentence
            for fact, start, end in zip(facts, ends, ends[1:], strict=False)
            for sentence in Prose(self._rng).tell(end - start, [[fact]])
        ]
