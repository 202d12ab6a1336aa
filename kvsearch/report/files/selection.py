"""What a selection found, read again from `selection.json`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field

from kvsearch.choose.acceptance import Rule
from kvsearch.choose.decomposition import BUDGETS_ALONE, POLICIES_ALONE
from kvsearch.choose.selection import PhaseResult, Reported, SelectionResult
from kvsearch.plan import Size
from kvsearch.plan.parsing import shown
from kvsearch.plan.protocol import Protocol
from kvsearch.report.files.stored import Stored, damaged, stored
from kvsearch.runs.estimates import Difference
from kvsearch.strategies.names import FULL

NAN = float("nan")


class _Written(Stored):
    phases: str


class _Report(Stored):
    """What the report split says; see `Reported` for the rest."""

    model_config = ConfigDict(extra="allow")

    held: dict[str, dict[str, Any]]
    uniform: str

    @property
    def fields(self) -> dict[str, Any]:
        """Those of `Reported`; older files have no bytes."""
        return {**(self.model_extra or {}), "held": {name: {"bytes": NAN, **one} for name, one in self.held.items()}}


class _SelectionFile(Stored):
    model: str
    budget: int | None = None
    ratio: float | None = None
    protocol: Protocol
    seed: int
    rule: Rule
    outcomes: tuple[dict[str, Any], ...]
    written: _Written
    report: _Report


def read_selection(data: Any, path: Path) -> SelectionResult:
    """Return what a selection found at one size; UsageError if the file at `path` is damaged."""
    found = stored(_SelectionFile, data, path)
    results = tuple(stored(PhaseResult, {**one, "methods": one.get("standings")}, path) for one in found.outcomes)
    chosen = [one for one in results if one.phases == found.written.phases]
    if not chosen:
        raise damaged(path, f"nothing was found for phases {shown(found.written.phases)}")
    size = stored(Size, {"budget": found.budget, "ratio": found.ratio}, path)
    result = SelectionResult(
        found.model, size, found.protocol, found.seed, found.rule, results, chosen[0], found.report.uniform,
        stored(Reported, found.report.fields, path),
    )  # fmt: skip
    for problem in _problems(result):
        raise damaged(path, problem)
    return result


def _problems(found: SelectionResult) -> Iterator[str]:
    """Yield what tables would look for in vain."""
    for result in found.results:
        known = {one.name for one in result.methods}
        for name in {result.best, result.written} - known:
            yield f"outcomes: {shown(name)} is chosen in phases {shown(result.phases)}, and not among the standings"
    chosen, report = found.chosen, found.report
    wanted = {chosen.best, chosen.written, FULL, *(one.name for one in chosen.finalists)}
    if report.by_budgets is not None:
        wanted |= {name for name in (report.by_budgets.equal, report.by_budgets.own) if name is not None}
    for name in sorted(wanted - report.scores.keys()):
        yield f"report.scores: has no {shown(name)}"
    for name in sorted(report.scores.keys() - report.held.keys()):
        yield f"report.held: has no {shown(name)}"
    parts = {POLICIES_ALONE, BUDGETS_ALONE} | ({report.parts.control} if report.parts is not None else set())
    for name in sorted(report.scores.keys() - {one.name for one in chosen.methods} - parts - {FULL, found.even}):
        yield f"report.scores: {shown(name)} is no method of the selection"
    if chosen.winner is not None and not chosen.finalists:
        yield f"outcomes: {shown(chosen.winner)} has won without a second stage"


def read_selections(data: dict[str, Any], path: Path) -> tuple[SelectionResult, ...]:
    """Return what was found at every size of a file, smaller ones first; UsageError if it is damaged."""
    several = data.get("budgets", {"": data})
    if not isinstance(several, dict) or not several:
        raise damaged(path, "budgets: must be an object of selections")
    return tuple(sorted((read_selection(one, path) for one in several.values()), key=_share))


def _share(found: SelectionResult) -> float:
    """Return what to sort by: budgets by themselves, ratios by what is kept."""
    return found.size.budget or 1 - (found.size.ratio or 0)


class StoredTry(NamedTuple):
    """A budget that a run tried on the way to the smallest one; see `kvsearch.choose.smallest.Tried`."""

    budget: int
    name: str
    loss: float
    confirmed: bool


class _RunSize(Stored):
    """What a run adds to the selection at a size."""

    loss: Difference
    plan: str
    words: tuple[str, ...] = ()


class _RunFile(Stored):
    sizes: dict[str, _RunSize] = Field(min_length=1)
    tried: tuple[StoredTry, ...] = ()


@dataclass(frozen=True, eq=False)
class RunChoice:
    """What a run chose at one size: its result, what the plan loses to the full cache, its file, and all in words."""

    selection: SelectionResult
    loss: Difference
    plan: str
    words: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A finished run, smaller sizes first, and the budgets that it tried where it had to find one."""

    choices: tuple[RunChoice, ...]
    tried: tuple[StoredTry, ...]


def read_run(data: Any, path: Path) -> StoredRun:
    """Return what a run found, from `run.json`; UsageError if the file at `path` is damaged."""
    found = stored(_RunFile, data, path)
    choices = [
        RunChoice(read_selection(data["sizes"][size], path), one.loss, one.plan, one.words)
        for size, one in found.sizes.items()
    ]
    choices.sort(key=lambda one: _share(one.selection))
    return StoredRun(tuple(choices), found.tried)
