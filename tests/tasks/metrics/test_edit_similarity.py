"""Similarity of lines of code. Expected values are 2c / T in whole percent: c characters of the longest common
subsequence (for difflib: of the matching blocks), T characters of both lines.
"""

from __future__ import annotations

import difflib

import pytest
from fuzzywuzzy import fuzz
from fuzzywuzzy.StringMatcher import StringMatcher
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.metrics.scoring import score

BOTH = [
    ("return x", "return x", 1),
    ("", "", 1),
    ("", "x", 0),
    ("x", "", 0),
    ("a", "b", 0),
    ("X", "x", 0),
    (" ", " ", 1),
    ("\t", "    ", 0),
    ("# comment", "x", 0),  # nothing but a comment: an empty line
    ("# comment", "", 1),
    ("# one\n// two\n`three`", "x", 0),
    ("# comment\nreturn x", "return x", 1),
    ("// comment\nreturn x", "return x", 1),
    ("```python\nreturn x\n```", "return x", 1),
    ("return x # why", "return x", 0),  # the line is left out, not its comment
    ("a // b", "a // b", 0),
    ("a / b", "a / b", 1),
    ("`x`", "x", 0),
    ("url = 'http://x'\ny", "y", 1),
    ("\n\nreturn x", "return x", 1),
    ("\n \nreturn x", "return x", 0.22),  # a line of one blank: 2 / 9
    ("  return x", "return x", 0.89),  # 16 / 18
    ("return y", "return x", 0.88),  # 14 / 16 is 87.5, and half goes to even
    ("return x\nreturn y", "return y", 0.88),  # the first line
    ("return x\r\nfoo", "return x", 0.94),  # 16 / 17
    ("abcd", "bcda", 0.75),
    ("ab", "ba", 0.5),
    ("abc", "abcabc", 0.67),
    ("kitten", "sitting", 0.62),  # ittn: 8 / 13
    ("foo(a, b)", "foo(b, a)", 0.78),  # 14 / 18
    ("数据 = 1", "数据 = 2", 0.83),  # 10 / 12
    ("int x = 3;", "int x = -3;", 0.95),  # 20 / 21
    ("1,234.50", "1234.50", 0.93),  # 14 / 15
    ("return x", ("x", "return x"), 1),
    ("return x", ("xyz", "return y"), 0.88),
]
APART = [  # reply, answer, edit similarity, by difflib
    ("abc1x2y3z4", "1p2q3r4abc", 0.4, 0.3),  # 1234, but difflib takes the block abc first
    ("x" * 39 + "a", "a" + "y" * 39, 0.03, 0.02),  # 2.5%: floating point makes it a little more for the one
    ("b" + "a" * 199, "a" * 200, 1, 0),  # 99.5%, half to even; a character that is all of a long answer is noise
    ("b" + "a" * 198, "a" * 199, 0.99, 0.99),  # 396 / 398; the answer is not long
    ("a" * 199 + "b", "a" * 200, 1, 1),  # the common beginning is found all the same
]


@pytest.mark.parametrize("metric", ["edit_similarity", "edit_similarity_difflib"])
@pytest.mark.parametrize(("reply", "answers", "expected"), BOTH)
def test_cases(metric: str, reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score(metric, reply, answers) == expected


@pytest.mark.parametrize(("reply", "answer", "expected", "by_difflib"), APART)
def test_the_two_are_not_the_same(reply: str, answer: str, expected: float, by_difflib: float) -> None:
    assert score("edit_similarity", reply, answer) == expected
    assert score("edit_similarity_difflib", reply, answer) == by_difflib


LINE = st.text("abc(=) x", max_size=30)


@pytest.mark.parametrize(
    ("metric", "matcher"),
    [("edit_similarity", StringMatcher), ("edit_similarity_difflib", difflib.SequenceMatcher)],
)
@given(line=LINE, answer=LINE)
def test_fuzzywuzzy_is_the_definition(metric: str, matcher: type, line: str, answer: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "SequenceMatcher", matcher)  # with python-Levenshtein installed, and without
        assert score(metric, line, answer) == fuzz.ratio(line, answer) / 100


@given(line=LINE, answer=LINE)
def test_difflib_is_never_higher(line: str, answer: str) -> None:
    assert score("edit_similarity_difflib", line, answer) <= score("edit_similarity", line, answer)
