"""One reply of one method with all that was measured of it, and the file of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from kvsearch.core.errors import UsageError
from kvsearch.core.files import atomic_write, check_target
from kvsearch.core.printed import csv_text

Contexts = Mapping[tuple[str, str], str]  # by task and key: what names the context, see `encoding.contexts_of`


@dataclass(frozen=True)
class Sample:
    """One reply of one method.

    `category` and `id` are those of the question; `id` is what its author calls it, empty if nothing.
    `entries` and `bytes` are what the cache held once context (question-agnostic) or prompt (question-aware) were
    compressed, `most` the most entries it held at a time from then until the reply was complete. `prompt_sha256` is of
    the token ids before the reply as little-endian 64-bit integers. Seconds are those of the batch by its size; reading
    the prompts is shared by all methods that are evaluated together, replying by those that reply together.
    """

    task: str
    category: str
    method: str
    protocol: str
    key: str
    question: int
    id: str = field(default="", kw_only=True)
    reply: str
    score: float
    prompt_sha256: str
    truncated: bool
    context_tokens: int
    prompt_tokens: int
    reply_tokens: int
    entries: int
    bytes: float
    most: int
    prefill_seconds: float = field(compare=False)
    reply_seconds: float = field(compare=False)

    @property
    def place(self) -> Place:
        """Where the reply belongs in its run."""
        return Place(self.task, self.key, self.question, self.method)


class Place(NamedTuple):
    """Where a reply belongs in its run."""

    task: str
    key: str
    question: int
    method: str


def context_of(sample: Sample, contexts: Contexts | None) -> str:
    """What names the context of a sample within its task; its key where `contexts` are not known."""
    return sample.key if contexts is None else contexts[sample.task, sample.key]


def check_samples_file(path: Path) -> None:
    """Raise UsageError, before anything is computed, if `write_samples` cannot write `path`."""
    if path.suffix != ".csv":
        raise UsageError(f"cannot write samples to {path}: name a .csv file")
    check_target(path)


def write_samples(samples: Sequence[Sample], path: Path, overwrite: bool = True) -> None:
    r"""Write a row per reply, all fields of `Sample`, as CSV; see `check_samples_file`.

    Text is UTF-8. A lone surrogate, which has no place there, becomes its escape such as `\ud800`; see `csv_text`.
    """
    check_samples_file(path)
    names = [column.name for column in fields(Sample)]
    rows = [[getattr(sample, name) for name in names] for sample in samples]
    atomic_write(path, csv_text([names, *rows]).encode(), overwrite)
