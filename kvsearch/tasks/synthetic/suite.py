"""The synthetic tasks in the language of the bundled models, in three suites.

"core" is five recall tasks and a frequency task. "ruler" has RULER's 13 forms:

    RULER             here          what to answer, and where it stands
    niah_single_1     single_1      a code in one sentence that repeats
    niah_single_2     single        a code in prose
    niah_single_3     single_3      an item told at once: a longer value, in prose
    niah_multikey_1   multikey      one of a few codes
    niah_multikey_2   multikey_2    one of the codes in a haystack made of facts
    niah_multikey_3   multikey_3    one of eight items, each told at once, in a haystack made of facts
    niah_multivalue   multivalue    the three values of an item, told in three places
    niah_multiquery   multiquery    two codes in one question
    vt                chain         the value at the end of three links
    cwe               common        the one candidate whose votes repeat, among many with one vote each
    fwe               vote          the most frequent candidate of three
    qa_1              qa_1          a code, told in one of several paragraphs that have nouns of their own
    qa_2              qa_2          the value at the end of two links, told in two such paragraphs

The language has 64 keys and 32 variables, which sets limits: a haystack made of facts takes codes, items and chains to
fill 1,024 words (multikey_2), and eight items, codes of all other keys and chains fill 550 (multikey_3); filler takes
the rest.

"turns" is multikey in turns: every question follows the reply to the one before it.

Evidence is at most 5% of a context's words. The two haystacks made of facts are the exception: up to 90%. There the
evidence looks like what it is hidden in, so nobody who does not know the question can tell what to keep, and no ranking
keeps much at 10% of the entries. They have a category of their own; "sparse" is the suite "ruler" without them.

Every task draws its documents from one seeded stream per split, named after split, task, length and seed, so train,
calibrate, select and report do not share a document. What the bundled models were trained on is one more stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import require_known
from kvsearch.tasks.base import Example, Task, TokenCount
from kvsearch.tasks.synthetic.language import (
    CANDIDATES,
    KEYS,
    VARIABLES,
    Document,
    Evidence,
    Haystack,
    Names,
    compose_document,
    make_chains,
    make_code_facts,
    make_code_pairs,
    make_item_facts,
    make_query,
    make_votes,
    make_whole_items,
    paragraphs,
    prose,
    repetition,
)  # fmt: skip

SHORTEST = 512
SYNTHETIC_SPLITS = ("train", "calibrate", "select", "report")
MENTIONS = 2
TAIL_MENTIONS = 1
Builder = Callable[[random.Random, Names, int], list[Evidence]]

QUESTIONS_PER_CONTEXT = 4
EVIDENCE_SHARE = 0.05
FACT_SHARE = 0.9  # of a haystack made of facts; the rest is for mentions and a few fillers
CODE_WORDS = 5
LINK_WORDS = 5
ITEM_WORDS = 15
VOTE_WORDS = 3
LINKS = 3
LONG_FACTS = 8  # with more of them among 60 keys the bundled model begins to mix up their values
TWO_HOP_CHAINS = 2
MOST_VOTES = 17  # eleven candidates with one vote each, six for the winner


@dataclass(frozen=True)
class Form:
    """How documents of one task are made: their evidence, what it is hidden in, and its share of the words at most."""

    build: Builder
    haystack: Haystack = prose
    share: float = EVIDENCE_SHARE
    turns: bool = False  # whether a question follows the reply to the one before it


def count_fitting_codes(room: int, names: Names) -> int:
    """Return how many code facts fit into `room` words, as far as there are keys left."""
    return max(0, min(room // CODE_WORDS, names.count_left("key", KEYS)))


def _single_3(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    fact = make_whole_items(rng, names, 1)
    return [fact, make_code_facts(rng, names, min(1, count_fitting_codes(room - fact.tokens, names))).as_distractor()]


def _multikey_2(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    room -= (distractors := _many_chains(rng, names, room)).tokens
    keys = names.count_left("key", KEYS)
    # an item fills the room of three codes for one key: as many of them as make the keys last
    items = -(-(room - CODE_WORDS * keys) // (ITEM_WORDS - CODE_WORDS))
    others = make_whole_items(rng, names, max(0, min(items, keys - QUESTIONS_PER_CONTEXT)))
    codes = make_code_facts(rng, names, count_fitting_codes(room - others.tokens, names))
    return [codes, others.as_distractor(), distractors]


def _multikey_3(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    room -= (distractors := _many_chains(rng, names, room)).tokens
    items = make_whole_items(rng, names, LONG_FACTS)
    codes = make_code_facts(rng, names, count_fitting_codes(room - items.tokens, names))
    return [items, codes.as_distractor(), distractors]


def _many_chains(rng: random.Random, names: Names, room: int) -> Evidence:
    """Return chains of all variables, as distractors."""
    count = min(room // (LINKS * LINK_WORDS), names.count_left("variable", VARIABLES) // LINKS)
    return make_chains(rng, names, count, LINKS).as_distractor()


def _common(rng: random.Random, names: Names, room: int) -> list[Evidence]:  # noqa: ARG001
    count = min(room // VOTE_WORDS, MOST_VOTES)
    winner, *others = rng.sample(CANDIDATES, min(2 * count // 3 + 1, len(CANDIDATES)))
    cast = [*others, *[winner] * (count - len(others))]
    rng.shuffle(cast)
    question = make_query(("?", "vote"), (winner, "."))
    return [Evidence(tuple(("vote", name, ".") for name in cast), (question,))]


def _qa_1(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    others = make_chains(rng, names, 1, links=2)
    return [make_code_facts(rng, names, count_fitting_codes(room - others.tokens, names)), others.as_distractor()]


def _qa_2(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    evidence = make_chains(rng, names, TWO_HOP_CHAINS, links=2)
    # the model learnt chains of three links and reads on where a shorter one ends: the answer ends with the value
    questions = tuple(
        replace(question, answers=(question.answers[0].removesuffix(" ."),), max_new_tokens=question.max_new_tokens - 1)
        for question in evidence.questions
    )
    others = make_code_facts(rng, names, count_fitting_codes(room - evidence.tokens, names))
    return [replace(evidence, questions=questions), others.as_distractor()]


def _single(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    fact = make_code_facts(rng, names, 1)
    others = make_item_facts(rng, names, 1) if room >= fact.tokens + 15 else Evidence()
    return [fact, others.as_distractor()]


def _vote(rng: random.Random, names: Names, room: int) -> list[Evidence]:
    cast = make_votes(rng, 8)
    return [cast, make_code_facts(rng, names, count_fitting_codes(room - cast.tokens, names)).as_distractor()]


FORMS: dict[str, Form] = {
    "single": Form(_single),
    "multikey": Form(lambda rng, names, room: [make_code_facts(rng, names, count_fitting_codes(room, names))]),
    "multiquery": Form(lambda rng, names, room: [make_code_pairs(rng, names, count_fitting_codes(room, names))]),
    "multivalue": Form(
        lambda rng, names, room: [make_item_facts(rng, names, min(room // 15, names.count_left("key", KEYS)))]
    ),
    "chain": Form(
        lambda rng, names, room: [
            make_chains(rng, names, min(room // 15, names.count_left("variable", VARIABLES) // 3))
        ]
    ),
    "vote": Form(_vote),
    "single_1": Form(lambda rng, names, _: [make_code_facts(rng, names, 1)], repetition),
    "single_3": Form(_single_3),
    "multikey_2": Form(_multikey_2, share=FACT_SHARE),
    "multikey_3": Form(_multikey_3, share=FACT_SHARE),
    "common": Form(_common),
    "qa_1": Form(_qa_1, paragraphs),
    "qa_2": Form(_qa_2, paragraphs),
    "turns": Form(lambda rng, names, room: [make_code_facts(rng, names, count_fitting_codes(room, names))], turns=True),
}
SUITES: dict[str, tuple[str, ...]] = {
    "core": ("single", "multikey", "multiquery", "multivalue", "chain", "vote"),
    "ruler": (
        "single_1", "single", "single_3", "multikey", "multikey_2", "multikey_3", "multivalue", "multiquery", "chain",
        "common", "vote", "qa_1", "qa_2",
    ),
}  # fmt: skip
SUITES["sparse"] = tuple(name for name in SUITES["ruler"] if FORMS[name].share == EVIDENCE_SHARE)
BUNDLED_LANGUAGE = "bundled language"
FACTS_AMONG_FACTS = "facts among facts"


@dataclass(frozen=True)
class SyntheticTask(Task):
    """One task of `FORMS` at a context of at most `length` tokens.

    Raises:
        UsageError: an unknown name or split, or a length too short for sparse evidence.
    """

    name: str
    length: int = 1024
    split: str = "report"
    prompt: ClassVar[str] = " {question}"
    chat: ClassVar[bool] = False
    metric: ClassVar[str] = "exact"

    def __post_init__(self) -> None:
        require_known("synthetic task", self.name, list(FORMS))
        if self.length < SHORTEST:
            raise UsageError(
                f"synthetic contexts need at least {SHORTEST} tokens for sparse evidence, got {self.length}"
            )
        require_known("split", self.split, SYNTHETIC_SPLITS)

    @property
    def category(self) -> str:
        """Whether evidence can be told from the rest of a context by its looks."""
        return BUNDLED_LANGUAGE if FORMS[self.name].share == EVIDENCE_SHARE else FACTS_AMONG_FACTS

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return `samples` contexts with up to four questions each; the same seed gives the same examples.

        One word is one token of the bundled tokenizer, whatever `count` says.
        """
        rng = random.Random(f"{self.split}/{self.name}/{self.length}/{seed}")
        examples = []
        for index in range(samples):
            document = self.document(rng)
            turns = FORMS[self.name].turns
            queries = document.questions[:QUESTIONS_PER_CONTEXT]
            if turns:
                queries = tuple(replace(query, category=f"turn {number}") for number, query in enumerate(queries, 1))
            examples.append(Example(self.name, f"{seed}-{index}", " ".join(document.words[1:]), queries, turns))
        return examples

    def document(self, rng: random.Random) -> Document:
        """Return one document of this task; its questions are all of this task."""
        form = FORMS[self.name]
        needles = form.build(rng, Names(rng), int(self.length * form.share))
        return compose_document(rng, self.length, needles, MENTIONS, TAIL_MENTIONS, form.haystack)
