"""Canonical JSON: equal content, equal bytes; readable; refuses what JSON cannot hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.plan import canonical_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def shuffled(value: Any) -> Any:
    """The same content with every dictionary in reverse order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(VALUES)
def test_reads_back_as_the_same_value_whatever_the_order(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(shuffled(value)) == data
    assert data.endswith(b"\n")


def test_layout_is_fixed() -> None:
    data = canonical_json({"b": [1, 2.5], "a": {"é": [], "d": {}}, "c": [{"x": None}, "y"], "t": (True,)})
    assert data.decode() == (
        '{\n  "a": {\n    "d": {},\n    "é": []\n  },\n  "b": [1, 2.5],\n'
        '  "c": [\n    {\n      "x": null\n    },\n    "y"\n  ],\n  "t": [true]\n}\n'
    )


def test_long_lists_take_a_line_per_number() -> None:
    lines = canonical_json({"a": list(range(1000, 1040))}).decode().splitlines()
    assert len(lines) == 44
    assert lines[2] == "    1000,"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(UsageError, match=r"at a\.1\.b: JSON has finite numbers only"):
        canonical_json({"a": [0, {"b": value}]})


def test_refuses_surrogates() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        canonical_json("\udc00")
