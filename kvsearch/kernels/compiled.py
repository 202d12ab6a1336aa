"""What compiled code takes as it is: no torch is imported here, so that listings of policies answer at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Let compiled code take what a function of plain values returns for a constant, and not look into it.

    `torch.compiler.assume_constant_result` sets the same mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
