"""Classes, numbers of paragraphs, and the first line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.errors import UsageError
from kvsearch.tasks.metrics import first_line
from tests.tasks.metrics.scoring import score

KINDS = ("animal", "food", "sport", "food animal")
NESTED = ("food", "food animal")
CLASSIFIED = [
    ("food", "food", KINDS, 1),
    ("", "food", KINDS, 0),
    ("nothing", "food", KINDS, 0),
    ("Food", "food", KINDS, 0),
    (" food ", "food", KINDS, 1),
    ("seafood", "food", KINDS, 1),
    ("sport", "food", KINDS, 0),
    ("food", "meal", KINDS, 0),  # an answer that is no class
    ("food sport", "food", KINDS, 1 / 2),
    ("food sport", "sport", KINDS, 1 / 2),
    ("not food, but sport", "sport", KINDS, 1 / 2),
    ("food\nsport", "food", KINDS, 1 / 2),
    ("\n\nfood", "food", KINDS, 1),
    ("animal, food? sport", "food", ("animal", "food", "sport"), 1 / 3),
    ("food animal", "food", KINDS, 1 / 3),  # animal, food, food animal: none is part of "food"
    ("food animal", "animal", KINDS, 1 / 3),
    ("food animal", "food animal", NESTED, 1),  # food is part of the answer
    ("food animal", "food animal", NESTED[::-1], 1),
    ("food animal", "food", NESTED, 1 / 2),
    ("food animal", "food", NESTED[::-1], 1 / 2),
    ("food animal", "food animal", KINDS, 1 / 2),  # animal is removed, and food after it skipped
    ("food animal", "food animal", ("food animal", "food", "animal"), 1 / 2),  # the same, at the end
    ("food animal", "food animal", ("animal", "food animal", "food"), 1),  # not in a row: both are removed
    ("sport: food animal", "food animal", ("animal", "sport", "food", "food animal"), 1 / 2),  # sport is skipped
    ("a b c", "a b c", ("a", "b", "c", "a b c"), 1 / 2),  # b is skipped
    ("a b c d", "a b c d", ("a", "b", "c", "d", "a b c d"), 1 / 3),  # b and d are
    ("animal food", "food animal", KINDS, 0),
    ("sports", "sports", ("sport", "sports"), 1),
    ("sports", "sport", ("sport", "sports"), 1 / 2),
    ("food", "food", ("food", "food"), 1 / 2),  # a class listed twice counts twice
    ("food", "food", ("", "food"), 1),
    ("sport", ("food", "sport"), KINDS, 1),
    ("food sport", ("food", "animal"), KINDS, 1 / 2),
    ("农业、农村", "农业、农村", ("农业、农村", "农业", "军事"), 1),
    ("农业、农村", "军事", ("农业、农村", "农业", "军事"), 0),
    ("类别：军事。", "军事", ("农业、农村", "农业", "军事"), 1),
]
RETRIEVED = [
    ("Paragraph 12", "Paragraph 12", 1),
    ("12", "Paragraph 12", 1),
    ("", "Paragraph 12", 0),
    ("none", "Paragraph 12", 0),
    ("twelve", "Paragraph 12", 0),
    ("Paragraph 1", "Paragraph 12", 0),
    ("Paragraph 120", "Paragraph 12", 0),
    ("Paragraph 012", "Paragraph 12", 0),
    ("Paragraph12", "Paragraph 12", 1),
    ("12th", "Paragraph 12", 1),
    ("x12y", "Paragraph 12", 1),
    ("-12", "Paragraph 12", 1),
    ("\n\nParagraph 12", "Paragraph 12", 1),
    ("12 or 13", "Paragraph 12", 1 / 2),
    ("12, 12", "Paragraph 12", 1),
    ("12, 13, 14", "Paragraph 12", 1 / 3),
    ("12 12 12 7", "Paragraph 12", 3 / 4),
    ("Paragraph 12\nParagraph 30", "Paragraph 12", 1 / 2),
    ("It is Paragraph 12. Paragraph 12 is about 3 cats.", "Paragraph 12", 2 / 3),
    ("12.5", "Paragraph 12", 1 / 2),
    ("1,212", "Paragraph 12", 0),
    ("1,12", "Paragraph 12", 1 / 2),
    ("１２", "Paragraph 12", 0),  # digits, but not as written
    ("12 １３", "Paragraph 12", 1 / 2),
    ("٣ 12", "Paragraph 12", 1 / 2),
    ("12²", "Paragraph 12", 1),  # a superscript is no digit
    ("12", ("Paragraph 3", "Paragraph 12"), 1),
    ("3 12", ("Paragraph 3", "Paragraph 12"), 1 / 2),
    ("12", "Paragraph 12 and Paragraph 13", 1),
    ("13", "Paragraph 12 and Paragraph 13", 0),  # the first is meant
    ("0", "Paragraph 0", 1),
    ("7", "see Paragraph 007", 0),
    ("007", "see Paragraph 007", 1),
]
RETRIEVED_CHINESE = [
    ("段落12", "段落12", 1),
    ("12", "段落12", 1),
    ("", "段落12", 0),
    ("没有", "段落12", 0),
    ("段落十二", "段落12", 0),
    ("段落1", "段落12", 0),
    ("段落120", "段落12", 0),
    ("段落012", "段落12", 0),
    ("段落 12", "段落12", 1),
    ("第12段", "段落12", 1),
    ("12。", "段落12", 1),
    ("答案：段落12", "段落12", 1),
    ("\n段落12", "段落12", 1),
    ("-12", "段落12", 1),
    ("Paragraph 12", "段落12", 1),
    ("段落１２", "段落12", 0),  # digits, but not as written
    ("段落12和段落13", "段落12", 1 / 2),
    ("段落12，段落12", "段落12", 1),
    ("12、13、14", "段落12", 1 / 3),
    ("段落12段落12段落7", "段落12", 2 / 3),
    ("是段落12，共30段", "段落12", 1 / 2),
    ("12.5", "段落12", 1 / 2),
    ("1,212", "段落12", 0),
    ("12345", "段落12", 0),
    ("3 段 12", "段落12", 1 / 2),
    ("二〇一二12", "段落12", 1),  # numerals are no digits
    ("①12", "段落12", 1),
    ("12", ("段落3", "段落12"), 1),
    ("段落3段落12", ("段落3", "段落12"), 1 / 2),
    ("13", "段落12和段落13", 0),  # the first is meant
    ("段落0", "段落0", 1),
    ("段落7", "段落007", 0),
]
COUNTED = [
    ("7", "7", 1),
    ("", "7", 0),
    ("seven", "7", 0),
    ("7", "seven", 0),
    ("07", "7", 0),
    ("17", "7", 0),
    ("70", "7", 0),
    ("7.", "7", 1),
    ("(7)", "7", 1),
    (" 7 ", "7", 1),
    ("7", " 7", 0),  # the answer is not stripped
    ("\n7", "7", 1),
    ("-7", "7", 1),
    ("x7", "7", 1),
    ("²7", "7", 1),
    ("７", "7", 0),
    ("٧", "7", 0),
    ("7 paragraphs", "7", 1),
    ("7 of 30", "7", 1 / 2),
    ("7.0", "7", 1 / 2),
    ("7-8", "7", 1 / 2),
    ("7, 7", "7", 1),
    ("1 2 7", "7", 1 / 3),
    ("7\n8\n9\n7", "7", 2 / 4),
    ("There are 7 unique paragraphs, 7!", "7", 1),
    ("1,007", "7", 0),
    ("1,234.50", "1", 1 / 3),
    ("1234.50", "1234", 1 / 2),
    ("10", "10", 1),
    ("1 0", "10", 0),
    ("0", "0", 1),
    ("00", "0", 0),
    ("8", ("7", "8"), 1),
    ("7 8 8", ("7", "8"), 2 / 3),
]
LINES = [
    ("", ""),
    ("a", "a"),
    ("a\nb", "a"),
    ("\n\na\nb", "a"),
    ("\n", ""),
    (" \na", " "),  # only newlines are stripped
    ("\t\na", "\t"),
    ("\r\na", "\r"),
    ("a\r\nb", "a\r"),
    ("a\u2028b", "a\u2028b"),
]


@pytest.mark.parametrize(("reply", "answers", "classes", "expected"), CLASSIFIED)
def test_classification(reply: str, answers: str | tuple[str, ...], classes: tuple[str, ...], expected: float) -> None:
    assert score("classification", reply, answers, classes) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "answers", "expected"), RETRIEVED)
def test_retrieval(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("retrieval", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "answers", "expected"), RETRIEVED_CHINESE)
def test_retrieval_chinese(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("retrieval_zh", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "answers", "expected"), COUNTED)
def test_count(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("count", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "line"), LINES)
def test_first_line(reply: str, line: str) -> None:
    assert first_line(reply) == line


def test_the_first_line_decides_between_classes() -> None:
    assert score("classification", first_line("\nfood\nsport"), "food", KINDS) == 1


@given(st.permutations(("a", "b", "ab", "ba", "c")), st.text("abc ", max_size=8), st.sampled_from(("ab", "c")))
def test_parts_of_the_answer_can_only_lower_the_score(classes: list[str], reply: str, answer: str) -> None:
    others = [name for name in classes if name in reply and (name == answer or name not in answer)]
    best = 1 / len(others) if answer in others else 0
    assert 0 <= score("classification", reply, answer, tuple(classes)) <= best


def test_what_cannot_be_scored() -> None:
    with pytest.raises(UsageError, match="classification needs all classes of the task as options"):
        score("classification", "food", "food")
    with pytest.raises(UsageError, match="the answer '12' names no paragraph: it must contain 'Paragraph 12'"):
        score("retrieval", "12", "12")
    with pytest.raises(UsageError, match="names no paragraph"):
        score("retrieval", "12", "paragraph 12")
    with pytest.raises(UsageError, match="it must contain '段落12'"):
        score("retrieval_zh", "12", "段落 12")
