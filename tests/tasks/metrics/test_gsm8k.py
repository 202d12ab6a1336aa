"""The final number of a solution, read correctly and as the published scorer reads it."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from tests.tasks.metrics.scoring import score

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72.\n#### 72"
CASES = [  # reply, answers, correct, official
    ("42", "42", 1, 1),
    ("The answer is 42.", "42", 1, 1),
    ("The answer is 42.", "#### 42", 1, 1),
    ("She sold 72 clips.", SOLUTION, 1, 1),
    ("She sold 24 clips.", SOLUTION, 0, 0),
    ("", "42", 0, 0),
    ("forty-two", "42", 0, 0),
    ("...", "42", 0, 0),
    ("41, then 42", "42", 1, 1),
    ("42, then 43", "42", 0, 0),
    ("42\n\n", "42", 1, 1),
    ("\n\n42", "42", 1, 1),
    ("$42", "42", 1, 1),
    ("42%", "42", 1, 1),
    ("**42**", "42", 1, 1),
    ("\\boxed{42}", "42", 1, 1),
    ("答案是42。", "42", 1, 1),
    ("42 (forty-two)", "42", 1, 1),
    ("40 + 2 = 42", "42", 1, 1),
    ("x=42", "42", 1, 1),
    ("42", ("41", "42"), 1, 1),
    ("40", ("41", "42"), 0, 0),
    ("0", "0", 1, 1),
    ("00", "0", 1, 1),
    # thousands
    ("1,000", "1000", 1, 0),  # 000 is 0
    ("1,000", "1,000", 1, 0),
    ("1000", "#### 1,000", 1, 1),
    ("$1,234,567.", "1234567", 1, 0),
    ("1,005", "1005", 1, 0),  # 005 is no number
    ("1,005", "5", 0, 0),
    ("1,000", "0", 0, 1),
    ("1,234", "234", 0, 1),
    ("10, 20", "20", 1, 1),
    ("10,20", "20", 1, 1),
    # decimals
    ("18.50", "18.5", 1, 0),
    ("18.50", "50", 0, 1),
    ("18.00", "18", 1, 0),
    ("1,234.50", "1234.5", 1, 0),
    (".5", "0.5", 1, 0),
    ("0.5", "5", 0, 1),
    ("3.05", "3.05", 1, 0),
    ("2.5", "2.5", 1, 0),
    ("42.0", "42", 1, 0),
    ("42.", "42.", 1, 1),
    # signs
    ("-3", "-3", 1, 0),
    ("-3", "3", 0, 1),
    ("3", "-3", 0, 0),
    ("\u22123", "-3", 1, 0),
    ("-$3", "-3", 1, 0),
    ("$-3", "-3", 1, 0),
    ("-1,234.50", "-1234.50", 1, 0),
    ("10-3", "3", 1, 1),  # minus, not a sign
    ("x-3", "3", 1, 1),
    ("(2)-3", "3", 1, 1),
    ("= -3", "-3", 1, 0),
    ("2 - 3", "3", 1, 1),
    ("-0", "0", 1, 1),
    # what follows the marker
    ("#### 42", "42", 1, 1),
    ("####42", "42", 1, 1),
    ("6*7\n#### 42\n\nQuestion: 3 cats have", "42", 1, 0),
    ("6*7\r\n#### 42\r\nQuestion: 3", "42", 1, 0),
    ("#### $42.\nThat is 7 a day.", "42", 1, 0),
    ("#### -3\n\n1", "-3", 1, 0),
    ("#### $-3", "-3", 1, 0),
    ("#### 1,234.50", "1234.5", 1, 0),
    ("#### 1. Add\nIt is 42.", "42", 1, 1),  # a heading
    ("#### Step 1\nIt is 42.", "42", 1, 1),
    ("#### 41\n#### 42", "41", 1, 0),  # the first
    # digits that are no numbers of their own
    ("42 m2", "42", 1, 0),
    ("42 cm^2", "42", 1, 0),
    ("42 in version 3.14.15", "3.14", 1, 0),
    ("٤٢", "42", 0, 0),
    ("42 ٤", "42", 1, 0),
    ("42 or 007", "7", 1, 0),
]


@pytest.mark.parametrize(("reply", "answers", "correct", "official"), CASES)
def test_final_number(reply: str, answers: str | tuple[str, ...], correct: float, official: float) -> None:
    assert (score("gsm8k", reply, answers), score("gsm8k_official", reply, answers)) == (correct, official)


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "It is {}.", "${:,}", "9 + {:,}", "#### {:,}\n8"]))
def test_integers_in_any_form(number: int, form: str) -> None:
    assert score("gsm8k", form.format(number), str(number)) == 1
    assert score("gsm8k", form.format(number), str(number + 1)) == 0


@given(st.decimals(-(10**6), 10**6, places=2), st.sampled_from(["{}", "{:,}", "= {:,} dollars."]))
def test_decimals_in_any_form(number: Decimal, form: str) -> None:
    assert score("gsm8k", form.format(number), str(number)) == 1


@given(st.integers(0, 10**9))
def test_the_official_scorer_reads_plain_integers(number: int) -> None:
    assert score("gsm8k_official", f"The answer is {number}.", f"#### {number:,}") == 1


def test_very_long_runs_of_digits() -> None:
    assert score("gsm8k", "9" * 5000, "9") == 0
    assert score("gsm8k_official", "9" * 5000, "9") == 0


@pytest.mark.parametrize("answer", ["", "many", "####", "#### many"])
def test_answers_without_a_number(answer: str) -> None:
    with pytest.raises(UsageError, match="has no number"):
        score("gsm8k", "42", answer)
    with pytest.raises(UsageError, match="is no number, nor a solution that ends in one after '#### '"):
        score("gsm8k_official", "42", answer)


@pytest.mark.parametrize("answer", ["1.2.3", "It is 42", "...", "#### 007"])
def test_answers_that_the_official_scorer_cannot_read(answer: str) -> None:
    with pytest.raises(UsageError, match="is no number"):
        score("gsm8k_official", "42", answer)
