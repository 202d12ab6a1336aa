from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.kernels.serving import interpreter


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels serve CPU tensors, and memory that is not written yet is NaN; where a GPU is, they run there."""
    pytest.importorskip("triton")
    if torch.cuda.is_available() and request.node.get_closest_marker("cuda") is None:
        pytest.skip("of the interpreter, which is for machines without a GPU: test_on_device.py is for those with one")
    with nullcontext() if torch.cuda.is_available() else interpreter():
        yield
