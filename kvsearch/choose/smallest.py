"""The smallest budget whose plan loses little: bisected on one part of the questions, confirmed on another.

A plan is better the more it may keep, so budgets are bisected: what the best candidate of a budget loses against the
full cache is asked on the questions of the first stage. The smallest budget that looks good there is flattered by these
questions. So the choice is then made at this budget as at any other, and what is chosen has to hold on the questions of
the second stage, too; if it does not, the next larger budget is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsearch.choose.acceptance import TIE
from kvsearch.choose.overall import OverallChoice
from kvsearch.choose.selection import PhaseResult
from kvsearch.errors import UsageError
from kvsearch.evaluation.plan_comparison import Keep
from kvsearch.strategies.names import FULL

STEP = 1.1  # from one budget that is tried to the next


@dataclass(frozen=True)
class Tried:
    """What the best plan of a budget loses against the full cache, in [0, 1]; `confirmed`: on the second stage."""

    budget: int
    name: str
    loss: float
    confirmed: bool


@dataclass(frozen=True, eq=False)
class Smallest:
    """The choice at the smallest budget that holds, what was decided there, and all that was tried, in order."""

    choice: OverallChoice
    result: PhaseResult
    tried: tuple[Tried, ...]


def ladder(least: int, most: int) -> list[int]:
    """Return the budgets that are tried: `least`, and then each a tenth larger, rounded up, as far as `most`."""
    found, budget = [], float(least)
    while budget <= most:
        found.append(round(budget))
        budget = max(budget * STEP, round(budget) + 1)
    return found


def find_smallest(
    budgets: Sequence[int], within: float, choice_at: Callable[[int], tuple[OverallChoice, Keep | None]]
) -> Smallest:
    """Find the smallest of some ascending budgets at which the chosen plan loses at most `within`, in [0, 1].

    `choice_at` prepares the choice at a budget, and says where its replies are kept.

    Raises:
        UsageError: no budget holds; see also `Contest.decide`.
    """
    tried = list[Tried]()

    def looks_good(budget: int) -> bool:
        choice, keep = choice_at(budget)
        contest = choice.contest
        names = list(contest.found.candidates) or list(contest.found.baselines)
        found = contest.first(names, keep)
        best = max(names, key=lambda name: found.score(name).mean)
        loss = found.score(FULL).mean - found.score(best).mean
        tried.append(Tried(budget, best, loss, confirmed=False))
        return loss <= within + TIE

    low, high = 0, len(budgets)
    while low < high:
        middle = (low + high) // 2
        if looks_good(budgets[middle]):
            high = middle
        else:
            low = middle + 1
    for budget in budgets[low:]:
        choice, keep = choice_at(budget)
        result = choice.contest.decide(keep, answered=True)
        loss = result.full.mean - result.score
        tried.append(Tried(budget, result.written, loss, confirmed=True))
        if loss <= within + TIE:
            return Smallest(choice, result, tuple(tried))
    raise UsageError(
        f"no budget up to {budgets[-1]} entries per kv head loses at most {100 * within:g} points: allow more with "
        "--within"
    )
