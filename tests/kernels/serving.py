"""Kernels serve CPU tensors, and memory that is not written yet is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from kvsearch.kernels.dispatch import Interpreter


def interpreted(serve: bool = True) -> AbstractContextManager[Any]:
    """Let kernels serve CPU tensors, in Triton's interpreter, for a while; or not, where they do."""
    from triton import knobs

    assert knobs.runtime.interpret, "TRITON_INTERPRET=1 must be set before Triton is imported"
    return patch.object(Interpreter, "serves", serve)


@contextmanager
def interpreter() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        with interpreted():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
