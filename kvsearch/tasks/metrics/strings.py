"""Scores that look for answers in a reply: our own two, RULER's and three of needle-in-a-haystack figures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvsearch.core.errors import UsageError
from kvsearch.tasks.metrics.packages import make_rouge_scorer

_CONTROL = re.compile(r"[\x00-\x1f]")


def exact(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the reply begins with one of the answers, word by word (what follows the answer is not judged).

    For the synthetic suite and one's own examples; no paper's table uses it.
    """
    words = reply.split()
    return float(any(words[: len(answer.split())] == answer.split() for answer in answers))


def contains(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if any answer occurs in the reply, case-insensitive.

    `string_match_part` without RULER's treatment of control characters. For one's own examples; no paper's table uses
    it.
    """
    return float(any(_list_contained(reply, answers)))


def string_match_all(reply: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the reply, case-insensitive.

    As in RULER (arXiv 2404.06654), the reply is stripped and its control characters become newlines, so no answer is
    found across one. (kvpress deletes them instead; LAVa's scripts keep the reply as it is.)
    Tables: all RULER tasks but qa_1 and qa_2. These are 11, and all that KVCache-Factory, LAVa and EvolKV report;
    LU-KV reports 13.
    """
    contained = _list_contained(_clean(reply), answers)
    return sum(contained) / len(contained)


def string_match_part(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if any answer occurs in the reply, case-insensitive, on the same text as `string_match_all`.

    Tables: qa_1 and qa_2 of RULER (LU-KV).
    """
    return float(any(_list_contained(_clean(reply), answers)))


def niah_recall(reply: str, answers: Sequence[str]) -> float:
    """Share of the answer's distinct words that occur among the reply's, case-insensitive; the best over the answers.

    Words are told apart by white space and keep their punctuation: "day" is not "day.". Their order does not matter,
    so words such as "a" and "on" count wherever they stand. It is what the figures of PyramidKV (KVCache-Factory) show,
    for the answer "eat a sandwich and sit in Dolores Park on a sunny day."; see `niah_recall_lava` for LAVa's.
    UsageError if an answer has no words.
    """
    words = set(reply.lower().split())
    shares = []
    for answer in answers:
        wanted = set(answer.lower().split())
        if not wanted:
            raise UsageError("an answer is blank: there are no words to recall")
        shares.append(len(words & wanted) / len(wanted))
    return max(shares)


def niah_recall_lava(reply: str, answers: Sequence[str]) -> float:
    """Score as `niah_recall` in LAVa's figures: full stops of the reply are blanks, and its answer ends without one."""
    return niah_recall(reply.replace(".", " "), answers)


def niah_rouge1(reply: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-1 with Porter stemming as the package `rouge-score` computes it; the best over the answers.

    KVCache-Factory stores ten times this for each needle, and kvpress reports it, both with the whole needle ("The best
    thing to do in San Francisco is ...") for the answer. It is not what figures show: see `niah_recall`.
    EnvironmentFault without the package.
    """
    scorer = make_rouge_scorer("rouge1", stems=True)
    return max(float(scorer.score(answer, reply)["rouge1"].fmeasure) for answer in answers)


def _list_contained(text: str, answers: Sequence[str]) -> list[bool]:
    return [answer.lower() in text.lower() for answer in answers]


def _clean(reply: str) -> str:
    return _CONTROL.sub("\n", reply.strip()).strip()
