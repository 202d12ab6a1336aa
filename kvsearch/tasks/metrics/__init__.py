"""Metrics by name: how good a reply to a query is, in [0, 1], as the official scorers compute it.

`SCORERS[name](reply, query)` scores one reply; `find_metric` does the same look-up with an error that helps, and makes
sure that what the metric needs is installed before hours of generation are spent on it. Means over examples, the factor
100 and rounding belong to tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvsearch.core.errors import KvsearchError, UsageError
from kvsearch.core.naming import require_known
from kvsearch.tasks.metrics import likelihood, longbench, maths, strings
from kvsearch.tasks.metrics.packages import import_optional

if TYPE_CHECKING:
    from kvsearch.tasks.base import Query, Task

    Metric = Callable[[str, Query], float]

# scores of a reply and the answers to its question, by their names
_OF_ANSWERS = (
    strings.exact, strings.contains, strings.string_match_all, strings.string_match_part, strings.niah_recall,
    strings.niah_recall_lava, strings.niah_rouge1,
    longbench.qa_f1, longbench.qa_f1_zh, longbench.rouge_l, longbench.rouge_l_zh, longbench.retrieval,
    longbench.retrieval_zh, longbench.count, longbench.edit_similarity, longbench.longbench_v2,
    longbench.first_integer, longbench.first_number, longbench.contains_word,
    longbench.character_f1_zh, longbench.rouge_l_sum,
    maths.gsm8k, maths.gsm8k_official, maths.math_boxed, maths.integer_boxed,
    likelihood.likelihood,
)  # fmt: skip
# scores of a reply and its whole question
_OF_QUESTION = (
    longbench.classification, longbench.choice, longbench.choice_of_function,
    strings.json_keys, strings.all_capitals, strings.word_avoided, strings.closing_words, strings.refusal,
)  # fmt: skip


def _make_metric(metric: Callable[[str, Any], float]) -> Metric:
    def score(reply: str, query: Query) -> float:
        if not query.answers:
            raise UsageError(f"the question {query.question!r} has no answers to score a reply against")
        return metric(reply, query if metric in _OF_QUESTION else query.answers)

    return score


SCORERS: dict[str, Metric] = {metric.__name__: _make_metric(metric) for metric in (*_OF_ANSWERS, *_OF_QUESTION)}
OF_ALL_ANSWERS = ("string_match_all",)  # to the others any one answer is right
# a full score stays, whatever follows in the reply
STAYS_RIGHT = ("contains", "string_match_all", "string_match_part")
# blanks around answers are part of them, of code and of what is predicted
OF_BLANKS = ("edit_similarity", "likelihood")
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
    require_known("metric", name, list(SCORERS))
    for module in NEEDS.get(name, ()):
        import_optional(module)
    return SCORERS[name]


SCORE_TOLERANCE = 1e-9  # how far the arithmetic of a metric may lead out of [0, 1]


def score(task: Task, key: str, number: int, query: Query, reply: str) -> float:
    """Return the score of a reply to question `number` of the example `key`, in [0, 1].

    Raises:
        UsageError: the metric cannot judge replies to this question, or gives what is no score.
        EnvironmentFault: a package that the metric needs is missing.
    """
    place = f"task {task.name}, example {key}, question {number}"
    try:
        value = task.score(reply, query)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    except (KvsearchError, MemoryError):
        raise  # not about this question
    except Exception as error:  # a metric of the user's own may raise anything
        raise UsageError(f"{place}: its metric fails with {type(error).__name__}: {error}") from error
    if not -SCORE_TOLERANCE <= value <= 1 + SCORE_TOLERANCE:
        raise UsageError(f"{place}: its metric gives {value:g}, scores are from 0 to 1")
    return value


def is_forced(task: Task) -> bool:
    """Tell whether answers are teacher-forced, and how well they are predicted is scored: nothing is replied."""
    return getattr(task, "metric", None) == likelihood.FORCED


def is_right(value: float) -> bool:
    """Tell whether a reply of that score counts as right: it has the full score."""
    return value >= 1 - SCORE_TOLERANCE
