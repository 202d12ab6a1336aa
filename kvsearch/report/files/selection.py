"""What a selection found, read again from `selection.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from kvsearch.choose.acceptance import Rule
from kvsearch.choose.selection import PhaseResult, Reported, SelectionResult
from kvsearch.errors import UsageError
from kvsearch.plan import Size
from kvsearch.plan.protocol import Protocol
from kvsearch.report.files.stored import Stored, reading, stored
from kvsearch.runs.estimates import Difference

NAN = float("nan")


class _Written(Stored):
    phases: str


class _SelectionFile(Stored):
    model: str
    budget: int | None = None
    ratio: float | None = None
    protocol: Protocol
    seed: int
    rule: Rule
    outcomes: tuple[dict[str, Any], ...]
    written: _Written
    report: dict[str, Any]


def read_selection(data: Any, path: Path) -> SelectionResult:
    """Return what a selection found at one size; UsageError if the file at `path` is damaged."""
    found = stored(_SelectionFile, data, path)
    # older files have no bytes
    with reading(path):
        held = {name: {"bytes": NAN, **one} for name, one in dict(found.report.get("held", {})).items()}
    results = tuple(stored(PhaseResult, {**one, "methods": one.get("standings")}, path) for one in found.outcomes)
    chosen = [one for one in results if one.phases == found.written.phases]
    if not chosen:
        raise UsageError(f"{path} is damaged (nothing was found for phases {found.written.phases!r}): restore it")
    size = stored(Size, {"budget": found.budget, "ratio": found.ratio}, path)
    return SelectionResult(
        found.model, size, found.protocol, found.seed, found.rule, results, chosen[0],
        str(found.report.get("uniform")), stored(Reported, {**found.report, "held": held}, path),
    )  # fmt: skip


def read_selections(data: dict[str, Any], path: Path) -> tuple[SelectionResult, ...]:
    """Return what was found at every size of a file, smaller ones first; UsageError if it is damaged."""
    several = data.get("budgets", {"": data})
    if not isinstance(several, dict) or not several:
        raise UsageError(f"{path} is damaged (budgets: must be an object of selections): restore it")
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


class _RunFile(Stored):
    sizes: dict[str, dict[str, Any]] = Field(min_length=1)
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
        RunChoice(
            read_selection(one, path), stored(Difference, one.get("loss"), path), str(one.get("plan")),
            tuple(map(str, one.get("words", ()))),
        )
        for one in found.sizes.values()
    ]  # fmt: skip
    choices.sort(key=lambda one: _share(one.selection))
    return StoredRun(tuple(choices), found.tried)
