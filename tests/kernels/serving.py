"""Kernels serve CPU tensors, and memory that is not written yet is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvsearch.kernels.dispatch import interpreted


@contextmanager
def interpreter() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        with interpreted():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
