"""Plain text in windows of a context, which is compressed, and its continuation, which is predicted from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsearch.core.errors import UsageError
from kvsearch.core.files import read_bytes, read_text
from kvsearch.tasks.rows import parse_rows


@dataclass(frozen=True)
class Window:
    """Token ids of a context and of the text that follows it; `start` is the position of the first."""

    start: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class PerplexityText:
    """A text to measure perplexity on."""

    name: str
    text: str

    @classmethod
    def load(cls, path: str | Path) -> PerplexityText:
        """Read a text file, or a .jsonl file of `{"text": ...}` rows, which are joined by blank lines.

        Raises:
            UsageError: there is no such file, it is not UTF-8 text, it is empty, or a row has no text.
        """
        if Path(path).suffix == ".jsonl":
            rows = [row.get("text") for row in parse_rows(read_bytes(path), str(path))]
            if not all(isinstance(row, str) for row in rows):
                raise UsageError(f'{path} has rows without a text: perplexity needs rows such as {{"text": "..."}}')
            text = "\n\n".join(map(str, rows))
        else:
            text = read_text(path)
        if not text.strip():
            raise UsageError(f"{path} is empty: perplexity needs text")
        return cls(Path(path).stem, text)

    def windows(
        self, encode: Callable[[str], Sequence[int]], context: int, continuation: int, stride: int | None = None
    ) -> list[Window]:
        """Cut the text every `stride` tokens (by default into windows that do not overlap); the rest is left out.

        `encode` gives token ids without special tokens, `context` and `continuation` are lengths in tokens.

        Raises:
            UsageError: a length or stride below 1, or a text shorter than one window.
        """
        size = context + continuation
        step = context + continuation if stride is None else stride
        if min(context, continuation, step) < 1:
            raise UsageError(f"windows need lengths and a stride of at least 1, got {context}, {continuation}, {step}")
        ids = tuple(encode(self.text))
        if len(ids) < size:
            what = f"{self.name} has {len(ids)} tokens, a window of {context} + {continuation} needs {size}"
            raise UsageError(f"{what}: give a longer text or shorter windows")
        starts = range(0, len(ids) - size + 1, step)
        return [Window(at, ids[at : at + context], ids[at + context : at + size]) for at in starts]
