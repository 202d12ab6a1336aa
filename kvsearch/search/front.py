"""Quality against size: several budgets in one search, each searched directly, from the same start plans.

All budgets share one bank and one ledger, and none knows of the others' results. The report split is asked once, at the
end, of everything: the result of each budget, and beside it the plan of the smallest budget scaled to that size. These
are the optimised and the extrapolated plans of EvolKV (sections 4.2.1 and C.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsearch.errors import UsageError
from kvsearch.evaluation.compare import Settings
from kvsearch.evaluation.plan_comparison import Keep, PlanComparison
from kvsearch.plan import Plan
from kvsearch.search.candidates import SearchOutcome
from kvsearch.search.evolve import (
    Choice,
    Evolved,
    PreparedSearch,
    Splits,
    at_size,
    prepare_search,
)
from kvsearch.search.jobs import Executor
from kvsearch.search.ledger import SearchLedger
from kvsearch.search.loop import Watcher
from kvsearch.search.names import EXPANDED
from kvsearch.search.settings import EvolveSettings, SearchLimits
from kvsearch.search.start_plans import Base
from kvsearch.strategies.names import FULL


def prepare_front(
    base: Base,
    budgets: Sequence[int],
    settings: EvolveSettings,
    splits: Splits,
    asked: Settings,
    plans: Mapping[str, Plan],
) -> tuple[PreparedSearch, ...]:
    """Prepare searches of the same questions, ascending by their budgets; the rest is as for `prepare_search`.

    Raises:
        UsageError: fewer than two different budgets.
    """
    sizes = sorted(set(budgets))
    if len(sizes) < 2:
        raise UsageError("a front needs two different budgets or more: give a single one with --budget")
    first = prepare_search(base, sizes[0], settings, splits, asked, plans)
    return (first, *(at_size(first, size, plans) for size in sizes[1:]))


def search_front(
    searches: Sequence[PreparedSearch],
    executor: Executor,
    ledger: SearchLedger,
    limits: SearchLimits,
    watcher: Watcher,
    keep: Keep | None = None,
) -> list[Evolved]:
    """Search and choose at every budget, then report on all; limits are for all budgets together.

    Errors are those of `Search.run`.
    """
    found: list[tuple[PreparedSearch, SearchOutcome, Choice]] = []
    for search in searches:
        outcome = search.search(executor, ledger, limits, watcher, f"budget {search.budget}: ")
        found.append((search, outcome, search.choose(outcome, keep, f"choice-{search.budget}")))
    plans: dict[str, Plan] = {}
    smallest = found[0][2].table
    for search, _, choice in found:
        compared = search.reported_plans(choice)
        if plans:
            compared[EXPANDED] = search.plan(search.frame.complete(smallest), {})
        plans |= {f"{name}-{search.budget}": plan for name, plan in compared.items()}
    report = searches[0].compare(plans, searches[0].splits.report, "report", keep)
    return [Evolved(search, outcome, choice, _view(report, search.budget)) for search, outcome, choice in found]


def _view(result: PlanComparison, budget: int) -> PlanComparison:
    """Return the part of a comparison that one budget is about, with names as if it were alone."""
    ending = f"-{budget}"
    mine = {name.removesuffix(ending): label for name, label in result.labels.items() if name.endswith(ending)}
    return PlanComparison(result.comparison, {FULL: result.labels[FULL], **mine})
