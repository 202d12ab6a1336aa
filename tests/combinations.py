"""Products of parameters of which a few combinations are tried before every commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Places = tuple[int, ...]


def every_value(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test: each value is in a combination that runs always, each pair of values in one that is nightly.

    Values that are nightly themselves, as `pytest.param(..., marks=pytest.mark.nightly)`, are in none of the former.
    """
    options = [list(values) for values in parameters.values()]
    usual = [[place for place, value in enumerate(values) if not _is_nightly(value)] for values in options]
    always = list(dict.fromkeys(_turns(usual)))
    return _parametrized(parameters, options, [*always, *_others(options, always)], len(always))


def first_value(name: str | tuple[str, ...], values: Iterable[Any], usual: int = 1) -> pytest.MarkDecorator:
    """Parametrize a test: the first values run always, `usual` many, and the others are nightly."""
    sets = [ParameterSet.extract_from(value, force_tuple=isinstance(name, str)) for value in values]
    nightly = [pytest.param(*one.values, marks=pytest.mark.nightly) for one in sets[usual:]]
    return pytest.mark.parametrize(name, [*sets[:usual], *nightly])


def in_turn(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by as few combinations as have each value: for what does not hang on two values at once."""
    options = [list(values) for values in parameters.values()]
    chosen = list(_turns([list(range(len(values))) for values in options]))
    return _parametrized(parameters, options, chosen, len(chosen))


def _turns(places: list[list[int]]) -> Iterator[Places]:
    for turn in range(max(map(len, places))):
        yield tuple(some[turn % len(some)] for some in places)


def _others(options: list[list[Any]], known: list[Places]) -> Iterator[Places]:
    """Yield combinations until each pair of values is in one, those with most new pairs first."""
    seen = {pair for places in known for pair in combinations(enumerate(places), 2)}
    every = list(product(*(range(len(values)) for values in options)))
    for wanted in range(len(options) * (len(options) - 1) // 2, 0, -1):
        for places in every:
            pairs = set(combinations(enumerate(places), 2))
            if len(pairs - seen) >= wanted:
                seen |= pairs
                yield places


def _parametrized(
    parameters: dict[str, Iterable[Any]], options: list[list[Any]], chosen: list[Places], always: int
) -> pytest.MarkDecorator:
    made = []
    for number, places in enumerate(chosen):
        values = [values[place] for values, place in zip(options, places, strict=True)]
        is_nightly = number >= always or any(map(_is_nightly, values))
        made.append(pytest.param(*map(_unmarked, values), marks=[pytest.mark.nightly] if is_nightly else []))
    return pytest.mark.parametrize(tuple(parameters), made)


def _is_nightly(value: Any) -> bool:
    return isinstance(value, ParameterSet) and bool(value.marks)


def _unmarked(value: Any) -> Any:
    return value.values[0] if isinstance(value, ParameterSet) else value
