"""Numbers, letters and names of functions, as InfiniteBench reads them out of replies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from tests.tasks.metrics.scoring import score

BOOKS = ("Anna", "Ben", "Cleo", "Dora")
FUNCTIONS = ("load_rows", "parse", "merge", "close")


@pytest.mark.parametrize(
    ("metric", "reply", "answers", "right"),
    [
        ("first_integer", "71432.", "71432", True),
        ("first_integer", "the key is 71432, not 9", "71432", True),
        ("first_integer", "9 or 71432", "71432", False),
        ("first_integer", "714320", "71432", False),
        ("first_integer", "071432", "71432", False),  # as written
        ("first_integer", "none", "71432", False),
        ("first_number", "3", "3", True),
        ("first_number", "it is 3.50", "3.5", True),
        ("first_number", "3.5", "3", False),
        ("first_number", "-3", "3", True),  # signs are not read
        ("first_number", "4, then 3", "3", False),
        ("first_number", "three", "3", False),
        ("contains_word", '"key": "ab-12"', "ab-12", True),
        ("contains_word", "ab-12.", "ab-12", True),
        ("contains_word", "ab-123", "ab-12", False),
        ("contains_word", "AB-12", "ab-12", False),
    ],
)
def test_what_is_read_out_of_a_reply(metric: str, reply: str, answers: str, right: bool) -> None:
    assert score(metric, reply, answers) == right


def test_an_answer_that_is_no_number() -> None:
    with pytest.raises(UsageError, match="the answer 'three' is not a number"):
        score("first_number", "3", "three")


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("C", True),
        ("C. Cleo", True),
        ("A or rather C", True),  # the last letter that stands alone
        ("C, not A", True),  # it is wrong: then the first one counts
        ("A", False),
        ("Cleo", True),  # begins with the letter
        ("Ben", False),
        ("the answer is: C", True),
        ("the answer is C", True),
        ("the answer is: Cleo", True),
        ("The answer: Dora", False),
        ("the answer is:", False),
        ("it must be\nC\nas said", True),
        ("I do not know", False),
        ("", False),
        ("  ", False),
        ("c", False),
    ],
)
def test_a_letter_is_chosen(reply: str, right: bool) -> None:
    assert score("choice", reply, "Cleo", BOOKS) == right


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("B", True),
        ("B.", True),
        ("parse", True),
        ("`parse` fails", False),  # a blank takes the quote's place, and the reply no longer begins with the name
        ("Option B", True),
        ("the answer is: parse", True),
        ("the correct option is: B", True),
        ("the function with the error is: close", False),
        ("it is parse", False),  # no cue before it
        ("A", False),
        ("merge and parse", False),
        ("(B) I think", False),  # the official scorer looks for a letter from A to J, and this one is I
        ("B, I think", True),  # the reply begins with the letter
        ("", False),
    ],
)
def test_a_function_is_chosen(reply: str, right: bool) -> None:
    assert score("choice_of_function", reply, "parse", FUNCTIONS) == right


@given(reply=st.text(alphabet="ABCD answeris:.\n", max_size=20), right=st.sampled_from(BOOKS))
def test_at_most_one_option_is_chosen_by_a_single_letter(reply: str, right: str) -> None:
    """A reply with one letter in it is right for one option at most."""
    if sum(letter in reply for letter in "ABCD") == 1:
        assert sum(score("choice", reply, book, BOOKS) for book in BOOKS) <= 1


@pytest.mark.parametrize("options", [(), ("Cleo",), ("Anna", "Ben"), (*BOOKS, "Cleo")])
@pytest.mark.parametrize("metric", ["choice", "choice_of_function"])
def test_questions_without_such_options(metric: str, options: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="the answer must be one of 2 to 4 options, got Cleo"):
        score(metric, "C", "Cleo", options)


def test_characters_of_chinese() -> None:
    assert score("character_f1_zh", "李四。", "李四") == 1
    assert score("character_f1_zh", "是李 四！", "李四") == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
    assert score("character_f1_zh", "王五", ("张三", "王二")) == 0.5
    assert score("character_f1_zh", "，", "李四") == 0


def test_summaries_are_compared_line_by_line() -> None:
    """Union of the longest common subsequences over the answer's lines: here all of its words."""
    assert score("rouge_l_sum", "the cat sat\na dog ran", "a dog ran\nthe cat sat") == 1
    assert score("rouge_l_sum", "the cat sat a dog ran", "a dog ran the cat sat") == pytest.approx(0.5)
    assert score("rouge_l_sum", "cats", "cat") == 0  # no stemming
    assert score("rouge_l_sum", "x", ("y", "x")) == 1
