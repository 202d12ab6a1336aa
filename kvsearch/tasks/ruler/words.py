"""Keys, values and words that are made up for an example."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterable
from functools import cache

from kvsearch.core.resources import find_resource

Maker = Callable[[random.Random], str]


class Fresh:
    """Draws what was not drawn before and does not occur in a text, be it in other case."""

    def __init__(self, rng: random.Random, text: str = "", taken: Iterable[str] = ()) -> None:
        self._rng = rng
        self._text = text.lower()
        self.taken = set(taken)

    def draw(self, make: Maker) -> str:
        while (drawn := make(self._rng)) in self.taken or drawn.lower() in self._text:
            pass
        self.taken.add(drawn)
        return drawn


def draw_word(rng: random.Random) -> str:
    """Return an adjective and a noun, as in quiet-harbor; no such word is part of another one."""
    return f"{rng.choice(read_words('adjectives'))}-{rng.choice(read_words('nouns'))}"


def draw_number(rng: random.Random) -> str:
    """Return seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def draw_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_amount(rng: random.Random) -> str:
    """Return five digits, the value of a variable."""
    return str(rng.randint(10**4, 10**5 - 1))


def make_variable_maker(letters: int) -> Maker:
    """Return a maker of so many capital letters."""
    return lambda rng: "".join(rng.choices(string.ascii_uppercase, k=letters))


def draw_coded_word(rng: random.Random) -> str:
    """Return six small letters that mean nothing."""
    return "".join(rng.choices(string.ascii_lowercase, k=6))


@cache
def read_words(kind: str) -> tuple[str, ...]:
    """Return the nouns, adjectives or verbs shipped with kvsearch, in alphabetical order."""
    return tuple(find_resource(f"data/ruler/{kind}.txt").read_text(encoding="ascii").split())


@cache
def make_vocabulary(minimum: int) -> tuple[str, ...]:
    """Return at least `minimum` different words: all that are shipped, then pairs of nouns as in lanternriver."""
    vocabulary = dict.fromkeys((*read_words("nouns"), *read_words("adjectives"), *read_words("verbs")))
    rng = random.Random("pairs of nouns")
    while len(vocabulary) < minimum:
        vocabulary[rng.choice(read_words("nouns")) + rng.choice(read_words("nouns"))] = None
    return tuple(vocabulary)


def count_words() -> int:
    """Return how many different keys `draw_word` can draw before another one takes long to find."""
    return len(read_words("adjectives")) * len(read_words("nouns")) // 2
