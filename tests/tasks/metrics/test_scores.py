"""Scores of replies: a table of cases, and what holds of all."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import jieba
import pytest
import yaml
from fuzzywuzzy import fuzz
from fuzzywuzzy.StringMatcher import StringMatcher
from hypothesis import given
from hypothesis import strategies as st
from rouge import Rouge

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.tasks.base import Query
from kvsearch.tasks.metrics import NEEDS, SCORERS, STAYS_RIGHT, find_metric, packages

CASES: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
CLOSE = 1e-7  # the package of ROUGE-L adds 1e-8 to a denominator
BOOKS = ("Anna", "Ben", "Cleo", "Dora")


def score(metric: str, reply: str, answers: str | tuple[str, ...], options: tuple[str, ...] = ()) -> float:
    """The score of a reply against one answer or several."""
    listed = (answers,) if isinstance(answers, str) else answers
    return SCORERS[metric](reply, Query("a question", listed, options=options))


@pytest.mark.parametrize("metrics", CASES)
def test_cases(metrics: str) -> None:
    names = metrics.split()
    for reply, answers, *more in CASES[metrics]:
        options = tuple(more.pop(0)) if isinstance(more[0], list) else ()
        expected = more if len(more) == len(names) else more * len(names)
        given_answers = answers if isinstance(answers, str) else tuple(answers)
        for name, value in zip(names, expected, strict=True):
            found = score(name, reply, given_answers, options)
            assert found == pytest.approx(float(Fraction(value)), abs=CLOSE), (name, reply, answers)


def test_every_metric_has_cases() -> None:
    assert {name for metrics in CASES for name in metrics.split()} == set(SCORERS)


@given(reply=st.text("ab \n\tAB"), answers=st.lists(st.text("ab", min_size=1), min_size=1, max_size=4).map(tuple))
def test_all_is_the_mean_and_part_the_best_of_single_answers(reply: str, answers: tuple[str, ...]) -> None:
    single = [score("string_match_part", reply, answer) for answer in answers]
    assert score("string_match_all", reply, answers) == pytest.approx(sum(single) / len(single))
    assert score("string_match_part", reply, answers) == max(single)


@given(
    reply=st.text("ab \n\tAB"),
    more=st.text("ab \n\tAB"),
    answers=st.lists(st.text("ab", min_size=1), min_size=1, max_size=4).map(tuple),
)
def test_a_full_score_stays_whatever_follows(reply: str, more: str, answers: tuple[str, ...]) -> None:
    """So a reply may end there."""
    for metric in STAYS_RIGHT:
        if SCORERS[metric](reply, Query("q", answers)) == 1:
            assert SCORERS[metric](reply + more, Query("q", answers)) == 1


@pytest.mark.parametrize("metric", ["qa_f1", "qa_f1_zh"])
@given(reply=st.text(max_size=40), answer=st.text(max_size=40))
def test_f1_is_symmetric_and_bounded(metric: str, reply: str, answer: str) -> None:
    there = score(metric, reply, answer)
    assert 0 <= there <= 1
    assert score(metric, answer, reply) == pytest.approx(there)


def official(reply: str, answer: str) -> float:
    """What the package says of all its metrics at once, averaged over one pair, as LongBench asks it."""
    try:
        return float(Rouge().get_scores([reply], [answer], avg=True)["rouge-l"]["f"])
    except ValueError:
        return 0.0


WORDS = st.lists(st.sampled_from(["a", "b", "c", "A", ".", "d.", "\n", "x,", "3.5"]), max_size=12).map(" ".join)
HAN = st.text(st.sampled_from("我是中国人，。！《论语》 \n.3a北京大学"), max_size=25)
LINE = st.text("abc(=) x", max_size=30)


@given(reply=WORDS, answer=WORDS)
def test_rouge_is_the_packages(reply: str, answer: str) -> None:
    assert score("rouge_l", reply, answer) == official(reply, answer)


@given(reply=HAN, answer=HAN)
def test_rouge_is_the_packages_on_words_of_jieba(reply: str, answer: str) -> None:
    spaced = [" ".join(jieba.cut(text, cut_all=False)) for text in (reply, answer)]
    assert score("rouge_l_zh", reply, answer) == official(*spaced)


@pytest.mark.parametrize(("words", "expected"), [(900, 2 / 902), (1100, 0)])
def test_too_long_a_sentence_scores_nothing(words: int, expected: float) -> None:
    """However deep the caller is, and however deep a compiler let Python go."""
    reply = " ".join(f"x{index}" for index in range(words)) + ". y"

    def nested(levels: int) -> float:
        return nested(levels - 1) if levels else score("rouge_l", reply, "y")

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(2 * limit)
    scores = [nested(0), nested(500)]
    sys.setrecursionlimit(limit)
    assert scores == pytest.approx([expected] * 2, abs=CLOSE)


@given(line=LINE, answer=LINE)
def test_edit_similarity_is_fuzzywuzzys(line: str, answer: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "SequenceMatcher", StringMatcher)  # as with python-Levenshtein installed
        assert score("edit_similarity", line, answer) == fuzz.ratio(line, answer) / 100


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "It is {}.", "${:,}", "9 + {:,}", "#### {:,}\n8"]))
def test_integers_in_any_form(number: int, form: str) -> None:
    assert score("gsm8k", form.format(number), str(number)) == 1
    assert score("gsm8k", form.format(number), str(number + 1)) == 0


def test_very_long_runs_of_digits() -> None:
    assert score("gsm8k", "9" * 5000, "9") == 0
    assert score("gsm8k_official", "9" * 5000, "9") == 0


@pytest.mark.parametrize(
    ("metric", "answer", "options", "message"),
    [
        ("classification", "food", (), "classification needs all classes"),
        ("retrieval", "12", (), "'12' names no paragraph: it must contain 'Paragraph 12'"),
        ("retrieval", "paragraph 12", (), "names no paragraph"),
        ("retrieval_zh", "段落 12", (), "must contain '段落12'"),
        ("niah_recall", " ", (), "an answer is blank"),
        ("first_number", "three", (), "'three' is not a number"),
        ("integer_boxed", "7/2", (), "the answer '7/2' is no integer"),
        ("gsm8k", "#### many", (), "has no number"),
        *(("gsm8k_official", answer, (), "is no number") for answer in ("", "1.2.3", "It is 42", "#### 007")),
        *(
            ("choice", "Cleo", options, "must be one of 2 to 4 options, got Cleo")
            for options in ((), ("Cleo",), ("Anna", "Ben"), (*BOOKS, "Cleo"))
        ),
    ],
)
def test_what_cannot_be_scored(metric: str, answer: str, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        score(metric, "42", answer, options)


ANSWERS = {"retrieval": "Paragraph 7", "retrieval_zh": "段落7"}


@pytest.mark.parametrize("name", SCORERS)
@given(reply=st.text(max_size=30))
def test_every_metric_takes_any_reply(name: str, reply: str) -> None:
    query = Query("?", (ANSWERS.get(name, "7"), ANSWERS.get(name, "7")), options=("7", "8"))
    assert 0 <= SCORERS[name](reply, query) <= 1


def test_a_question_without_answers() -> None:
    for scorer in SCORERS.values():
        with pytest.raises(UsageError, match="the question 'who' has no answers to score a reply against"):
            scorer("a reply", Query("who", (), options=("a",)))


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"unknown metric 'qa_f2'; did you mean 'qa_f1'\? \(known: exact, contains, "):
        find_metric("qa_f2")


@pytest.mark.parametrize(("name", "module"), [(name, module) for name, modules in NEEDS.items() for module in modules])
def test_missing_packages(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.import_optional.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    wanted = packages.METRIC_PACKAGES[module]
    with pytest.raises(EnvironmentFault) as caught:
        find_metric(name)
    message = str(caught.value)
    assert message.startswith(f"this metric needs {wanted}, which cannot be imported (")
    assert message.endswith(f"): run `pip install {wanted}`")
    assert "\n" not in message
