"""What evaluations measure: replies with all that is known of them and their file, what layers lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from pydantic import PositiveFloat

from kvsearch.core.files import write_atomically
from kvsearch.core.printed import format_csv

Contexts = Mapping[tuple[str, str], str]  # by task and key: the context's name, see `name_contexts`
ReplyPlace = tuple[str, str, int, str]  # of a reply in its run: task, key, number of the question, method


@dataclass(frozen=True)
class Sample:
    """One reply of one method, its score, and how many cache entries it was made from.

    `category` and `id` belong to the question; `id` is its author's name for it, or empty.
    `loss` is that of the right reply, in nats per token; None where it was not measured beside the reply, as for
    teacher-forced tasks, whose reply says it. `entries` and `bytes` are what the cache held once context
    (question-agnostic) or prompt (question-aware) were compressed, `most` the largest number of entries from then until
    the reply was complete. `prompt_sha256` is of the token ids before the reply as little-endian 64-bit integers.
    Seconds are the batch's by its size; reading the prompts is shared by all methods that are evaluated together,
    replying by those that reply together.
    """

    task: str
    category: str
    method: str
    protocol: str
    key: str
    question: int
    id: str = field(default="", kw_only=True)
    loss: float | None = field(default=None, kw_only=True)
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
    def place(self) -> ReplyPlace:
        """Where the reply belongs in its run."""
        return self.task, self.key, self.question, self.method


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    r"""Write a row per reply as CSV, all fields of `Sample` but the loss, which only choices measure.

    Text is UTF-8. A lone surrogate, which has no place there, becomes its escape such as `\ud800`; see `format_csv`.
    """
    names = [column.name for column in fields(Sample) if column.name != "loss"]
    rows = [[getattr(sample, name) for name in names] for sample in samples]
    write_atomically(path, format_csv([names, *rows]).encode())


@dataclass(frozen=True)
class Footprint:
    """Entries and bytes once context or prompt were compressed, the most entries until the reply was complete."""

    entries: PositiveFloat
    bytes: PositiveFloat
    most: PositiveFloat


@dataclass(frozen=True)
class LayerLoss:
    """What the output of a layer loses under a method, means over the `queries` of a task.

    The bounds are None where entries are merged: they hold for keys and values that stay as they are.
    """

    task: str
    method: str
    layer: int
    queries: int
    loss: float  # |y - yhat|_1
    evicted_mass: float  # attention on entries that are gone, mean over the query heads
    bound: float | None = None  # 2 C sum_h Vmax_h m_h
    bound_by_head: float | None = None  # 2 sum_h C_h Vmax_h m_h

    @property
    def ratio(self) -> float | None:
        """The loss in parts of its bound; None without a bound, or where it is 0."""
        return self.loss / self.bound if self.bound else None
