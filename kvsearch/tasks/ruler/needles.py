"""What is hidden in a haystack: the needles of the eight niah tasks, and the chain of variables of vt.

Haystacks are a story, a few sentences again and again, or more needles.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvsearch.core.errors import UsageError
from kvsearch.core.files import read_text
from kvsearch.core.resources import find_resource
from kvsearch.tasks.base import Query, TokenCount
from kvsearch.tasks.dataset_task import read_shipped
from kvsearch.tasks.ruler.draft import (
    Draft,
    Fresh,
    Maker,
    Stream,
    count_words,
    draw_amount,
    draw_number,
    draw_uuid,
    draw_word,
    find_largest_fit,
    format_worked_example,
    insert,
    join_names,
    make_variable_maker,
)

STORY_FILE = "data/calibration/novel.txt"
NOISE_SENTENCES = (
    "The kettle is warm.",
    "The cat is asleep.",
    "The lamp is low.",
    "Rain comes down.",
    "Then all is still again.",
)
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")
_ABBREVIATION = re.compile(r"[\"'“‘(]*(Mr|Mrs|Ms|Dr|St|Prof|[A-Z])\.$")
_LONGEST_SENTENCE = 60  # words, for texts without punctuation


def read_haystack(path: Path | None) -> str:
    """Read the user's text file, or the shipped story; UsageError if it is no text, or empty."""
    file = find_resource(STORY_FILE) if path is None else path
    text = read_text(file, f"the haystack {file}")
    if not text.strip():
        raise UsageError(f"the haystack {file} is empty: name a text file with a story or essays")
    return text


def make_noise(units: int) -> list[str]:
    """Return lines of five short sentences, over and over: `units` sentences, the last line may be short."""
    lines, rest = divmod(units, len(NOISE_SENTENCES))
    return [" ".join(NOISE_SENTENCES)] * lines + ([" ".join(NOISE_SENTENCES[:rest])] if rest else [])


@dataclass(frozen=True)
class Essay:
    """A text that is read in words from its beginning, and again when it ends. One unit is one word."""

    words: tuple[str, ...]
    ends: tuple[int, ...]  # after how many words each sentence ends
    text: str

    @classmethod
    def load(cls, path: Path | None) -> Essay:
        """Read the user's text file, or the shipped story; UsageError if it is no text or has no words."""
        words = tuple(read_haystack(path).split())
        ends = [0]
        for place, text in enumerate(words, 1):
            finished = _SENTENCE_END.search(text) and not _ABBREVIATION.match(text)
            if finished or place - ends[-1] == _LONGEST_SENTENCE or place == len(words):
                ends.append(place)
        return cls(words, tuple(ends[1:]), " ".join(words))

    def sentences(self, units: int) -> list[str]:
        """Return the sentences of the first `units` words; the last one may be cut after a word."""
        copies, rest = divmod(units, len(self.words))
        whole = self._sentences(self.ends) * copies
        ends = self.ends[: bisect_right(self.ends, rest)]
        last = ends[-1] if ends else 0
        return whole + self._sentences(ends if last == rest else (*ends, rest))

    def _sentences(self, ends: tuple[int, ...]) -> list[str]:
        return [" ".join(self.words[start:end]) for start, end in zip((0, *ends), ends, strict=False)]


_MAKERS: Final[dict[str, Maker]] = {"word": draw_word, "number": draw_number, "uuid": draw_uuid}
_INTROS: Final = (
    "Somewhere the text below tells a secret {kind}. Remember it: a question about it follows the text.",
    "The text below tells secret {kind}s in several places. Remember them: a question about them follows the text.",
)


