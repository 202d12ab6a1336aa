"""What needles are hidden in: a story, or a few sentences that repeat."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvsearch.errors import UsageError
from kvsearch.plan.files import read_text
from kvsearch.resources import resource

STORY = "data/calibration/novel.txt"
NOISE = (
    "The kettle is warm.",
    "The cat is asleep.",
    "The lamp is low.",
    "Rain comes down.",
    "Then all is still again.",
)
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*$")
_ABBREVIATION = re.compile(r"[\"'“‘(]*(Mr|Mrs|Ms|Dr|St|Prof|[A-Z])\.$")
_LONGEST_SENTENCE = 60  # words, for texts without punctuation


@dataclass(frozen=True)
class Noise:
    """Five short sentences to a line, over and over. One unit is one sentence."""

    text: ClassVar[str] = "\n".join(NOISE)
    separator: ClassVar[str] = "\n"

    def sentences(self, units: int) -> list[str]:
        """Return the lines of `units` sentences, of which the last one may be short."""
        lines, rest = divmod(units, len(NOISE))
        return [" ".join(NOISE)] * lines + ([" ".join(NOISE[:rest])] if rest else [])


@dataclass(frozen=True)
class Essay:
    """A text that is read in words from its beginning, and again when it ends. One unit is one word."""

    words: tuple[str, ...]
    ends: tuple[int, ...]  # after how many words each sentence ends
    text: str
    separator: ClassVar[str] = " "

    @classmethod
    def load(cls, path: Path | None) -> Essay:
        """Read the user's text file, or the shipped story; UsageError if it is no text or has no words."""
        file = resource(STORY) if path is None else path
        words = tuple(read_text(file, f"the haystack {file}").split())
        if not words:
            raise UsageError(f"the haystack {file} is empty: name a text file with a story or essays")
        return cls(words, tuple(_sentence_ends(words)), " ".join(words))

    def sentences(self, units: int) -> list[str]:
        """Return the sentences of the first `units` words, of which the last one may be cut after a word."""
        copies, rest = divmod(units, len(self.words))
        whole = self._sentences(self.ends) * copies
        ends = self.ends[: bisect_right(self.ends, rest)]
        last = ends[-1] if ends else 0
        return whole + self._sentences(ends if last == rest else (*ends, rest))

    def _sentences(self, ends: tuple[int, ...]) -> list[str]:
        return [" ".join(self.words[start:end]) for start, end in zip((0, *ends), ends, strict=False)]


def _sentence_ends(words: tuple[str, ...]) -> list[int]:
    ends = [0]
    for place, word in enumerate(words, 1):
        finished = _SENTENCE_END.search(word) and not _ABBREVIATION.match(word)
        if finished or place - ends[-1] == _LONGEST_SENTENCE or place == len(words):
            ends.append(place)
    return ends[1:]
