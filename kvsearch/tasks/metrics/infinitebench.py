"""Scores of InfiniteBench (Zhang et al., arXiv 2402.13718) as its `compute_scores.py` computes them, in [0, 1].

Of the official versions this is the last one, which looks for the last single letter in replies to multiple choice;
the first ones looked at a reply's first letter only. En.Dia is scored by `contains`, En.QA by `qa_f1`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsearch.core.errors import UsageError
from kvsearch.tasks.metrics.longbench import CHINESE_PUNCTUATION, FULL_WIDTH, compute_f1
from kvsearch.tasks.metrics.packages import make_rouge_scorer

if TYPE_CHECKING:
    from kvsearch.tasks.base import Query

LETTERS = "ABCD"
_LAST_OF_FOUR, _LAST_OF_TEN = (re.compile(rf"\b[A-{end}]\b(?!.*\b[A-{end}]\b)") for end in "DJ")
_NUMBER = re.compile(r"\d+\.\d+|\d+")
_MARKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_CHOICE_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
_CODE_MARKS = str.maketrans(dict.fromkeys("\n`'\"-*", " "))
_CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")
_CODE_CUES = ("answer is:", "is:", "answer:", "correct option is:")
_NO_MARKS = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION + FULL_WIDTH + "！？。")


def first_integer(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the first run of digits in the reply is an answer, as written. Tables: passkey, number_string."""
    match = re.search(r"[0-9]+", reply)
    return float(match is not None and match[0] in answers)


def contains_word(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer is one of the reply's words, which end at white space and punctuation.

    Tables: kv_retrieval.
    """
    words = reply.translate(_MARKS).split()
    return float(any(answer in words for answer in answers))


def first_number(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number in the reply, a whole or a decimal one without sign, equals an answer.

    Tables: math_find. UsageError if an answer is no number. (The official scorer fails on a decimal where a whole
    number is wanted; here it is a wrong reply.)
    """
    match = _NUMBER.search(reply)
    return float(match is not None and any(float(match[0]) == _as_number(answer) for answer in answers))


def choice(reply: str, query: Query) -> float:
    """Return 1 if the reply chooses the answer, one of the texts in `query.options`, by its letter A to D or its text.

    The last letter that stands alone decides if it is right; else the reply's first letter, the reply as a whole, what
    follows a cue such as "answer is:", the first word that is a letter, in this order. Tables: longbook_choice_eng.
    UsageError unless the answers are of two to four options.
    """
    labels = _list_right_replies(query)
    text = reply.strip()
    if not text:
        return 0.0
    if _find_letter(_LAST_OF_FOUR, text) in labels:
        return 1.0
    if text[0] in LETTERS:
        return float(text[0] in labels)
    if text in labels:
        return 1.0
    text = _single_spaced(text.translate(_CHOICE_MARKS))
    after = _take_after_cue(text, _CHOICE_CUES)
    if after is not None:
        return float(after.startswith(labels))
    return float(next((word for word in text.split() if word in LETTERS), None) in labels)


def choice_of_function(reply: str, query: Query) -> float:
    """Score as `choice`, where the options are names of functions. Tables: code_debug.

    The last letter from A to J that stands alone decides if it is right; else the reply, without quotes and the word
    option, has to begin with letter or name, or to have them after a cue.
    """
    labels = _list_right_replies(query)
    if _find_letter(_LAST_OF_TEN, reply.strip()) in labels:
        return 1.0
    text = re.sub("[Oo]ption", " ", reply.strip().translate(_CODE_MARKS))
    text = _single_spaced(text)
    if text.startswith(labels):
        return 1.0
    after = _take_after_cue(text, _CODE_CUES)
    return float(after is not None and after.startswith(labels))


def character_f1_zh(reply: str, answers: Sequence[str]) -> float:
    """Return F1 of the characters of reply and answer, without punctuation and white space; the best of the answers.

    Tables: longbook_qa_chn. LongBench counts the words of jieba instead.
    """
    characters = _characters(reply)
    return max(compute_f1(characters, _characters(answer)) for answer in answers)


def rouge_l_sum(reply: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-Lsum, sentences at newlines, without stemming, by the package `rouge-score`; the best one.

    Tables: longbook_sum_eng. EnvironmentFault without the package.
    """
    scorer = make_rouge_scorer("rougeLsum", stems=False)
    return max(float(scorer.score(answer, reply)["rougeLsum"].fmeasure) for answer in answers)


def _list_right_replies(query: Query) -> tuple[str, ...]:
    """Return what is right to reply: the answers' texts and their letters."""
    options = query.options
    if not 2 <= len(options) <= len(LETTERS) or not set(query.answers) <= set(options):
        raise UsageError(f"the answer must be one of 2 to {len(LETTERS)} options, got {', '.join(query.answers)}")
    return (*query.answers, *(LETTERS[options.index(answer)] for answer in query.answers))


def _find_letter(letter: re.Pattern[str], text: str) -> str | None:
    match = letter.search(text)  # the last one of the first line that has any
    return match and match[0]


def _take_after_cue(text: str, cues: Sequence[str]) -> str | None:
    """Return what follows the first of `cues` that is there, and one more character; None without a cue."""
    for cue in cues:
        _, separator, after = text.partition(cue)
        if separator:
            return after[1:]
    return None


def _single_spaced(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _as_number(answer: str) -> float:
    try:
        return float(answer)
    except ValueError:
        raise UsageError(f"the answer {answer!r} is not a number") from None


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(_NO_MARKS).split()))
