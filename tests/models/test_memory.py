"""Memory: what is used by default, and what counts as having run out of it."""

from __future__ import annotations

import pytest
import torch

from kvsearch.models.memory import default_memory, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_default_memory_of_a_cpu() -> None:
    assert default_memory(torch.device("cpu")) == 8 * 2**30
    assert default_memory(torch.device("cpu"), cpu_bytes=7) == 7
