"""The forms of RULER's tasks that the core suite lacks, told in the sentences that the bundled models know."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvsearch.tasks.synthetic.haystacks import Haystack, Paragraphs, Prose, Repetition
from kvsearch.tasks.synthetic.language import Evidence, Names, WordQuestion, chains, code_facts, whole_items
from kvsearch.tasks.synthetic.vocabulary import CANDIDATES, KEYS, VARIABLES

Builder = Callable[[random.Random, Names, int], list[Evidence]]

QUESTIONS_PER_CONTEXT = 4
EVIDENCE_SHARE = 0.05
FACT_SHARE = 0.9  # of a haystack made of facts; the rest is for mentions and a few fillers
CODE_WORDS, LINK_WORDS, ITEM_WORDS, VOTE_WORDS = 5, 5, 15, 3
LINKS = 3
LONG_FACTS = 8  # with more of them among 60 keys the bundled model begins to mix up their values
TWO_HOP_CHAINS = 2
MOST_VOTES = 17  # eleven candidates with one vote each, six for the winner


@dataclass(frozen=True)
class Form:
    """How documents of one task are made: their evidence, what it is hidden in, and its share of the words at most."""

    build: Builder
    haystack: type[Haystack] = Prose
    share: float = EVIDENCE_SHARE


def codes_in(room: int, names: Names) -> int:
    """Return how many code facts fit into `room` words, as far as there are keys left."""
    return max(0, min(room // CODE_WORDS, names.left("key", KEYS)))


def _single_1(rng: random.Random, names: Names, room: int) -> list[Evidence]:  # noqa: ARG001
    return [code_facts(rng, names, 1, "single_1")]


def _single_3(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    fact = whole_items(rng, names, 1).asked_in("single_3")
    return [fact, code_facts(rng, names, min(1, codes_in(room - fact.tokens, names))).unasked()]


def _multikey_2(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    room -= (told := _many_chains(rng, names, room)).tokens
    keys = names.left("key", KEYS)
    # an item fills the room of three codes for one key: as many of them as make the keys last
    items = -(-(room - CODE_WORDS * keys) // (ITEM_WORDS - CODE_WORDS))
    others = whole_items(rng, names, max(0, min(items, keys - QUESTIONS_PER_CONTEXT)))
    codes = code_facts(rng, names, codes_in(room - others.tokens, names), "multikey_2")
    return [codes, others.unasked(), told]


def _multikey_3(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    room -= (told := _many_chains(rng, names, room)).tokens
    items = whole_items(rng, names, LONG_FACTS).asked_in("multikey_3")
    codes = code_facts(rng, names, codes_in(room - items.tokens, names))
    return [items, codes.unasked(), told]


def _many_chains(rng: random.Random, names: Names, room: int) -> Evidence:
    """Return chains of all variables, as distractors."""
    count = min(room // (LINKS * LINK_WORDS), names.left("variable", VARIABLES) // LINKS)
    return chains(rng, names, count, LINKS).unasked()


def _common(rng: random.Random, names: Names, room: int) -> list[Evidence]:  # noqa: ARG001
    count = min(room // VOTE_WORDS, MOST_VOTES)
    winner, *others = rng.sample(CANDIDATES, min(2 * count // 3 + 1, len(CANDIDATES)))
    cast = [*others, *[winner] * (count - len(others))]
    rng.shuffle(cast)
    question = WordQuestion("common", ("?", "vote"), (winner, "."))
    return [Evidence(tuple(("vote", name, ".") for name in cast), (question,))]


def _qa_1(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    others = chains(rng, names, 1, links=2)
    return [code_facts(rng, names, codes_in(room - others.tokens, names), "qa_1"), others.unasked()]


def _qa_2(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    told = chains(rng, names, TWO_HOP_CHAINS, links=2)
    # the model learnt chains of three links and reads on where a shorter one ends: the answer ends with the value
    questions = tuple(WordQuestion("qa_2", question.prompt, question.answer[:-1]) for question in told.questions)
    others = code_facts(rng, names, codes_in(room - told.tokens, names))
    return [replace(told, questions=questions), others.unasked()]


GROWN: dict[str, Form] = {
    "single_1": Form(_single_1, Repetition),
    "single_3": Form(_single_3),
    "multikey_2": Form(_multikey_2, share=FACT_SHARE),
    "multikey_3": Form(_multikey_3, share=FACT_SHARE),
    "common": Form(_common),
    "qa_1": Form(_qa_1, Paragraphs),
    "qa_2": Form(_qa_2, Paragraphs),
}
