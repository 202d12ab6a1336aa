from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.serving import interpreter


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Kernels serve CPU tensors, and memory that is not written yet is NaN."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("of the interpreter, which is for machines without a GPU: benchmarks/gpu is for those with one")
    with interpreter():
        yield
