"""Work for items that are numbers."""

from __future__ import annotations

import warnings

from kvsearch.core.errors import KvsearchWarning
from kvsearch.models.loading import LoadedModel


def warn(_: LoadedModel, item: int) -> int:
    """Twice the item, with a warning."""
    warnings.warn(f"item {item} is doubtful", KvsearchWarning, stacklevel=2)
    return 2 * item


def stumble(_: LoadedModel, item: int) -> int:
    """A bug."""
    raise KeyError("weights")
