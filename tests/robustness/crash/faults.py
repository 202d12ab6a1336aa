"""Faults in the layer of files, and in forward passes: the n-th operation fails, does less, or is the last one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tests.robustness.operations import FREES, Watch

Kind = Literal["kill", "ENOSPC", "EIO", "full", "short", "memory"]
KINDS: tuple[Kind, ...] = ("kill", "ENOSPC", "EIO", "full", "short", "memory")
KILLED = 137


@dataclass
class Faults(Watch):
    """Makes the operation with the number `at` a fault; 0 is none.

    "kill" ends the process there; ENOSPC and EIO are errors of that operation alone, "full" is a disk that has no room
    from there on, but still removes files; a write that fails has written half of its bytes. "short" writes half
    without an error, as the system may; "memory" counts forward passes in place of operations.
    """

    kind: Kind = "kill"
    at: int = 0

    def operation(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        super().operation(name)
        number = len(self.names)
        full = self.kind == "full" and 0 < self.at <= number and can_be(name, "full")
        if self.kind in ("memory", "short") or (number != self.at and not full):
            return
        half()
        if self.kind == "kill":
            os._exit(KILLED)
        code = errno.EIO if self.kind == "EIO" else errno.ENOSPC
        raise OSError(code, os.strerror(code))

    def shortened(self, data: Any) -> Any:
        is_fault = self.kind == "short" and len(self.names) == self.at
        return data[: max(1, len(data) // 2)] if is_fault else data

    def forward(self) -> None:
        super().forward()
        if self.kind == "memory" and self.passes == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def can_be(name: str, kind: Kind) -> bool:
    """Tell whether an operation of that name can have such a fault."""
    if kind in ("ENOSPC", "full"):
        return name not in (*FREES, "flock", "chmod")
    return name == "write" if kind == "short" else True
