"""Which questions a search learns from: those that eviction gets wrong and the full cache right.

EvolKV optimises needles on at most 35 instances whose scores are below 60 (arXiv 2509.08315, section 4.2.3). What the
full cache itself gets wrong tells nothing about budgets, and what even budgets get right leaves nothing to gain.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvsearch.core.errors import UsageError
from kvsearch.core.progress import Progress
from kvsearch.evaluation.runner import run_encoded
from kvsearch.runtime import Program
from kvsearch.runtime.program import full_cache
from kvsearch.search.evolve import PreparedSearch
from kvsearch.strategies.names import FULL, UNIFORM
from kvsearch.tasks.metrics import is_right


@dataclass(frozen=True)
class HardQuestions:
    """Questions by the SHA-256 of all their tokens: those to search on, and how many were left at each step."""

    kept: frozenset[str]
    asked: int
    right: int
    hard: int


def hard_questions(
    scores: Mapping[str, Mapping[str, float]], below: float, most: int | None, seed: int
) -> HardQuestions:
    """Choose questions that the full cache gets right and even budgets below a bound.

    Args:
        scores: of every question, 0 to 1: with the full cache, and under even budgets of the size that is searched.
        below: the bound, in percent.
        most: how many to keep at most, drawn by `seed`; None: all.
        seed: of the draw.
    """
    right = [name for name, score in scores.items() if is_right(score[FULL])]
    hard = [name for name in right if 100 * scores[name][UNIFORM] < below]
    kept = hard if most is None or most >= len(hard) else random.Random(f"{seed}/hard").sample(hard, most)
    return HardQuestions(frozenset(kept), len(scores), len(right), len(hard))


def measure_difficulty(prepared: PreparedSearch, progress: Progress | None = None) -> dict[str, dict[str, float]]:
    """Return the scores of all questions with the full cache and under even budgets; errors as `run_encoded`."""
    model = prepared.base.loaded.model
    asked = prepared.asked
    even = Program.from_plan(model, prepared.plan(prepared.starts[UNIFORM], {}))
    programs = {FULL: full_cache(model), UNIFORM: even}
    tasks = prepared.encoded["search"]
    protocol = prepared.settings.protocol
    replies = run_encoded(prepared.base.loaded, programs, tasks, protocol, asked.batch, progress, asked.max_memory)
    scores: dict[str, dict[str, float]] = {}
    for reply in replies:
        scores.setdefault(reply.prompt_sha256, {})[reply.method] = reply.score
    return scores


def with_hard_questions(
    searches: Sequence[PreparedSearch], progress: Progress | None = None
) -> tuple[tuple[PreparedSearch, ...], HardQuestions | None]:
    """Return searches on hard questions alone, if their settings ask for it, and what was found.

    Several searches have the same questions: those that are hard at the first budget, the smallest.

    Raises:
        UsageError: fewer than two questions are left.
    """
    first = searches[0]
    below = first.settings.hard_below
    if below is None:
        return tuple(searches), None
    chosen = hard_questions(measure_difficulty(first, progress), below, first.settings.hard_most, first.settings.seed)
    if len(chosen.kept) < 2:
        raise UsageError(
            f"of {chosen.asked} questions the full cache answers {chosen.right} right, and {chosen.hard} of these "
            f"score below {below:g} under even budgets of {first.budget} entries: too few to search on, raise "
            "--samples or --hard-below, or lower the budget"
        )
    return tuple(replace(search, kept=chosen.kept) for search in searches), chosen
