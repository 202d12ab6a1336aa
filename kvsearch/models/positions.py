"""How many positions a model has, and what is longer than that."""

from __future__ import annotations

import warnings
from typing import Any

from kvsearch.errors import IncompatibleError, KvsearchWarning
from kvsearch.models.architecture import describe


def check_length(model: Any, tokens: int) -> None:
    """Raise an IncompatibleError if a prompt of so many tokens leaves the model no position for a reply."""
    limit = describe(model).max_positions
    if limit and tokens >= limit:
        raise IncompatibleError(f"a context has {tokens} tokens, the model takes at most {limit}: shorten it")


def warn_beyond(model: Any, tokens: int) -> None:
    """Warn if a sequence of so many tokens, evicted ones counted, is longer than the model has positions for."""
    limit = describe(model).max_positions
    if limit and tokens > limit:
        problem = f"{tokens} tokens have passed, evicted ones counted, and the model has positions for {limit}"
        warnings.warn(f"{problem}: what it says beyond them is not to be relied on", KvsearchWarning, stacklevel=3)