@dataclass(frozen=True)
class NeedleSpec:
    """The haystack ("noise", "essay" or "needles"), what keys and values are, and how many there are of each.

    The first `queries` keys are asked for, in one question or in `turns`; a haystack of needles has further keys, one
    for every unit.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    turns: bool = False


NIAH: Final = {name: NeedleSpec(**settings) for name, settings in read_shipped("needles").items()}


def draft_needles(spec: NeedleSpec, essay: Essay | None, stream: Stream) -> Draft:
    """Return an example of one niah task; without an `essay` the haystack is noise, or made of needles."""
    among_needles = spec.haystack == "needles"
    haystack = "" if among_needles else essay.text if essay else "\n".join(NOISE_SENTENCES)
    fresh = Fresh(stream.make_rng(), haystack)
    make_key = _MAKERS[spec.key]
    make_value = _MAKERS[spec.value]

    def needle(key: str, value: str) -> str:
        return f"One secret {spec.value} of {key} is {value}."

    keys = [fresh.draw(make_key) for _ in range(spec.keys)]
    facts = [(key, fresh.draw(make_value)) for key in keys for _ in range(spec.values)]
    needles = list(zip(stream.draw_depths(len(facts)), [needle(*fact) for fact in facts], strict=True))
    told_keys = keys[: spec.queries]
    intro = _INTROS[spec.queries * spec.values > 1].format(kind=spec.value)
    if spec.turns:
        queries = tuple(_ask(spec, facts, [key], f"turn {turn}") for turn, key in enumerate(told_keys, 1))
    else:
        queries = (_ask(spec, facts, told_keys),)

    def context(units: int) -> str:
        if among_needles:
            others = Fresh(stream.make_rng("haystack"), taken=fresh.taken)
            sentences = [needle(others.draw(make_key), others.draw(make_value)) for _ in range(units)]
        else:
            sentences = essay.sentences(units) if essay else make_noise(units)
        separator = " " if essay else "\n"
        return f"{intro}\n{separator.join(insert(sentences, needles))}"

    return Draft(context, queries, largest=count_words() if among_needles and spec.key == "word" else None)


def _ask(spec: NeedleSpec, facts: Sequence[tuple[str, str]], keys: Sequence[str], category: str = "") -> Query:
    """Return the question for the values of keys."""
    answers = tuple(value for key, value in facts if key in keys)
    many = len(answers) > 1
    subject = f"{spec.value}{'s' if many else ''} of {join_names(keys)}"
    verb = "are" if many else "is"
    return Query(
        f"What {verb} the secret {subject} that the text above tells?",
        answers,
        prefix=f"The secret {subject} that the text above tells {verb}",
        category=category,
        written=join_names(answers) if many else "",
    )


# --- variable tracking -----------------------------------------------------------------------------------------------

HOPS = 4
CHAIN_LENGTH = HOPS + 1
LONGEST_EXAMPLE = 500  # tokens
_CHAIN_INTRO = (
    "The text below hides assignments to variables: the first one gets a value, every further one gets that of "
    "another variable. Follow the chain from variable to variable."
)


def draft_tracing(length: int, count: TokenCount, stream: Stream) -> Draft:
    """Return an example of vt: a worked example with a chain of its own, then the chain that is asked for.

    The worked example has at most 500 tokens, or a quarter of the length; its assignments are evenly spread.
    """
    fresh = Fresh(stream.make_rng(), "\n".join((*NOISE_SENTENCES, _CHAIN_INTRO)))
    chain, query = _hide_chain(fresh, 5, stream.draw_depths(CHAIN_LENGTH))
    shift = stream.make_rng("example").random()
    shown, answered = _hide_chain(fresh, 3, [(place + shift) / CHAIN_LENGTH for place in range(CHAIN_LENGTH)])

    def example(units: int) -> str:
        return format_worked_example(shown(units), answered)

    room = min(LONGEST_EXAMPLE, length // 4)
    solved = example(find_largest_fit(lambda units: count(example(units)), room, minimum=0))
    return Draft(lambda units: solved + chain(units), (query,))


def _hide_chain(fresh: Fresh, letters: int, depths: Sequence[float]) -> tuple[Callable[[int], str], Query]:
    """Return a text by its sentences of noise, with a chain of variables of so many letters, and the question for them.

    Assignments are at the depths.
    """
    value = fresh.draw(draw_amount)
    names = [fresh.draw(make_variable_maker(letters)) for _ in range(CHAIN_LENGTH)]

    def context(units: int) -> str:
        assignments = [f"LET {left} = {right}" for left, right in zip(names, [value, *names], strict=False)]
        lines = insert(make_noise(units), list(zip(sorted(depths), assignments, strict=True)))
        return "\n".join((_CHAIN_INTRO, *lines))

    query = Query(
        f"Question: Which variables have the value {value} at the end of the text above? Name all of them.",
        tuple(names),
        prefix=f"Answer: By the chain in the text above, the {CHAIN_LENGTH} variables with the value {value} are",
        written=", ".join(names),
    )
    return context, query
