"""Locks that others hold, and writes that are told when they have none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from pathlib import Path
from typing import Any
from unittest import mock

from kvsearch.core import files
from kvsearch.core.errors import InternalError
from kvsearch.runs.ledger import Ledger
from kvsearch.runs.lock import lock_directory, require_lock

WEIGHTS = re.compile(r"\w+-[0-9a-f]{12}\.safetensors")


@contextmanager
def every_write_locked(named: tuple[object, ...] = ()) -> Iterator[list[Path]]:
    """Give a list of the files that are written without a lock meanwhile, but for those that are `named`."""
    outside = list[Path]()
    own = list[Path]()
    for one in named:
        with suppress(ValueError):  # what no file can be called
            own.append(Path(str(one)).resolve())

    def look(path: Path) -> None:
        try:
            require_lock(path.parent)
        except InternalError:
            if not (path.resolve() in own or WEIGHTS.fullmatch(path.name) or _is_of_several(path, own)):
                outside.append(path)

    replace, append = files._replace, Ledger._append

    def replacing(target: Path, *rest: Any) -> None:
        look(target)
        replace(target, *rest)

    def appending(self: Ledger[Any], *rest: Any) -> None:
        look(self.path)
        append(self, *rest)

    with mock.patch.object(files, "_replace", replacing), mock.patch.object(Ledger, "_append", appending):
        yield outside


def _is_of_several(path: Path, own: list[Path]) -> bool:
    """Tell whether it is PLAN-N.json of a plan file that is named."""
    return any(path.parent == one.parent and path.stem.rpartition("-")[0] == one.stem for one in own)


@contextmanager
def locked_elsewhere(directory: Path) -> Iterator[None]:
    """Have the lock of a directory in a context of its own, so that code in this one does not have it."""
    context, lock = Context(), lock_directory(directory)
    context.run(lock.__enter__)
    try:
        yield
    finally:
        context.run(lock.__exit__, None, None, None)
