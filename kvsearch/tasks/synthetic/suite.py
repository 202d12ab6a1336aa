"""The synthetic suite: five recall tasks and a frequency task in the bundled model's language.

Evidence is at most 5% of a context's words. Every task draws its documents from one seeded stream per split, so the
train, calibration, select and report splits cannot share a document.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvsearch.errors import UsageError
from kvsearch.tasks.base import Example, Query, TokenCount
from kvsearch.tasks.metrics import exact_match
from kvsearch.tasks.synthetic.language import (
    Document,
    Names,
    Needles,
    chains,
    code_facts,
    code_pairs,
    compose,
    item_facts,
    votes,
)  # fmt: skip
from kvsearch.tasks.synthetic.vocabulary import KEYS, VARIABLES

EVIDENCE_SHARE = 0.05
SHORTEST = 512
SPLITS = ("calibrate", "select", "report")
QUESTIONS_PER_CONTEXT = 4
MENTIONS, TAIL_MENTIONS = 2, 1


def _single(rng: random.Random, names: Names, room: int) -> list[Needles]:
    fact = code_facts(rng, names, 1, "single")
    others = item_facts(rng, names, 1) if room >= fact.tokens + 15 else Needles()
    return [fact, Needles(others.sentences, (), others.mentions)]


def _multikey(rng: random.Random, names: Names, room: int) -> list[Needles]:
    return [code_facts(rng, names, _codes(room, names))]


def _multiquery(rng: random.Random, names: Names, room: int) -> list[Needles]:
    return [code_pairs(rng, names, _codes(room, names))]


def _multivalue(rng: random.Random, names: Names, room: int) -> list[Needles]:
    return [item_facts(rng, names, min(room // 15, names.left("key", KEYS)))]


def _chain(rng: random.Random, names: Names, room: int) -> list[Needles]:
    return [chains(rng, names, min(room // 15, names.left("variable", VARIABLES) // 3))]


def _vote(rng: random.Random, names: Names, room: int) -> list[Needles]:
    cast = votes(rng, 8)
    others = code_facts(rng, names, _codes(room - cast.tokens, names))
    return [cast, Needles(others.sentences, (), others.mentions)]


def _codes(room: int, names: Names) -> int:
    """How many code facts fit into `room` words, as far as there are keys left."""
    return max(0, min(room // 5, names.left("key", KEYS)))


BUILDERS: dict[str, Callable[[random.Random, Names, int], list[Needles]]] = {
    "single": _single, "multikey": _multikey, "multiquery": _multiquery, "multivalue": _multivalue, "chain": _chain,
    "vote": _vote,
}  # fmt: skip


@dataclass(frozen=True)
class SyntheticTask:
    """One task of the suite at a context of at most `length` tokens."""

    name: str
    length: int = 1024
    split: str = "report"
    prompt: ClassVar[str] = " {question}"
    category: ClassVar[str] = "synthetic"
    chat: ClassVar[bool] = False
    stops: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            raise UsageError(
                f"synthetic contexts need at least {SHORTEST} tokens for sparse evidence, got {self.length}"
            )
        if self.split not in SPLITS:
            raise UsageError(f"unknown split {self.split!r} (known: {', '.join(SPLITS)})")

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """`samples` contexts with up to four questions each; the same seed gives the same examples.

        One word is one token of the bundled model's tokenizer, whatever `count` says.
        """
        rng = random.Random(f"{self.split}/{self.name}/{self.length}/{seed}")
        return [self._example(rng, f"{seed}-{index}") for index in range(samples)]

    def score(self, reply: str, query: Query) -> float:
        return exact_match(reply, query.answers)

    def _example(self, rng: random.Random, key: str) -> Example:
        document = self.document(rng)
        queries = tuple(
            Query(" ".join(q.prompt), (" ".join(q.answer),), len(q.answer))
            for q in document.questions[:QUESTIONS_PER_CONTEXT]
        )
        return Example(self.name, key, " ".join(document.words[1:]), queries)

    def document(self, rng: random.Random) -> Document:
        """One document of this task; its questions are all of this task."""
        needles = BUILDERS[self.name](rng, Names(rng), int(self.length * EVIDENCE_SHARE))
        return compose(rng, self.length, needles, MENTIONS, TAIL_MENTIONS)


def synthetic_suite(length: int = 1024, split: str = "report") -> list[SyntheticTask]:
    """All tasks of the suite."""
    return [SyntheticTask(name, length, split) for name in BUILDERS]
