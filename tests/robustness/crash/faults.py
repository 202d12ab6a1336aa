"""Faults at the layer of files, and in forward passes: the n-th operation in a folder fails, or is the last one.

What counts as an operation: a file is opened to be written, so many bytes are written, a file or a folder is synced,
cut, replaced, removed or made. A write that fails has written half of its bytes.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

Kind = Literal["kill", "ENOSPC", "EIO", "full", "memory"]
KINDS: tuple[Kind, ...] = ("kill", "ENOSPC", "EIO", "full", "memory")
KILLED = 137
WRITING = set("wax+")


@dataclass
class Faults:
    """Counts the operations in `folder` from 1, and makes the one with the number `at` a fault; 0 is none.

    "kill" ends the process there; "full" is a disk that has no room from there on, but still removes files; "memory"
    counts forward passes in place of operations. `names` are the operations there were.
    """

    folder: Path
    kind: Kind = "kill"
    at: int = 0
    names: list[str] = field(default_factory=list)
    passes: int = 0

    def operation(self, name: str, half: Callable[[], object] = lambda: None, *, frees: bool = False) -> None:
        """Count an operation; where it is the fault, do `half` of it first."""
        self.names.append(name)
        number = len(self.names)
        full = self.kind == "full" and 0 < self.at <= number and not frees
        if self.kind == "memory" or (number != self.at and not full):
            return
        half()
        if self.kind == "kill":
            os._exit(KILLED)
        code = errno.EIO if self.kind == "EIO" else errno.ENOSPC
        raise OSError(code, os.strerror(code))

    def forward(self) -> None:
        """Count a forward pass."""
        self.passes += 1
        if self.kind == "memory" and self.passes == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def concerns(self, path: object) -> bool:
        """Tell whether a path, or what a descriptor is open for, is in the folder."""
        if isinstance(path, int):
            path = Path(f"/proc/self/fd/{path}").readlink()
        return Path(str(path)).absolute().is_relative_to(self.folder)


class _File:
    """A file whose writes are operations."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

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

        self._faults.operation("write", half)
        written: int = self._file.write(data)
        return written

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def truncate(self, size: int | None = None) -> int:
        self._faults.operation("truncate", frees=True)
        left: int = self._file.truncate(size)
        return left


@contextmanager
def injected(faults: Faults) -> Iterator[Faults]:
    """Let the file operations and forward passes of this process run into faults for a while."""
    opened, fsync = io.open, os.fsync

    def open_path(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not WRITING & set(mode) or not faults.concerns(path):
            return opened(path, mode, *rest, **named)
        faults.operation("open")
        return _File(opened(path, mode, *rest, **named), faults)

    def sync(descriptor: int) -> None:
        if faults.concerns(descriptor):
            faults.operation("fsync")
        fsync(descriptor)

    def counted(owner: Any, name: str, *, frees: bool) -> Any:
        before = getattr(owner, name)

        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if faults.concerns(path):
                faults.operation(name, frees=frees)
            return before(path, *rest, **named)

        return mock.patch.object(owner, name, call)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: faults.forward() if hasattr(module, "generate") else None
    )
    with (
        mock.patch.object(Path, "open", open_path),
        mock.patch.object(os, "fsync", sync),
        counted(Path, "replace", frees=False),
        counted(Path, "mkdir", frees=False),
        counted(Path, "unlink", frees=True),
        counted(Path, "rmdir", frees=True),
        counted(shutil, "rmtree", frees=True),
    ):
        try:
            yield faults
        finally:
            hook.remove()
