"""Whether one ranking is worse than another beyond chance, on few contexts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

LEVEL = 0.05
EXACT = 12  # contexts up to which all signs are tried
FLIPS = 9999


def beyond_chance(losses: Sequence[float]) -> bool:
    """Tell whether the mean of what contexts lose is above zero beyond chance, by a sign-flip test.

    If nothing is lost, what a context loses is as likely to be of either sign: the chance is the share of signs under
    which the mean is as large. Contexts are the units, as questions of one context lose alike; below five of them
    nothing is beyond chance.
    """
    values = np.array(losses, dtype=np.float64)
    if len(values) <= EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=len(values))))
    else:
        drawn = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, len(values)))
        signs = np.concatenate([np.ones((1, len(values))), drawn])
    means = signs @ values
    return bool(np.mean(means >= means[0] - 1e-12) <= LEVEL)
