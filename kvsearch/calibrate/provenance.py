"""Where a file came from: versions, seed, data and settings; never a time, so that equal inputs give equal files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from kvsearch.plan import Provenance


def provenance(method: str, seed: int, data_sha256: str | None, settings: Mapping[str, Any]) -> Provenance:
    """Provenance of something made now, by this installation."""
    return Provenance(
        method=method,
        seed=seed,
        kvsearch=version("kvsearch"),
        torch=version("torch"),
        transformers=version("transformers"),
        data_sha256=data_sha256,
        settings=dict(settings),
    )
