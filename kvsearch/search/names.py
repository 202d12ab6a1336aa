"""Names of plans that searches compare; reports need them, and nothing that searches."""

from __future__ import annotations

EVOLVED = "evolved"
EXPANDED = "expanded"  # the plan of the smallest budget, scaled
UNIFORM, PYRAMID, STREAMING = "uniform", "pyramid", "streaming"  # start plans that are made of no other
