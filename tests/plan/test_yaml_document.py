"""The one reader of YAML: what is read is what JSON could say, and everything else is one line with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from kvsearch.plan.limits import MOST_NESTING, MOST_NUMBER, MOST_YAML
from kvsearch.plan.yaml_document import parse_yaml, read_yaml

BILLION = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" * 1500, "line 1: brackets are nested too deeply"),
        ("{a: " * 1500, "line 1: brackets are nested too deeply"),
        ("- " * 1500 + "x", "line 1: brackets are nested too deeply"),
        ('policy: !!int ""', "line 1: '' is no number in base 10"),
        ("a: 1\nb: !!bool x", "line 2: 'x' is neither true nor false"),
        ("a: !!float x", "line 1: 'x' is no number"),
        ("a: !!null x", "line 1: 'x' is not null"),
        ("a: !!python/object/apply:os.system [x]", "line 1: the tag 'tag:yaml.org,2002:python/object/apply:os.sys"),
        ("a: !!binary x", "line 1: the tag 'tag:yaml.org,2002:binary' is not read"),
        ("a: ! 6", "line 1: the tag '!' is not read"),
        ("!!set {a, b}", "line 1: the tag 'tag:yaml.org,2002:set' is not read"),
        ("!!timestamp 2024-01-01", "line 1: the tag "),
        ("\na: " + "7" * 5000, "line 2: '7777777"),
        (f"a: -{MOST_NUMBER + 1}", f"line 1: '-{MOST_NUMBER + 1}' is too large: {MOST_NUMBER} is the most"),
        ("a: 010", "line 1: '010' is no number in base 10"),
        ("a: 1:30", "line 1: '1:30' is no number in base 10"),
        ("a: 1:30.5", "line 1: '1:30.5' is no number in base 10"),
        ("a: 0x1F", "line 1: '0x1F' is no number in base 10"),
        (BILLION, "line 1: the anchor &a is not read: remove it, and write out its aliases"),
        ("&a b: 1", "line 1: the anchor &a is not read"),
        ("a: 1\nb: *a", "line 2: the alias *a is not read: write out what it stands for"),
        ("*a : 1", "line 1: the alias *a is not read"),
        ("a: 1\n--- \nb: 2", "line 2: another document begins here"),
        ("a: [1,\n\n", "line 1: "),
        ("a: 1\nb: \x07", "line 2: "),
        ('a: "\\ud800"', "line 1: "),
        ("a: b: c", "line 1: "),
        ("%YAML 9.9\n---\na: 1", "line 1: "),
        ("\ta: 1", "line 1: "),
        ("!<tag:x,y> 1", "line 1: the tag 'tag:x,y' is not read"),
        ("? " * 100 + "x", "line 1: "),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_on_one_line(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml is not valid YAML at {what}")
    assert "\n" not in str(caught.value)


def test_keys_given_twice_are_told_with_the_others(tmp_path: Path) -> None:
    document = parse_yaml("a: 1\nb: {c: 2, c: 3}\na: 4\n[x]: 1", "mine.yaml")
    assert document.data == {"a": 1, "b": {"c": 2}}
    (tmp_path / "r.yaml").write_text("a: 1\nb: {c: 2, c: 3}\na: 4\n[x]: 1")
    with pytest.raises(UsageError) as caught:
        read_yaml(tmp_path / "r.yaml")
    assert str(caught.value).split("\n  ")[1:] == [
        "line 2: b.c: is given twice: remove one",
        "line 3: a: is given twice: remove one",
        "line 4: the whole: a key must be a word or number",
    ]


def test_very_many_problems_end_early() -> None:
    document = parse_yaml("a: 1", "mine.yaml")
    with pytest.raises(UsageError, match="200 problems"):
        for number in range(10**6):
            document.tell(("a",), str(number))


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"- 1\n" * (MOST_YAML // 4 + 1))
    with pytest.raises(UsageError, match=f"is larger than the {MOST_YAML} bytes"):
        read_yaml(tmp_path / "large.yaml")
    with pytest.raises(UsageError, match="/dev/zero is a device"):
        read_yaml("/dev/zero")
    with pytest.raises(UsageError, match="is too long for YAML"):
        parse_yaml("#" * (MOST_YAML + 1), "mine.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-2", -2), ("+3", 3), ("1_000", 1000), ("0", 0), ("1.5", 1.5), (".5", 0.5), ("1.0e+3", 1000.0),
        ("yes", True), ("off", False), ("~", None), ("null", None), ("", None), ("2024-13-45", "2024-13-45"),
        ("1e3", "1e3"), ("=", "="), ("'1'", "1"), ('"yes"', "yes"), ("!!str 5", "5"), ("!!int 7", 7),
        ("!!float 7", 7.0), ("!!map {b: 1}", {"b": 1}), ("!!seq [1]", [1]),
    ],
)  # fmt: skip
def test_plain_words(text: str, value: Any) -> None:
    found = parse_yaml(f"a: {text}", "x").data["a"]
    assert (found, type(found)) == (value, type(value))


def test_keys_are_texts_and_places_have_lines() -> None:
    assert parse_yaml("", "x").data is None
    assert parse_yaml("1: {~: x, yes: y}", "x").data == {"1": {"~": "x", "yes": "y"}}
    assert parse_yaml("a:\n- b: 1\n- c", "x").lines[("a", 1)] == 3


WORDS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=6)
PLAIN = st.none() | st.booleans() | st.integers(-MOST_NUMBER, MOST_NUMBER) | WORDS
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


@given(VALUES)
def test_what_json_says_yaml_says_too(value: Any) -> None:
    assert parse_yaml(json.dumps(value), "x").data == value


@given(st.text(max_size=40) | st.text("[]{}:-?!&*|>'\"%@`#,. \n\t09axe~<=", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, "x")
    except UsageError as error:
        assert "\n" not in str(error)


def test_the_deepest_nesting() -> None:
    text = "[" * MOST_NESTING + "]" * MOST_NESTING
    assert parse_yaml(text, "x").data == json.loads(text)
    with pytest.raises(UsageError, match="64 are the most"):
        parse_yaml(f"[{text}]", "x")
