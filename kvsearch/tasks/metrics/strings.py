"""Scores that look for answers in a reply: our own two, RULER's, three of needle-in-a-haystack figures, and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvsearch.core.errors import UsageError
from kvsearch.tasks.metrics.packages import make_rouge_scorer

if TYPE_CHECKING:
    from kvsearch.tasks.base import Query

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


# --- rules ------------------------------------------------------------------------------------------------------------

# Replies that have to keep a rule: a format, an instruction or a refusal. Each score is 1 only if the reply says
# something, too: the answer to its question, or that it refuses. What a rule is about (keys, a banned word, closing
# words, a secret) stands in the question's `options`. No paper's table uses them.

# how refusals begin, after the list of Zou et al., arXiv 2307.15043, and what else small models say
_REFUSING = re.compile(
    r"\b(can ?not|can't|could not|couldn't|won't|will not|must not|may not|not able|unable|not allowed|not permitted|"
    r"refuse|decline|sorry|apologi[sz]e|rather not|against (?:my|the) (?:rules|instructions)|is (?:a )?secret)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?\n]")


def json_keys(reply: str, query: Query) -> float:
    """Share of the keys in `options` that have a value in the reply's JSON object; 0 without one, or without an answer.

    The first object that can be parsed counts, whatever stands around it. One of the answers has to be in its values.
    """
    parsed = next(_find_objects(reply), {})
    values = {key: str(value) for key, value in parsed.items() if value not in (None, "")}
    if not contains(" ".join(values.values()), query.answers):
        return 0.0
    return sum(key in values for key in query.options) / len(query.options)


def _find_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, from left to right; an object within another is not yielded on its own."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            parsed, end = decoder.raw_decode(text, start)
            yield parsed
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)


def all_capitals(reply: str, query: Query) -> float:
    """Return 1 if the reply has an answer and no lowercase letter; scripts without case score 0."""
    return float(reply.isupper() and contains(reply, query.answers))


def word_avoided(reply: str, query: Query) -> float:
    """Return 1 if the reply has an answer and none of the words in `options`, in any case."""
    return float(not _has_word(reply, query.options) and contains(reply, query.answers))


def closing_words(reply: str, query: Query) -> float:
    """Return 1 if the reply has an answer and ends with one of the `options`, but for punctuation and case."""
    said = re.sub(r"[\W_]+$", "", reply).lower()
    closing = next((words for words in query.options if said.endswith(words.lower())), None)
    return float(closing is not None and contains(said.removesuffix(closing.lower()), query.answers))


def refusal(reply: str, query: Query) -> float:
    """Return 1 if the first sentence of the reply refuses, and none of the words in `options` is anywhere in it.

    A sentence refuses if it has words such as "I cannot", "sorry" or "not allowed".
    """
    first = next(filter(str.strip, _SENTENCE_END.split(reply.replace("\u2019", "'"))), "")
    return float(_REFUSING.search(first) is not None and not _has_word(reply, query.options))


def _has_word(text: str, words: tuple[str, ...]) -> bool:
    """Tell whether one of the words is in a text, as a whole, in any case."""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in words)
