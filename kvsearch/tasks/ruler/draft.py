"""What examples are made of: their randomness, words that are made up, and prompts that grow to a length."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from kvsearch.core.resources import find_resource
from kvsearch.tasks.base import Query

DEPTH_STEPS = 40  # how many evenly spaced places needles have, 0 and 1 included
FILL_FRACTION = 0.98  # a context that fills this share of its room is not searched further
_INTERPOLATIONS = 8
_FIRST_STEP = 16


@dataclass(frozen=True)
class Stream:
    """The randomness of example `index`; `name` tells split, task, length and seed."""

    name: str
    index: int

    def make_rng(self, purpose: str = "facts") -> random.Random:
        """Return the random generator of a purpose, seeded the same at every call."""
        return random.Random(f"{self.name}/{self.index}/{purpose}")

    def draw_depths(self, needles: int) -> list[float]:
        """Return different depths in [0, 1], one per needle; examples in a row use each before one comes again."""
        cycle, place = divmod(self.index, DEPTH_STEPS // needles)
        order = random.Random(f"{self.name}/depths/{cycle}").sample(range(DEPTH_STEPS), DEPTH_STEPS)
        return [depth / (DEPTH_STEPS - 1) for depth in order[place * needles : (place + 1) * needles]]


@dataclass(frozen=True)
class Draft:
    """A prompt whose context holds any number of units of haystack, from `least` to `largest` (None: without end).

    Several `queries` are asked in turns. How many tokens a reply may have is the task's affair.
    """

    context: Callable[[int], str]
    queries: tuple[Query, ...]
    least: int = 1
    largest: int | None = None


def find_largest_fit(size: Callable[[int], int], room: int, minimum: int, maximum: int | None = None) -> int:
    """Find about the largest number of units whose `size` in tokens is at most `room`; never below `minimum`.

    Interpolates between measured sizes, because to measure a long text takes long, and bisects if that does not help.
    """
    ceiling = 2 * room if maximum is None else min(maximum, 2 * room)  # a unit has half a token at the very least
    low = minimum
    high = max(minimum, ceiling) + 1
    base = reached = size(minimum)
    units = min(minimum + _FIRST_STEP, high - 1)
    probes = 0
    while low + 1 < high and reached < FILL_FRACTION * room:
        tokens = size(units)
        rate = max((tokens - base) / (units - minimum), 1e-3)
        if tokens <= room:
            low = units
            reached = tokens
        else:
            high = units
        probes += 1
        step = int((room * (1 + FILL_FRACTION) / 2 - reached) / rate) if probes < _INTERPOLATIONS else (high - low) // 2
        units = min(max(low + step, low + 1), high - 1)
    return low


def insert(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Return the sentences with every needle at its depth: 0 is before the first sentence, 1 after the last."""
    result = list(sentences)
    for depth, needle in sorted(needles, reverse=True):
        result.insert(int(len(sentences) * depth), needle)
    return result


def format_worked_example(context: str, query: Query) -> str:
    """Format a prompt with its reply, as the worked example before the prompt itself."""
    return f"{context}\n{query.question} {query.prefix} {query.written}\n\n"


def join_names(items: Sequence[str]) -> str:
    """Join names to a list in English: "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


# --- keys, values and words that are made up -------------------------------------------------------------------------

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
