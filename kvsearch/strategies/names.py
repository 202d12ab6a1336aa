"""Names of what is always compared; reports need them, and nothing that runs a model."""

from __future__ import annotations

FULL, RANDOM = "full", "random"  # the full cache, and a control
