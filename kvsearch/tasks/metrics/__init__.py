"""Metrics by name: how good a reply to a query is, in [0, 1], as the official scorers compute it.

`METRICS[name](reply, query)` scores one reply; `find_metric` does the same look-up with an error that helps, and makes
sure that what the metric needs is installed before hours of generation are spent on it. Means over examples, the factor
100 and rounding belong to tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsearch.errors import UsageError
from kvsearch.naming import unknown
from kvsearch.tasks.base import Query
from kvsearch.tasks.metrics.gsm8k import gsm8k, gsm8k_official
from kvsearch.tasks.metrics.infinitebench import (
    character_f1_zh,
    choice,
    choice_of_function,
    contains_word,
    first_integer,
    first_number,
    rouge_l_sum,
)
from kvsearch.tasks.metrics.longbench import (
    classification,
    count,
    edit_similarity,
    edit_similarity_difflib,
    first_line,
    retrieval,
    retrieval_zh,
)
from kvsearch.tasks.metrics.packages import optional
from kvsearch.tasks.metrics.strings import (
    contains_any,
    exact_match,
    niah_recall,
    niah_recall_lava,
    niah_rouge1,
    string_match_all,
    string_match_part,
)
from kvsearch.tasks.metrics.words import qa_f1, qa_f1_zh, rouge_l, rouge_l_zh

__all__ = [
    "METRICS", "NEEDS", "OF_ALL_ANSWERS", "Metric", "character_f1_zh", "choice", "choice_of_function", "classification",
    "contains_any", "contains_word", "count", "edit_similarity", "edit_similarity_difflib", "exact_match",
    "find_metric", "first_integer", "first_line", "first_number", "gsm8k", "gsm8k_official", "niah_recall",
    "niah_recall_lava", "niah_rouge1", "qa_f1", "qa_f1_zh", "retrieval", "retrieval_zh", "rouge_l", "rouge_l_sum",
    "rouge_l_zh", "string_match_all", "string_match_part",
]  # fmt: skip

Metric = Callable[[str, Query], float]


def _of_answers(score: Callable[[str, Sequence[str]], float]) -> Metric:
    return lambda reply, query: score(reply, query.answers)


def _checked(metric: Metric) -> Metric:
    def checked(reply: str, query: Query) -> float:
        if not query.answers:
            raise UsageError(f"the question {query.question!r} has no answers to score a reply against")
        return metric(reply, query)

    return checked


_BY_ANSWERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact": exact_match,
    "contains": contains_any,
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "edit_similarity": edit_similarity,
    "edit_similarity_difflib": edit_similarity_difflib,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "niah_recall": niah_recall,
    "niah_recall_lava": niah_recall_lava,
    "niah_rouge1": niah_rouge1,
    "first_integer": first_integer,
    "first_number": first_number,
    "contains_word": contains_word,
    "character_f1_zh": character_f1_zh,
    "rouge_l_sum": rouge_l_sum,
    "gsm8k": gsm8k,
    "gsm8k_official": gsm8k_official,
}
_BY_QUESTION: dict[str, Metric] = {
    "classification": classification,
    "choice": choice,
    "choice_of_function": choice_of_function,
}
METRICS: dict[str, Metric] = {
    **{name: _checked(_of_answers(score)) for name, score in _BY_ANSWERS.items()},
    **{name: _checked(score) for name, score in _BY_QUESTION.items()},
}
OF_ALL_ANSWERS = ("string_match_all",)  # to the others any one answer is right
NEEDS: dict[str, tuple[str, ...]] = {
    "qa_f1_zh": ("jieba",),
    "rouge_l": ("rouge",),
    "rouge_l_zh": ("jieba", "rouge"),
    "edit_similarity": ("rapidfuzz.fuzz",),
    "rouge_l_sum": ("rouge_score.rouge_scorer",),
    "niah_rouge1": ("rouge_score.rouge_scorer",),
}  # optional modules


def find_metric(name: str) -> Metric:
    """Find a metric by its name; UsageError if there is none, EnvironmentFault if a package it needs is missing."""
    if name not in METRICS:
        raise UsageError(unknown("metric", name, list(METRICS)))
    for module in NEEDS.get(name, ()):
        optional(module)
    return METRICS[name]
