"""The types of numpy arrays that functions take and return, and when numbers count as equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Vector = Floats  # of one dimension

TIE = 1e-9  # scores that differ by less are equal, but for rounding
