"""What compiled code takes as it is: no torch is imported here, so that listings of policies answer at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Let compiled code take what a function of plain values returns for a constant, and not look into it.

    `torch.compiler.assume_constant_result` sets the same mark; a cache cannot have it, so it goes to what calls one.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Function, call)
