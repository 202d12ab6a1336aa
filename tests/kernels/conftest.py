from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvsearch.kernels.dispatch import interpreted


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Kernels serve CPU tensors, and memory that is not written yet is NaN."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the tests with device cuda run the kernels themselves")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    with interpreted():
        yield
    torch.use_deterministic_algorithms(before)
