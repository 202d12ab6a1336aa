"""The other scores of LongBench: classes, numbers of paragraphs, a line of code.

The score of a reply is the best over the references, in [0, 1]; tables multiply the mean by 100. Source: LongBench,
arXiv 2308.14508, `metrics.py` and `eval.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from kvsearch.errors import UsageError
from kvsearch.tasks.base import Query
from kvsearch.tasks.metrics.packages import optional

_NUMBER = re.compile(r"\d+")
_COMMENT = ("`", "#", "//")


def first_line(reply: str) -> str:
    """Cut what LongBench scores from a reply to trec, triviaqa, samsum and lsht: its first line after leading newlines.

    Only newlines are stripped, as in the official `eval.py`: a first line of blanks is kept. (kvpress strips all white
    space there.) The other datasets are scored on the whole reply.
    """
    return reply.lstrip("\n").split("\n")[0]


def classification(reply: str, query: Query) -> float:
    """Return 1/n if the answer is among the n classes (`query.options`) that occur in the reply, else 0.

    A class that is part of the answer's own name does not count as another class ("Group" beside "Group or
    organization"). The official loop removes those from the list it iterates over, and so skips the class after each
    removed one: of two such classes in a row, the second stays and lowers the score. That is reproduced here, because
    all published numbers have it; without the defect the score is never lower.
    Tables: trec and lsht, on `first_line`. UsageError if there are no options.
    """
    if not query.options:
        raise UsageError("the metric classification needs all classes of the task as options of the question")
    return max(_share_of_classes(reply, answer, query.options) for answer in query.answers)


def retrieval(reply: str, answers: Sequence[str]) -> float:
    """Share of the integers in the reply that are the paragraph's, as written; the answer is "Paragraph 12".

    Tables: passage_retrieval_en. UsageError if an answer names no paragraph.
    """
    return max(_share_of_numbers(reply, _paragraph(answer, "Paragraph ")) for answer in answers)


def retrieval_zh(reply: str, answers: Sequence[str]) -> float:
    """Score as `retrieval`, with answers such as "段落12". Tables: passage_retrieval_zh."""
    return max(_share_of_numbers(reply, _paragraph(answer, "段落")) for answer in answers)


def count(reply: str, answers: Sequence[str]) -> float:
    """Share of the integers in the reply that are the answer, as written ("07" is not "7"). Tables: passage_count."""
    return max(_share_of_numbers(reply, answer) for answer in answers)


def edit_similarity(reply: str, answers: Sequence[str]) -> float:
    """Compare the reply's first line of code with the answer, in whole percent: 1 - (insertions + deletions) / T.

    T is the number of characters of both; a substitution counts as a deletion and an insertion. The line is the first
    without a backtick, # or //, or empty. This is `fuzz.ratio` of fuzzywuzzy with python-Levenshtein installed, of
    thefuzz and of rapidfuzz, rounded half to even; 1 for two empty texts, 0 if only one is empty. LongBench does not
    say whether python-Levenshtein is to be installed: KVCache-Factory (PyramidKV) requires it. Without it, fuzzywuzzy
    computes `edit_similarity_difflib`, which is never higher, so numbers of the two kinds do not compare.
    Tables: lcc, repobench-p. EnvironmentFault without rapidfuzz.
    """
    line = _first_code_line(reply)
    best: float = max(optional("rapidfuzz.fuzz").ratio(line, answer) for answer in answers)
    return round(best) / 100


def edit_similarity_difflib(reply: str, answers: Sequence[str]) -> float:
    """Score as `edit_similarity` in fuzzywuzzy without python-Levenshtein: 2M/T of difflib, in whole percent.

    M is the number of characters in matching blocks, found longest first; in answers of 200 characters or more, difflib
    begins no block at a character that makes up over 1% of them. kvpress and LongBench ask for fuzzywuzzy alone, so
    tables made in a fresh installation of either have this one.
    """
    line = _first_code_line(reply)
    return max(_gestalt(line, answer) for answer in answers)


def _share_of_classes(reply: str, answer: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in reply]
    place = 0
    while place < len(found):
        if found[place] != answer and found[place] in answer:
            del found[place]
        place += 1  # also after a removal: what moved up into its place is skipped
    return 1 / len(found) if answer in found else 0.0


def _share_of_numbers(reply: str, wanted: str) -> float:
    numbers = _NUMBER.findall(reply)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _paragraph(answer: str, before: str) -> str:
    found = re.search(rf"{before}(\d+)", answer)
    if not found:
        raise UsageError(f"the answer {answer!r} names no paragraph: it must contain {before + '12'!r} or the like")
    return found[1]


def _first_code_line(reply: str) -> str:
    lines = reply.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _COMMENT)), "")


def _gestalt(line: str, answer: str) -> float:
    if not line or not answer:
        return float(line == answer)
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100
