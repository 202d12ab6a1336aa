"""Aggregation: the common words of a list (cwe) and the frequent words of a coded text (fwe)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from kvsearch.tasks.base import Query
from kvsearch.tasks.ruler.draft import (
    Draft,
    Fresh,
    Stream,
    draw_coded_word,
    format_worked_example,
    join_names,
    make_vocabulary,
)

COMMON = 10
_LIST_INTRO = (
    "Here is a numbered list of words. Some of the words come far more often than the others: keep those in mind."
)
_LIST_QUESTION = f"Question: Which {COMMON} words come most often in the list above?"
_LIST_PREFIX = f"Answer: The {COMMON} words that come most often in the list above are:"

TOP = 3
DOTS = "..."
ZETA = math.pi**2 / 6  # Riemann's zeta at 2, the exponent of the word counts
_CODE_INTRO = (
    "Below is a coded text. Count how often each coded word occurs in it, to find the three most frequent ones. "
    "Dots stand for nothing."
)
_CODE_QUESTION = (
    "Question: Which three coded words are the most frequent ones of the text above? Leave out the dots, and give no "
    "reasons."
)
_CODE_PREFIX = "Answer: The three most frequent coded words of the text above are:"


def draft_common_words(length: int, stream: Stream) -> Draft:
    """Return an example of cwe: a worked example, then a numbered list with ten words far more often than the others.

    One unit is one rare word, with all its repeats.
    """
    # how often words come: common and rare ones, common ones in the worked example, and how many rare words it has
    common_times, rare_times, shown_times, shown_rare = (30, 3, 10, 30) if length >= 4096 else (6, 1, 3, 10)
    rng = stream.make_rng()
    # a numbered word has two tokens or more, and a few words are dropped
    pool = make_vocabulary(int(0.55 * length / rare_times))
    words = [word for word in rng.sample(pool, len(pool)) if word not in (_LIST_INTRO + _LIST_QUESTION).lower()]
    common, words = _select_distinct(words)
    shown, words = _select_distinct(words)
    rare = words[shown_rare:]
    solved = _format_shuffled([*shown * shown_times, *words[:shown_rare] * rare_times], rng)
    example = format_worked_example(solved, _ask_common(shown))

    def context(units: int) -> str:
        return example + _format_shuffled(
            [*common * common_times, *rare[:units] * rare_times], stream.make_rng("order")
        )

    return Draft(context, (_ask_common(common),), least=COMMON, largest=len(rare))


def _ask_common(words: Sequence[str]) -> Query:
    """Return the question for the most frequent words."""
    return Query(_LIST_QUESTION, tuple(words), prefix=_LIST_PREFIX, written=_number_words(words))


# so many coded words that ranks 4 and 5, the last that counts and the first that does not, differ by one whole word
LEAST_CODED = math.ceil(ZETA / (1 / (TOP + 1) ** 2 - 1 / (TOP + 2) ** 2))


def draft_coded_words(stream: Stream) -> Draft:
    """Return an example of fwe: coded words in random order, that of rank r n / (zeta(2) r^2) times, rank 1 being dots.

    One unit is one more in n.
    """

    def context(units: int) -> str:
        counts = compute_word_counts(units)
        words = (DOTS, *_draw_coded_words(stream, len(counts) - 1))
        text = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
        stream.make_rng("order").shuffle(text)
        return f"{_CODE_INTRO}\n{' '.join(text)}"

    answers = tuple(_draw_coded_words(stream, TOP))
    query = Query(_CODE_QUESTION, answers, prefix=_CODE_PREFIX, written=join_names(answers))
    return Draft(context, (query,), least=LEAST_CODED)


def compute_word_counts(n: int) -> list[int]:
    """Compute how often the words of ranks 1, 2, 3, ... occur, down to one occurrence."""
    return [int(n / (ZETA * rank**2)) for rank in range(1, math.isqrt(int(n / ZETA)) + 1)]


def _draw_coded_words(stream: Stream, words: int) -> list[str]:
    """Return the first coded words of an example."""
    fresh = Fresh(stream.make_rng(), _CODE_INTRO + _CODE_QUESTION)
    return [fresh.draw(draw_coded_word) for _ in range(words)]


def _select_distinct(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the first ten words that are not part of each other, and all words that contain none of the ten."""
    chosen: list[str] = []
    for word in words:
        if not any(word in other or other in word for other in chosen):
            chosen.append(word)
        if len(chosen) == COMMON:
            break
    return chosen, [word for word in words if not any(other in word for other in chosen)]


def _format_shuffled(words: list[str], rng: Random) -> str:
    return f"{_LIST_INTRO}\n{_number_words(rng.sample(words, len(words)))}"


def _number_words(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))
