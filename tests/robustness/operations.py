"""The layer of files, with somebody who is told of every operation in a folder before it is done; and forward passes.

What counts as an operation: a file is opened to be written, so many bytes are written, a file or a folder is locked,
synced, cut, replaced, linked, removed or made, or its mode is set.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

WRITING = set("wax+")
FREES = ("unlink", "rmdir", "rmtree", "truncate")  # what succeeds on a disk that is full


@dataclass
class Watch:
    """Counts the operations in `folder`, from 1, by their `names`, and forward passes."""

    folder: Path
    names: list[str] = field(default_factory=list)
    passes: int = 0

    def operation(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        """Count an operation; `half` does half of it."""
        self.names.append(name)

    def shortened(self, data: Any) -> Any:
        """Return what a write to a file without a buffer shall write of its data."""
        return data

    def forward(self) -> None:
        """Count a forward pass."""
        self.passes += 1

    def concerns(self, path: object) -> bool:
        """Tell whether a path, or what a file or descriptor is open for, is in the folder."""
        if hasattr(path, "fileno"):
            path = path.fileno()
        if isinstance(path, int):
            path = Path(f"/proc/self/fd/{path}").readlink()
        return Path(str(path)).absolute().is_relative_to(self.folder)


class _File:
    """A file whose writes are operations."""

    def __init__(self, file: Any, watch: Watch) -> None:
        self._file, self._watch = file, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._watch.operation("write", half)
        written: int = self._file.write(self._watch.shortened(data) if isinstance(self._file, io.RawIOBase) else data)
        return written

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def truncate(self, size: int | None = None) -> int:
        self._watch.operation("truncate")
        left: int = self._file.truncate(size)
        return left


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Tell of the file operations and forward passes of this process for a while."""
    opened = io.open

    def open_path(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not WRITING & set(mode) or not watch.concerns(path):
            return opened(path, mode, *rest, **named)
        watch.operation("open")
        return _File(opened(path, mode, *rest, **named), watch)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: watch.forward() if hasattr(module, "generate") else None
    )
    with ExitStack() as stack:
        stack.callback(hook.remove)
        stack.enter_context(mock.patch.object(Path, "open", open_path))
        for owner, names in (
            (os, ("fsync", "link")),
            (fcntl, ("flock",)),
            (Path, ("replace", "mkdir", "unlink", "rmdir", "chmod")),
            (shutil, ("rmtree",)),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _told(watch, getattr(owner, name), name)))
        yield


def _told(watch: Watch, call: Any, name: str) -> Any:
    def half(path: Any) -> None:
        files = sorted(Path(path).rglob("*")) if name == "rmtree" else []
        for file in files[: len(files) // 2]:
            if file.is_file():
                file.unlink()

    def told(path: Any, *rest: Any, **named: Any) -> Any:
        if watch.concerns(path):
            watch.operation(name, lambda: half(path))
        return call(path, *rest, **named)

    return told
