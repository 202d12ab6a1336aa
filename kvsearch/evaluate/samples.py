"""One reply of one method with all that was measured of it, and the file of all of them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.plan.files import atomic_write, check_target

CSV, PARQUET = ".csv", ".parquet"


@dataclass(frozen=True)
class Sample:
    """One reply of one method.

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


class Cost(NamedTuple):
    """The last fields of a `Sample`."""

    entries: int
    bytes: float
    most: int
    prefill_seconds: float
    reply_seconds: float


def token_hash(ids: Tensor) -> str:
    """SHA-256 of token ids as little-endian 64-bit integers."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()


def check_samples_file(path: Path) -> None:
    """Find out, before anything is computed, whether `write_samples` can write `path`.

    Raises:
        UsageError: the suffix is neither .csv nor .parquet, or there can be no such file.
        EnvironmentFault: pyarrow is missing for parquet.
    """
    if path.suffix not in (CSV, PARQUET):
        raise UsageError(f"cannot write samples to {path}: name a {CSV} or {PARQUET} file")
    if path.suffix == PARQUET and find_spec("pyarrow") is None:
        raise EnvironmentFault(f"cannot write {path}: parquet needs pyarrow, install it or name a {CSV} file")
    check_target(path)


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write a row per reply, all fields of `Sample`, as CSV or parquet by the suffix; see `check_samples_file`."""
    import pandas

    check_samples_file(path)
    frame = pandas.DataFrame([asdict(sample) for sample in samples])
    if path.suffix == CSV:
        atomic_write(path, frame.to_csv(index=False, lineterminator="\n").encode())
        return
    data = io.BytesIO()
    frame.to_parquet(data, index=False)
    atomic_write(path, data.getvalue())
