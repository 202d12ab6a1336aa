"""The page: one file that needs nothing else, in which all that is printed is data."""

from __future__ import annotations

import re

import pytest

from kvsearch.report.page.page import is_ours
from tests.report.page.builders import HOSTILE, hostile_page, page
from tests.report.page.test_markup import Reader


@pytest.fixture(scope="module")
def hostile() -> str:
    return hostile_page().decode()


def test_nothing_hostile_becomes_markup(hostile: str) -> None:
    read = Reader(hostile)
    assert [name for name, _ in read.found].count("script") == 1
    assert "img" not in {name for name, _ in read.found}
    assert not {key for _, found in read.found for key in found if key.startswith("on")}
    assert "{{ 7 * 7 }}" in read.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", hostile)
    assert hostile.count("\\u202e") > 30
    assert HOSTILE.split("\u202e")[0] in read.text


def test_a_policy_allows_our_script_and_style_and_nothing_from_anywhere(hostile: str) -> None:
    found = Reader(hostile).found
    (policy,) = (one["content"] or "" for _, one in found if one.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    links = [one.get(name) or "" for _, one in found for name in ("href", "src") if name in one]
    assert {link[:1] if link.startswith("#") else link.split(",")[0].split(";")[0] for link in links} == {
        "#", "data:", "data:text/csv",
    }  # fmt: skip


def test_names_of_places_are_unique(hostile: str) -> None:
    found = [one["id"] for _, one in Reader(hostile).found if "id" in one]
    assert len(found) == len(set(found)) > 6
    links = [one.get("href") or "" for _, one in Reader(hostile).found]
    assert {link[1:] for link in links if link.startswith("#")} <= set(found)


def test_a_page_of_a_large_model_is_small_and_always_the_same() -> None:
    made = page()
    assert len(made) < 400_000
    assert made == page()


def test_a_page_is_known_as_ours(hostile: str) -> None:
    assert is_ours(hostile.encode())
    assert not is_ours(b"<!doctype html><html><head><title>kvsearch report</title>")
