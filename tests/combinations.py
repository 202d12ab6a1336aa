"""Products of parameters of which a few combinations are tried before every commit."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def every_value(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations: each value is in one that runs always, the others are nightly."""
    values = [list(options) for options in parameters.values()]
    longest = max(len(options) for options in values)
    always = {tuple(turn % len(options) for options in values) for turn in range(longest)}
    combinations = []
    for places in product(*(range(len(options)) for options in values)):
        chosen = [options[place] for options, place in zip(values, places, strict=True)]
        combinations.append(pytest.param(*chosen, marks=[] if places in always else [pytest.mark.nightly]))
    return pytest.mark.parametrize(tuple(parameters), combinations)
