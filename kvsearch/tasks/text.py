"""Perplexity on plain text: a window is compressed, and the text that follows it is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsearch.core.errors import UsageError
from kvsearch.tasks.base import Example, Query, Task, TokenCount
from kvsearch.tasks.fields import is_blank
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.rows import read_rows_or_text
from kvsearch.tasks.splits import ALL, OWN_SHARES, check_split, draw_items, select_split

DEFAULT_LENGTH = 512
LEAD = 8  # tokens that follow a context where other tasks have a question
CONTINUATION = 64  # tokens after these, which are predicted
SPARE_TEXT = 1.25  # times as much text is taken for a continuation, so that it has so many tokens
COUNTED_CHARACTERS = 100_000  # characters that tell how long a token is
LONGEST_WORD = 40  # characters to look for a space in; some scripts have none


@dataclass(frozen=True)
class TextTask(Task):
    """Windows of a text, one after the other: about `length` tokens of context, a few more, and what is predicted.

    Parts end where a word does, in scripts that divide words by spaces, and are the text's own, white space included.
    """

    name: str
    text: str
    length: int = DEFAULT_LENGTH
    split: str = ALL
    metric = "likelihood"
    prompt = PLACE
    category = "text"
    chat = False

    def __post_init__(self) -> None:
        check_split(self.split)

    @classmethod
    def load(cls, path: str | Path, length: int = DEFAULT_LENGTH, split: str = ALL) -> TextTask:
        """Read a text file, or one of rows such as `{"text": ...}`, which are joined by blank lines.

        Raises:
            UsageError: there is no such file, it is no text, it is empty, or a row has no text.
        """
        content = read_rows_or_text(path)
        if not isinstance(content, str):
            rows = [row.get("text") for row in content]
            if not all(isinstance(row, str) for row in rows):
                raise UsageError(f'{path} has rows without a text: give rows such as {{"text": "..."}}')
            content = "\n\n".join(map(str, rows))
        if is_blank(content):
            raise UsageError(f"{path} is empty: give text")
        return cls(Path(path).stem, content, length, split)

    def examples(self, samples: int, seed: int, count: TokenCount) -> list[Example]:
        """Return up to `samples` windows of the split, drawn without replacement if it has more.

        Raises:
            UsageError: the text is shorter than a window.
        """
        sample = self.text[:COUNTED_CHARACTERS]
        characters = len(sample) / max(count(sample), 1)
        windows = list(self._windows(characters))
        if not windows:
            raise UsageError(
                f"{self.name} has about {round(len(self.text) / characters)} tokens, and a window needs "
                f"{self.length + LEAD + round(SPARE_TEXT * CONTINUATION)}: give more text, or lower --length"
            )
        return draw_items(
            select_split(windows, self.split, lambda window: window.context, self.name, OWN_SHARES), samples, seed
        )

    def _windows(self, characters: float) -> Iterator[Example]:
        """Yield the windows of the text, whose tokens have so many `characters`; a rest that is too short is left."""
        start = 0
        while True:
            lead = self._space_after(start + self.length * characters)
            gap = self._space_after(lead + LEAD * characters)
            end = self._space_after(gap + SPARE_TEXT * CONTINUATION * characters)
            if end > len(self.text):
                return
            continuation = self.text[gap:end]
            if continuation.strip():
                query = Query(self.text[lead:gap], (continuation,), max_new_tokens=CONTINUATION)
                yield Example(self.name, str(start), self.text[start:lead], (query,))
            start = end

    def _space_after(self, place: float) -> int:
        """Return where the next word ends, or the place itself where no word does."""
        at = round(place)
        space = self.text.find(" ", at, at + LONGEST_WORD)
        return at if space < 0 else space
