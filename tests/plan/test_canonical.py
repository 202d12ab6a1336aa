"""Canonical JSON: equal content, equal bytes; readable; refuses what JSON cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.core.limits import MOST_NUMBER, MOST_YAML
from kvsearch.core.yaml_document import YamlDocument, read_yaml
from kvsearch.plan import canonical_json
from tests.examples import at_most

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def shuffled(value: Any) -> Any:
    """The same content with every dictionary in reverse order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@at_most(15)
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


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(UsageError, match=r"at a\.1\.b: JSON has finite numbers only"):
        canonical_json({"a": [0, {"b": value}]})


BILLION = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: !!python/object/apply:os.system [x]", " at line 1: the tag 'tag:yaml.org,2002:python/object/apply:os.sys"),
        ("!!set {a, b}", " at line 1: the tag 'tag:yaml.org,2002:set' is not read"),
        (BILLION, " at line 2: the alias *a is not read"),
        ("a: 1\n[x]: 1", " at line 2: a key must be a word or number"),
        ("a: 1\nb: {c: 2, c: 3}", " at line 2: the key 'c' is given twice: remove one"),
        ("a: 1\n--- \nb: 2", " at line 2: but found another document"),
        ("[" * 400, ": maximum recursion depth"),
        ("\na: " + "7" * 5000, ": Exceeds the limit"),
        ("a: .inf", ": a number in it is NaN or infinite"),
    ],
)
def test_what_is_refused_is_said_on_one_line(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        YamlDocument(text, "mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml is not valid YAML{what}")
    assert "\n" not in str(caught.value)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"- 1\n" * (MOST_YAML // 4 + 1))
    with pytest.raises(UsageError, match=f"is larger than the {MOST_YAML} bytes"):
        read_yaml(tmp_path / "large.yaml")
    with pytest.raises(UsageError, match="/dev/zero is a device"):
        read_yaml("/dev/zero")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-2", -2), ("+3", 3), ("1_000", 1000), ("0", 0), ("1.5", 1.5), (".5", 0.5), ("1.0e+3", 1000.0),
        ("yes", True), ("off", False), ("~", None), ("null", None), ("", None), ("2024-13-45", "2024-13-45"),
        ("1e3", "1e3"), ("=", "="), ("'1'", "1"), ('"yes"', "yes"), ("!!str 5", "5"), ("!!int 7", 7),
        ("!!float 7", 7.0), ("&a 1", 1),
    ],
)  # fmt: skip
def test_plain_words(text: str, value: Any) -> None:
    found = YamlDocument(f"a: {text}", "x").data["a"]
    assert (found, type(found)) == (value, type(value))


def test_keys_are_texts_and_places_have_lines() -> None:
    assert YamlDocument("", "x").data is None
    assert YamlDocument("1: {~: x, yes: y}", "x").data == {"1": {"~": "x", "yes": "y"}}
    assert YamlDocument("a:\n- b: 1\n- c", "x").lines[("a", 1)] == 3


WORDS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=6)
PLAIN = st.none() | st.booleans() | st.integers(-MOST_NUMBER, MOST_NUMBER) | WORDS
YAML_VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


@given(YAML_VALUES)
def test_what_json_says_yaml_says_too(value: Any) -> None:
    assert YamlDocument(json.dumps(value), "x").data == value


@given(st.text(max_size=40) | st.text("[]{}:-?!&*|>'\"%@`#,. \n\t09axe~<=", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        YamlDocument(text, "x")
    except UsageError as error:
        assert "\n" not in str(error)
