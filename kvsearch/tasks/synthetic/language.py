"""The bundled models' language: facts hidden in predictable filler, and questions about them.

Its vocabulary is closed, 302 words: one token per word.

A document is a list of short sentences. Evidence sentences ("needles") carry the answers, filler sentences carry
nothing, and `recall` sentences mention an earlier fact again without giving all of it away:

    code amber anchor kettle .          a code fact: two values under one key
    item teal second harp .             one of the three values of an item
    set beta = alpha .                  one link of a variable chain (the first link holds a value)
    vote clara .                        one vote; the candidate with most votes wins
    bell .                              one stroke; strokes are counted
    recall code amber anchor .          a mention: repeats the first value only
    the calm fox greets the nurse in barn .
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvsearch.tasks.base import Query
from kvsearch.tasks.dataset_task import read_shipped

Sentence = tuple[str, ...]

_LISTS = {name: tuple(words.split()) for name, words in read_shipped("vocabulary").items()}
PAD, BOS, EOS, UNK = _LISTS["special"]
ORDINALS = _LISTS["ordinals"]
NUMBERS = _LISTS["numbers"]
KEYS = _LISTS["keys"]
VALUES = _LISTS["values"]
VARIABLES = _LISTS["variables"]
CANDIDATES = _LISTS["candidates"]
NOUNS = _LISTS["nouns"]
VERBS = _LISTS["verbs"]
ADJECTIVES = _LISTS["adjectives"]
PLACES = _LISTS["places"]
WORDS = tuple(word for words in _LISTS.values() for word in words)

FILLER_WORDS = 9
TOPIC_NOUNS = 6

_grammar = random.Random(20260)
_NOUN_VERBS = {noun: _grammar.sample(VERBS, 4) for noun in NOUNS}
_NOUN_ADJECTIVES = {noun: _grammar.sample(ADJECTIVES, 4) for noun in NOUNS}
_VERB_PLACES = {verb: _grammar.sample(PLACES, 3) for verb in VERBS}


def make_filler(rng: random.Random, topic: Sequence[str]) -> Sentence:
    """Return one nine-word sentence; nouns fix the likely adjectives and verbs, verbs the likely places."""
    noun = rng.choice(topic) if rng.random() < 0.7 else rng.choice(NOUNS)
    verb = rng.choice(_NOUN_VERBS[noun])
    return (
        "the", rng.choice(_NOUN_ADJECTIVES[noun]), noun, verb,
        "the", rng.choice(NOUNS), "in", rng.choice(_VERB_PLACES[verb]), ".",
    )  # fmt: skip


def interleave(rng: random.Random, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
    """Return a random merge of the groups that keeps the order inside each."""
    order = [i for i, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    iterators = [iter(group) for group in groups]
    return [next(iterators[i]) for i in order]


# tells so many fillers with all sentences of the groups among them; the order inside each group stays
Tell = Callable[[int, Sequence[Sequence[Sentence]]], list[Sentence]]
Haystack = Callable[[random.Random], Tell]  # a kind of text around the evidence: draws what all of it has in common


def prose(rng: random.Random) -> Tell:
    """Return sentences about a few nouns, evidence anywhere between them."""
    topic = rng.sample(NOUNS, TOPIC_NOUNS)
    return lambda count, groups: interleave(rng, [[make_filler(rng, topic) for _ in range(count)], *groups])


def repetition(rng: random.Random) -> Tell:
    """Return one sentence again and again, evidence anywhere between."""
    sentence = make_filler(rng, NOUNS)
    return lambda count, groups: interleave(rng, [[sentence] * count, *groups])


def paragraphs(rng: random.Random) -> Tell:
    """Return one paragraph of even length for each evidence sentence, about nouns of its own."""

    def tell(count: int, groups: Sequence[Sequence[Sentence]]) -> list[Sentence]:
        facts = interleave(rng, groups)
        ends = [count * number // len(facts) for number in range(len(facts) + 1)]
        return [
            sentence
            for fact, start, end in zip(facts, ends, ends[1:], strict=False)
            for sentence in prose(rng)(end - start, [[fact]])
        ]

    return tell


def make_query(words: Sentence, answer: Sentence) -> Query:
    """Return a question with its one right answer; a reply has as many words."""
    return Query(" ".join(words), (" ".join(answer),), len(answer))


@dataclass(frozen=True)
class Evidence:
    """Evidence sentences in their order of appearance, what may be asked about them, and how they may be mentioned."""

    sentences: tuple[Sentence, ...] = ()
    questions: tuple[Query, ...] = ()
    mentions: tuple[Sentence, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(sentence) for sentence in self.sentences)

    def as_distractor(self) -> Evidence:
        """Return the same evidence as a distractor."""
        return replace(self, questions=())


@dataclass(frozen=True)
class Document:
    """A context in words (with the leading `<bos>`), and its questions."""

    words: Sentence
    questions: tuple[Query, ...]


@dataclass
class Names:
    """Draws names without replacement, so that no two facts of one document share a key."""

    rng: random.Random
    _left: dict[str, list[str]] = field(default_factory=dict)

    def draw(self, kind: str, pool: Sequence[str]) -> str:
        if kind not in self._left:
            self._left[kind] = self.rng.sample(list(pool), len(pool))
        return self._left[kind].pop()

    def count_left(self, kind: str, pool: Sequence[str]) -> int:
        """Return how many names of this kind are still free."""
        return len(self._left.get(kind, pool))


def make_code_facts(rng: random.Random, names: Names, count: int) -> Evidence:
    """Make `count` facts `code KEY VALUE VALUE .`; one question a fact."""
    facts = [(names.draw("key", KEYS), rng.choice(VALUES), rng.choice(VALUES)) for _ in range(count)]
    return Evidence(
        tuple(("code", key, a, b, ".") for key, a, b in facts),
        tuple(make_query(("?", "code", key), (a, b, ".")) for key, a, b in facts),
        tuple(("recall", "code", key, a, ".") for key, a, _ in facts),
    )


def make_code_pairs(rng: random.Random, names: Names, count: int) -> Evidence:
    """Make `count` code facts, asked two at a time in one question (multi-query)."""
    single = make_code_facts(rng, names, count)
    pairs = zip(single.sentences, single.sentences[1:] + single.sentences[:1], strict=True)
    questions = [
        make_query(("?", "both", first[1], second[1], "="), (*first[:4], *second[:4], ".")) for first, second in pairs
    ]
    return Evidence(single.sentences, tuple(questions), single.mentions)


def make_item_facts(rng: random.Random, names: Names, count: int) -> Evidence:
    """Make `count` items, each with three values told in three places; the question wants all three (multi-value)."""
    sentences: list[Sentence] = []
    questions = []
    mentions = []
    for _ in range(count):
        key = names.draw("key", KEYS)
        values = [rng.choice(VALUES) for _ in ORDINALS]
        parts = [(key, ordinal, value) for ordinal, value in zip(ORDINALS, values, strict=True)]
        answer = (*(word for part in parts for word in part), ".")[1:]
        questions.append(make_query(("?", "item", key), answer))
        mentions.append(("recall", "item", *parts[0], "."))
        sentences += [("item", *part, ".") for part in rng.sample(parts, len(parts))]
    return Evidence(tuple(rng.sample(sentences, len(sentences))), tuple(questions), tuple(mentions))


def make_whole_items(rng: random.Random, names: Names, count: int) -> Evidence:
    """Make `count` items, each with its three values told one after another: facts with long values."""
    items = [make_item_facts(rng, names, 1) for _ in range(count)]
    return Evidence(
        tuple(
            tuple(word for part in sorted(item.sentences, key=lambda part: ORDINALS.index(part[2])) for word in part)
            for item in items
        ),
        tuple(question for item in items for question in item.questions),
        tuple(mention for item in items for mention in item.mentions),
    )


def make_chains(rng: random.Random, names: Names, count: int, links: int = 3) -> Evidence:
    """Make `count` chains `set a = VALUE . set b = a . set c = b .`; the question walks the chain back to the value."""
    sentences: list[list[Sentence]] = []
    questions = []
    mentions = []
    for _ in range(count):
        variables = [names.draw("variable", VARIABLES) for _ in range(links)]
        value = rng.choice(VALUES)
        sentences.append(
            [("set", left, "=", right, ".") for left, right in zip(variables, [value, *variables], strict=False)]
        )
        back = variables[-2::-1]
        answer = tuple(word for name in back for word in (name, "set", name, "="))
        questions.append(make_query(("?", "set", variables[-1], "="), (*answer, value, ".")))
        mentions.append(("recall", "set", variables[-1], "=", variables[-2], "."))
    return Evidence(tuple(interleave(rng, sentences)), tuple(questions), tuple(mentions))


def make_votes(rng: random.Random, count: int, candidates: int = 3) -> Evidence:
    """Cast `count` votes with one clear winner: at least two votes ahead (frequency)."""
    names = rng.sample(CANDIDATES, candidates)
    while True:
        cast = [rng.choices(names, weights=(3, *(1 for _ in names[1:])))[0] for _ in range(count)]
        tally = sorted((cast.count(name) for name in names), reverse=True)
        if tally[0] >= tally[1] + 2:
            break
    winner = max(names, key=cast.count)
    return Evidence(tuple(("vote", name, ".") for name in cast), (make_query(("?", "vote"), (winner, ".")),))


def compose_document(
    rng: random.Random,
    length: int,
    needles: Sequence[Evidence],
    mentions: int = 0,
    tail_mentions: int = 0,
    haystack: Haystack = prose,
) -> Document:
    """Return a document of at most `length` words: the needles in order at random places, filled up with filler.

    `mentions` recall sentences go to random places after their fact, `tail_mentions` more to the last sentences.
    """
    tell = haystack(rng)
    evidence = sum(group.tokens for group in needles)
    pool = [mention for group in needles for mention in group.mentions]
    middle = rng.sample(pool, min(mentions, len(pool)))
    tail = rng.sample(pool, min(tail_mentions, len(pool)))
    room = length - 1 - evidence - sum(map(len, middle)) - sum(map(len, tail))
    sentences = tell(max(0, room) // FILLER_WORDS, [group.sentences for group in needles])
    for mention in middle:
        sentences.insert(rng.randint(_find_place_after_fact(sentences, mention), len(sentences)), mention)
    for mention in tail:
        sentences.insert(
            max(_find_place_after_fact(sentences, mention), len(sentences) - rng.randint(0, min(2, len(sentences)))),
            mention,
        )
    questions = [question for group in needles for question in group.questions]
    rng.shuffle(questions)
    words = (BOS, *(word for sentence in sentences for word in sentence))
    return Document(words, tuple(questions))


def _find_place_after_fact(sentences: Sequence[Sentence], mention: Sentence) -> int:
    """Return the first place at which `mention` does not give its fact away."""
    return next(i for i, sentence in enumerate(sentences) if sentence[:3] == mention[1:4]) + 1
