"""The refinement of `kvsearch run`: policies of layers and budgets are searched on, from the best plan that was solved.

`evolve --space joint` without its choice: what is found is a candidate beside others, and a run chooses by itself. The
contexts are of split train, and none that a ranking was fitted or a curve measured on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from kvsearch.jobs.evolve import SEARCHED, EvolveOptions, configuration, opened
from kvsearch.jobs.talk import Talk
from kvsearch.plan.parsing import read_json
from kvsearch.progress import Progress
from kvsearch.report.files.search import Budgets
from kvsearch.report.files.stored import Stored, damaged, stored
from kvsearch.runs.estimates import Number

if TYPE_CHECKING:
    from kvsearch.choose.contenders import Measured
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan, Size
    from kvsearch.plan.contexts import ContextRecord
    from kvsearch.search.candidates import Candidate, SearchOutcome
    from kvsearch.search.evolve import PreparedSearch
    from kvsearch.search.ledger import SearchLedger
    from kvsearch.search.loop import Part
    from kvsearch.tasks.base import Task

FOUND = "found.json"  # what the searches found; it is there once all are finished
NAME = "refined"
MOST = 2  # plans of a size that become candidates: there are few places among the finalists


@dataclass(frozen=True)
class Refined:
    """Plans that were found, by budget and name, and what they were searched on."""

    plans: Mapping[int, Mapping[str, Plan]]
    contexts: ContextRecord

    def candidates(self, size: Size) -> dict[str, Plan]:
        """Return the plans of a size that has a length; those of a ratio follow the prompt at hand."""
        from kvsearch.plan.arithmetic import scale

        found = self.plans[_budget(size)]
        if size.ratio is None:
            return dict(found)
        return {name: scale(plan, ratio=size.ratio, length=size.length) for name, plan in found.items()}


def _budget(size: Size) -> int:
    """Return the entries per kv head of a size that has a length."""
    assert size.length is not None
    return round(size.mean(size.length))


@dataclass(frozen=True)
class _Counting:
    """A `Watcher` that tells how many of `most` candidates were evaluated."""

    ledger: SearchLedger
    most: int
    progress: Progress

    def stage(self, name: str, part: Part | None = None) -> None:
        """See `Watcher`."""

    def generation(self, stage: str, generation: int, values: Sequence[float], best: Candidate) -> None:  # noqa: ARG002
        """See `Watcher`."""
        self.progress(min(self.ledger.spent.evaluations, self.most), self.most)

    def ended(self, why: str) -> None:
        """See `Watcher`."""


def search_on(
    loaded: LoadedModel,
    measured: Measured,
    options: EvolveOptions,
    tasks: Sequence[Task],
    starts: Mapping[Size, Mapping[str, Plan]],
    most: int,
    talk: Talk,
) -> Refined | None:
    """Search on at every size, see `refine`; None, with a warning, where that cannot be done: others are candidates."""
    from kvsearch.errors import IncompatibleError, UsageError

    try:
        searches = prepare_refinement(loaded, measured, options, tasks, starts)
    except (UsageError, IncompatibleError) as error:
        talk.warn(f"nothing is searched on: {error}")
        return None
    return refine(options, searches, most, talk)


def prepare_refinement(
    loaded: LoadedModel,
    measured: Measured,
    options: EvolveOptions,
    tasks: Sequence[Task],
    starts: Mapping[Size, Mapping[str, Plan]],
) -> tuple[PreparedSearch, ...]:
    """Prepare a search for every size from its `starts`, by name, among the policies that were measured.

    Raises:
        UsageError, IncompatibleError: the reason why there is nothing to search; see `prepare_search`.
    """
    from kvsearch.policies.registry import policy_of
    from kvsearch.search.bank.prepared import ranking_policies
    from kvsearch.search.evolve import Splits, at_size, prepare_search
    from kvsearch.search.start_plans import RESERVED, Base

    base = Base.choosing(loaded, [policy_of(spec) for spec in measured.curves.policies])
    ranking_policies(loaded.model, base.by_layer)  # told before prompts are read
    (budget, plans), *others = (
        (_budget(size), {name: plan for name, plan in made.items() if name not in RESERVED})
        for size, made in starts.items()
    )
    asked, splits = options.asking(options.protocol), Splits(tasks, (), ())
    first = prepare_search(base, budget, options, splits, asked, plans, measured.contexts)
    return (first, *(at_size(first, budget, plans) for budget, plans in others))


def refine(options: EvolveOptions, searches: tuple[PreparedSearch, ...], most: int, talk: Talk) -> Refined:
    """Search at every budget, `most` candidates each, and return what is better than all starts.

    The directory of `options` keeps what was measured: the same call goes on where it was killed, and what is finished
    is only read.

    Raises:
        UsageError: another search is in the directory, or another process writes there; see also `opened`.
        EnvironmentFault, IncompatibleError: see `Search.run` and `opened`.
    """
    from kvsearch.runs.contexts import CONTEXTS, write_contexts
    from kvsearch.runs.directory import CONFIG, LEDGER, write_json
    from kvsearch.runs.lock import locked
    from kvsearch.runs.sums import finish, finish_late, require_unchanged
    from kvsearch.search.ledger import require_same
    from kvsearch.search.settings import SearchLimits

    written = (CONFIG, LEDGER, CONTEXTS, FOUND, "*.safetensors")
    with locked(options.output):
        if (options.output / FOUND).exists():
            require_same(options.output, configuration(options, searches), unknown=SEARCHED)
            require_unchanged(options.output, FOUND, "restore it, or delete it and repeat the command")
            finish_late(options.output, FOUND, written)
            return refined(options.output, searches)
        with opened(options, searches, talk) as (ready, executor, run), talk.progress("candidates") as progress:
            write_contexts(run.directory, {"fitted": ready[0].hashes["fitted"]})
            watcher, found = _Counting(run.ledger, most * len(ready), progress), {}
            for number, search in enumerate(ready, 1):
                limits = SearchLimits(evaluations=number * most)  # one ledger has all searches
                outcome = search.search(executor, run.ledger, limits, watcher, f"budget {search.budget}: ")
                found[str(search.budget)] = _as_json(search, outcome)
            write_json(run.directory / FOUND, found)
            finish(run.directory, written)
        return refined(options.output, searches)


def _as_json(search: PreparedSearch, outcome: SearchOutcome) -> dict[str, Any]:
    """Return what the starts are worth, and the best candidates that are worth more."""
    known = {one.table.tobytes(): one.value for one in outcome.pool}
    starts = {name: known.get(table.tobytes()) for name, table in search.starts.items()}
    least = min((value for value in starts.values() if value is not None), default=math.inf)
    better = [] if outcome.flat else [one for one in outcome.pool if one.value < least][:MOST]
    found = [{"budgets": one.table.tolist(), "value": one.value, "where": one.where} for one in better]
    return {"starts": starts, "found": found, "ended": outcome.ended}


class FoundTable(Stored):
    """A candidate that was worth more than all starts, and where it was found."""

    budgets: Budgets
    value: Number
    where: Annotated[str, Field(min_length=1)]


class FoundAtSize(Stored):
    """What the search at one budget found."""

    found: tuple[FoundTable, ...]


def read_found(place: Path, searches: Sequence[PreparedSearch]) -> dict[int, tuple[FoundTable, ...]]:
    """Return what every search has found, by its budget; UsageError if the file is damaged."""
    said, found = stored(dict[int, FoundAtSize], read_json(place), place), {}
    for search in searches:
        if search.budget not in said:
            raise damaged(place, f"it says nothing of budget {search.budget}")
        found[search.budget] = said[search.budget].found
        for one in found[search.budget]:
            if not _is_of(search, one.budgets):
                raise damaged(place, f"{search.budget}.found: a table is no candidate of this search")
    return found


def _is_of(search: PreparedSearch, budgets: Budgets) -> bool:
    """Tell whether a table is one of a search: entries for one policy of every layer, none below its floor."""
    floors, (layers, heads) = search.base.floors, search.base.heads
    if [len(row) for row in budgets] != [heads] * len(floors):
        return False
    table = np.array(budgets, dtype=np.int64)
    chosen = (table > 0).any(1)
    one_each = chosen.reshape(search.base.choices, layers, -1).sum(0) == 1
    return bool(one_each.all() and (table >= floors)[chosen].all())


def refined(directory: Path, searches: Sequence[PreparedSearch]) -> Refined:
    """Return the plans that a finished refinement found; UsageError if what it has kept is damaged."""
    plans: dict[int, dict[str, Plan]] = {}
    found = read_found(directory / FOUND, searches)
    for search in searches:
        record = search.record(searched=True)
        plans[search.budget] = {
            NAME if number == 1 else f"{NAME}#{number}": search.plan(
                np.array(one.budgets, dtype=np.int64),
                {**search.as_json(), "found": one.where, "value": one.value},
                record,
            )
            for number, one in enumerate(found[search.budget], 1)
        }
    return Refined(plans, searches[0].record(searched=True))
