"""The lock of a directory, as somebody else has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path

from kvsearch.runs.lock import locked


@contextmanager
def locked_elsewhere(directory: Path) -> Iterator[None]:
    """Have the lock of a directory in a context of its own, so that code in this one does not have it."""
    context, lock = Context(), locked(directory)
    context.run(lock.__enter__)
    try:
        yield
    finally:
        context.run(lock.__exit__, None, None, None)
