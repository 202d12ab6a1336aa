"""Names of what is always compared; reports need them, and nothing that runs a model."""

from __future__ import annotations

FULL = "full"  # the full cache
RANDOM = "random"  # a control
EVOLVED = "evolved"
EXPANDED = "expanded"  # the plan of the smallest budget, scaled
# start plans that are made of no other
UNIFORM = "uniform"
PYRAMID = "pyramid"
STREAMING = "streaming"
