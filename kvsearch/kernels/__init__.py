"""Triton kernels for CUDA devices: what decoding and scoring would else do in many launches, or in more memory.

`dispatch` says whether a call is served; callers keep PyTorch's own path for all that is not. Modules under `jit` hold
the code that runs on the device, the modules here what allocates, chooses blocks and launches.

No torch is imported here, so that listings of policies answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Mark a function of plain values as constant for `torch.compile`, which then does not trace it.

    `torch.compiler.assume_constant_result` sets the same mark; a cache cannot have it, so it goes to what calls one.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Function, call)
