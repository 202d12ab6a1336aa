"""Answers as they stand in a reply: our own metrics and RULER's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.metrics.scoring import score

EXACT = [
    ("red fox .", "red fox .", 1),
    ("  red\nfox . and more", "red fox .", 1),
    ("red fox", "red  fox", 1),
    ("red\u00a0fox", "red fox", 1),
    ("\n\nred fox", "red fox", 1),
    ("red foxes", "red fox", 0),
    ("red fox.", "red fox", 0),
    ("the red fox", "red fox", 0),
    ("fox red", "red fox", 0),
    ("redfox", "red fox", 0),
    ("red fox", "redfox", 0),
    ("Red fox", "red fox", 0),
    ("red", "red fox", 0),
    ("", "red", 0),
    ("   ", "red", 0),
    ("red", "red", 1),
    ("red red", "red", 1),
    ("red", "red red", 0),
    ("blue cat", ("red fox", "blue"), 1),
    ("blue cat", ("cat", "fox"), 0),
    ("blue cat", ("blue dog", "blue cat"), 1),
    ("-3", "-3", 1),
    ("-3", "3", 0),
    ("3", "-3", 0),
    ("1,234.50", "1,234.50", 1),
    ("1,234.50", "1234.50", 0),
    ("42 apples", "42", 1),
    ("42.", "42", 0),
    ("“red”", "red", 0),
    ("北京 上海", "北京", 1),
    ("北京。", "北京", 0),
    ("北京上海", "北京", 0),
    ("\u3000北京", "北京", 1),
    ("Straße", "STRASSE", 0),
]
ANY = [  # for contains and for string_match_part
    ("It was the Red FOX.", "red fox", 1),
    ("It was red. A fox", "red fox", 0),
    ("a cat", ("dog", "CAT"), 1),
    ("a cat and a dog", ("dog", "cat"), 1),
    ("a cow", ("dog", "cat"), 0),
    ("", "dog", 0),
    ("dog", "dog", 1),
    ("do", "dog", 0),
    ("dogs", "dog", 1),
    ("hotdog", "dog", 1),
    ("not a dog", "dog", 1),
    ("dog", ("", "cat"), 1),  # the empty answer is in every reply
    ("", "", 1),
    ("\n\ndog\n", "dog", 1),
    ("  dog  ", "dog", 1),
    ("red  fox", "red fox", 0),
    ("“dog”", "dog", 1),
    ("dog。", "dog", 1),
    ("我在北京。", "北京", 1),
    ("北 京", "北京", 0),
    ("ÉCOLE", "école", 1),
    ("e\u0301cole", "\u00e9cole", 0),
    ("Straße", "STRASSE", 0),  # lowered, not case-folded
    ("42", "42", 1),
    ("1425", "42", 1),
    ("4 2", "42", 0),
    ("-3", "3", 1),
    ("3", "-3", 0),
    ("1,234.50", "1,234.50", 1),
    ("1234.50", "1,234.50", 0),
    ("1,234.50", "234", 1),
    ("550e8400-E29B", "550E8400-e29b", 1),
]
PART = [
    ("red\tfox", "red fox", 0),
    ("red\tfox", "red\tfox", 0),  # a tab becomes a newline
    ("red\tfox", "red\nfox", 1),
    ("red\x00fox", "redfox", 0),
    ("red\r\nfox", "red\n\nfox", 1),
    ("\x07dog\x07", "dog", 1),
    (" dog ", " dog", 0),  # the reply is stripped
    (" dog ", ("cat ", "dog"), 1),
    ("\x1f dog", " dog", 0),
    ("red\x7ffox", "red\x7ffox", 1),  # this one is kept
]
ALL = [
    ("Alpha beta", ("alpha", "BETA"), 1),
    ("alpha", ("alpha", "beta"), 1 / 2),
    ("gamma", ("alpha", "beta"), 0),
    ("", ("alpha", "beta"), 0),
    ("", "alpha", 0),
    ("alpha", "alpha", 1),
    ("alphabet", "alpha", 1),
    ("al pha", "alpha", 0),
    ("beta alpha", ("alpha", "beta"), 1),
    ("alpha alpha", ("alpha", "beta"), 1 / 2),
    ("alpha", ("alpha", "alpha"), 1),
    ("alpha", ("alpha", "alpha", "beta"), 2 / 3),
    ("1 2 3", ("1", "2", "3", "4"), 3 / 4),
    ("1234", ("1", "23", "34", "5"), 3 / 4),
    ("12", ("1", "2", "12"), 1),
    ("The numbers are 9375710, 8301824 and 1.", ("9375710", "8301824", "6"), 2 / 3),
    ("The numbers are 9375710, 8301824 and 1.", ("9375710", "8301824", "5"), 1),  # 9375710 has a 5
    ("9,375,710", "9375710", 0),
    ("-3", ("3", "-3"), 1),
    ("3", ("3", "-3"), 1 / 2),
    ("1,234.50", ("1,234.50", "1234.50"), 1 / 2),
    ("VAR XYZ = abc", ("xyz", "abc", "DEF"), 2 / 3),
    ("\n\nalpha\nbeta", ("alpha", "beta"), 1),
    ("alpha\nbeta", "alpha beta", 0),
    ("alpha\tbeta", ("alpha", "beta"), 1),
    ("alpha\tbeta", ("alpha\nbeta", "alpha\tbeta"), 1 / 2),  # control characters become newlines
    ("alp\x00ha", ("alpha", "alp"), 1 / 2),
    ("alpha\x1b[0m", ("alpha", "[0m"), 1),
    (" alpha ", (" alpha", "alpha "), 0),  # the reply is stripped
    ("alpha", ("", "beta"), 1 / 2),
    ("“alpha”，beta。", ("alpha", "beta"), 1),
    ("北京、上海", ("北京", "上海", "广州"), 2 / 3),
    ("ÀB", ("àb", "ab"), 1 / 2),
    ("550e8400-e29b", ("550E8400", "E29B", "dead"), 2 / 3),
]


@pytest.mark.parametrize(("reply", "answers", "expected"), EXACT)
def test_exact(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("exact", reply, answers) == expected


@pytest.mark.parametrize("metric", ["contains", "string_match_part"])
@pytest.mark.parametrize(("reply", "answers", "expected"), ANY)
def test_any(metric: str, reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score(metric, reply, answers) == expected


@pytest.mark.parametrize(("reply", "answers", "expected"), PART)
def test_ruler_part(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("string_match_part", reply, answers) == expected


def test_contains_takes_the_reply_as_it_is() -> None:
    assert score("contains", "red\tfox", "red\tfox") == 1
    assert score("contains", " dog ", " dog") == 1


@pytest.mark.parametrize(("reply", "answers", "expected"), ALL)
def test_ruler_all(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("string_match_all", reply, answers) == pytest.approx(expected, abs=1e-12)


@given(reply=st.text("ab \n\tAB"), answers=st.lists(st.text("ab", min_size=1), min_size=1, max_size=4).map(tuple))
def test_all_is_the_mean_and_part_the_best_of_single_answers(reply: str, answers: tuple[str, ...]) -> None:
    single = [score("string_match_part", reply, answer) for answer in answers]
    assert score("string_match_all", reply, answers) == pytest.approx(sum(single) / len(single))
    assert score("string_match_part", reply, answers) == max(single)
