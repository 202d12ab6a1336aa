"""Whole numbers from shares in floating point, without the noise: 0.6 / 1.5 * 30 = 11.999... is twelve."""

from __future__ import annotations

import math

GUARD = 1e-9  # shares are read to nine decimals


def round_half_up(value: float) -> int:
    """Round to the nearest integer, halves upward, e.g. the entries a ratio of a length stands for."""
    return math.floor(value + 0.5 + GUARD)


def round_down(value: float) -> int:
    """Round to the integer below, e.g. the part of a budget that a share of it stands for."""
    return math.floor(value + GUARD)
