"""Valid files of every kind, to begin with: small ones, made in memory or kept in `seeds`.

Those in `seeds` are what commands wrote on the bundled model; a test says so when one is no longer read.
"""

from __future__ import annotations

from pathlib import Path

SEEDS = Path(__file__).parents[1] / "seeds"


def stored(*names: str) -> list[bytes]:
    """Return files of the folder `seeds`."""
    return [(SEEDS / name).read_bytes() for name in names]
