"""Products of parameters of which a few combinations are tried before every commit."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def every_value(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations: each value is in one that runs always, the others are nightly.

    Values that are nightly themselves, as `pytest.param(..., marks=pytest.mark.nightly)`, are in none of the former.
    """
    options = [list(values) for values in parameters.values()]
    usual = [[place for place, value in enumerate(values) if not _is_nightly(value)] for values in options]
    longest = max(map(len, usual))
    always = {tuple(places[turn % len(places)] for places in usual) for turn in range(longest)}
    combinations = []
    for places in product(*(range(len(values)) for values in options)):
        chosen = [_unmarked(values[place]) for values, place in zip(options, places, strict=True)]
        combinations.append(pytest.param(*chosen, marks=[] if places in always else [pytest.mark.nightly]))
    return pytest.mark.parametrize(tuple(parameters), combinations)


def _is_nightly(value: Any) -> bool:
    return isinstance(value, ParameterSet) and bool(value.marks)


def _unmarked(value: Any) -> Any:
    return value.values[0] if isinstance(value, ParameterSet) else value
