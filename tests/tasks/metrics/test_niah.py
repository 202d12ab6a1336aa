"""Needle in a haystack: recall of distinct words, and ROUGE-1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from tests.tasks.metrics.scoring import score

# twelve words, eleven of them distinct: "a" occurs twice
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
RECALLED = [
    (ANSWER, ANSWER, 1),
    (ANSWER.upper(), ANSWER, 1),
    ("", ANSWER, 0),
    ("   \n", ANSWER, 0),
    ("nothing", ANSWER, 0),
    ("eat", ANSWER, 1 / 11),
    ("eat eat eat", ANSWER, 1 / 11),
    ("a", ANSWER, 1 / 11),
    ("a a a", ANSWER, 1 / 11),
    ("eat a sandwich", ANSWER, 3 / 11),
    ("a sandwich eat", ANSWER, 3 / 11),
    ("Dolores Park", ANSWER, 2 / 11),
    ("dolores park", ANSWER, 2 / 11),
    ("DoloresPark", ANSWER, 0),
    ("sit in the sun on a bench and read", ANSWER, 5 / 11),  # sit in on a and
    ("on day sunny a on Park Dolores in sit and sandwich eat", ANSWER, 1),
    ("I like to " + ANSWER + " with you", ANSWER, 1),
    ("\n\neat\na\nsandwich", ANSWER, 3 / 11),
    ("eating sandwiches", ANSWER, 0),
    ("“eat”", ANSWER, 0),
    ("eat, a sandwich", ANSWER, 2 / 11),
    ("eat\u00a0a", ANSWER, 2 / 11),
    ("cat", "cat", 1),
    ("cat", "cat cat", 1),
    ("cat", ("dog", "cat"), 1),
    ("cat", ("cat dog", "cow"), 1 / 2),
    ("cat dog", ("cat dog cow owl", "cat dog cow"), 2 / 3),
    ("1,234.50", "1,234.50", 1),
    ("1234.50", "1,234.50", 0),
    ("-3", "3", 0),
    ("北京 上海", "上海", 1),
    ("北京上海", "上海", 0),
    ("上海。", "上海", 0),
    ("Straße", "STRASSE", 0),
]
STOPS = [  # reply, answer, recall, LAVa's recall
    (ANSWER, ANSWER + ".", 10 / 11, 10 / 11),  # day is not day.
    (ANSWER + ".", ANSWER + ".", 1, 10 / 11),
    (ANSWER + ".", ANSWER, 10 / 11, 1),
    (ANSWER + ". Eat!", ANSWER, 10 / 11, 1),
    ("eat.a.sandwich", ANSWER, 0, 3 / 11),
    (".", ANSWER, 0, 0),
    ("...eat...", ANSWER, 0, 1 / 11),
    ("eat。", ANSWER, 0, 0),
    ("3.5", "3.5", 1, 0),
    ("3.5", "5", 0, 1),
    ("day.", "day. day", 1 / 2, 1 / 2),
]
ROUGE = [  # expected values are 2c / (n + m), with c common stems
    (ANSWER, ANSWER, 1),
    (ANSWER.upper(), ANSWER, 1),
    (ANSWER + ".", ANSWER, 1),
    ("", ANSWER, 0),
    ("...", ANSWER, 0),
    ("nothing", ANSWER, 0),
    ("eat", ANSWER, 2 / 13),
    ("eat eat", ANSWER, 2 / 14),  # the answer has one
    ("a a", ANSWER, 4 / 14),  # and two of these
    ("eat a sandwich", ANSWER, 6 / 15),
    ("sandwich a eat", ANSWER, 6 / 15),
    ("eating sandwiches", ANSWER, 4 / 14),  # stems eat, sandwich
    ("eats", "eat", 1),
    ("ate", "eat", 0),
    ("parks", "Park", 1),
    ("days", "day", 1),
    ("its", "it", 0),  # words of three letters are not stemmed
    ("sunny", "sunnier", 0),  # stems sunni, sunnier
    ("“eat”", "eat", 1),
    ("eat,a", "eat a", 1),
    ("don't", "don t", 1),
    ("snake_case", "snake case", 1),
    ("well-known", "wellknown", 0),
    ("\n\neat", "eat", 1),
    ("cat", "cat cat", 2 / 3),
    ("cat", ("dog", "cat"), 1),
    ("cat", ("cat dog cow", "cat dog"), 2 / 3),
    ("1,234.50", "1 234 50", 1),
    ("-3", "3", 1),
    ("3.5", "5.3", 1),
    ("北京", "北京", 0),  # only a-z and digits are words
    ("café", "caf", 1),
    ("cat 北京", "cat", 1),
    ("Eat in Dolores Park", "eat a sandwich in Dolores Park", 8 / 10),
]


@pytest.mark.parametrize(("reply", "answers", "expected"), RECALLED)
def test_recall(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("niah_recall", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "answers", "expected"), [case for case in RECALLED if "." not in case[0]])
def test_recall_of_lava_without_full_stops(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("niah_recall_lava", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "answer", "expected", "of_lava"), STOPS)
def test_full_stops(reply: str, answer: str, expected: float, of_lava: float) -> None:
    assert score("niah_recall", reply, answer) == pytest.approx(expected, abs=1e-12)
    assert score("niah_recall_lava", reply, answer) == pytest.approx(of_lava, abs=1e-12)


@pytest.mark.parametrize(("reply", "answers", "expected"), ROUGE)
def test_rouge1(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("niah_rouge1", reply, answers) == pytest.approx(expected, abs=1e-12)


WORDS = st.lists(st.sampled_from(["red", "fox", "on", "a", "day."]), min_size=1, max_size=6)


@given(reply=WORDS, more=WORDS, answer=WORDS)
def test_more_words_never_lower_the_recall(reply: list[str], more: list[str], answer: list[str]) -> None:
    short = score("niah_recall", " ".join(reply), " ".join(answer))
    assert 0 <= short <= score("niah_recall", " ".join(more + reply), " ".join(answer)) <= 1


@pytest.mark.parametrize("metric", ["niah_recall", "niah_recall_lava"])
def test_an_answer_of_no_words(metric: str) -> None:
    with pytest.raises(UsageError, match="an answer is blank: there are no words to recall"):
        score(metric, "eat", " ")
