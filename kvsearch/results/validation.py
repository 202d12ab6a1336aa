"""The result of a validation: which signals of a profile are worth following.

Reading it needs nothing of an evaluation, so that `kvsearch export` can heed the verdicts.
"""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import Field

from kvsearch.core.fields import Count, Index, Record, Sha256, Text
from kvsearch.core.parsing import read_json
from kvsearch.plan import ModelFingerprint
from kvsearch.plan.saved import PROFILE
from kvsearch.plan.schema import Protocol
from kvsearch.results import Result, read_content
from kvsearch.selection.verdicts import BudgetVerdicts, JudgedSignal

if TYPE_CHECKING:
    from kvsearch.selection.from_signals import Strategy

VALIDATION_FILE: Final = "validation/validation.json"  # in the directory of the calibration


class TaskContent(Record):
    """Contexts and questions of one task, identified by content."""

    contexts: Count
    questions: Count
    metric: Text
    rows_sha256: Sha256


class ValidationResult(Result, Record):
    """Signals of one profile, judged by the same questions at one or several sizes, smaller budgets first.

    `split` is None for tasks without splits.
    """

    SCHEMA: ClassVar[str] = "kvsearch.validation/3"

    model: ModelFingerprint
    profile_sha256: Sha256
    tasks: dict[Text, TaskContent] = Field(min_length=1)
    split: Text | None
    protocol: Protocol
    seed: Index
    budgets: tuple[BudgetVerdicts, ...] = Field(min_length=1)

    def merged(self, other: ValidationResult) -> ValidationResult:
        """Return all of this validation, and what only the other one, of the same conditions, has judged."""
        by_size = {(at.budget, at.ratio or 0.0): at for at in other.budgets}
        for at in self.budgets:
            size = at.budget, at.ratio or 0.0
            before = by_size[size].signals if size in by_size else ()
            signals = {judged.place: judged for judged in (*before, *at.signals)}
            by_size[size] = at.model_copy(update={"signals": tuple(signals[place] for place in sorted(signals))})
        return self.model_copy(update={"budgets": tuple(by_size[size] for size in sorted(by_size))})


def load_validation(path: Path) -> ValidationResult | None:
    """Read a file; None if there is none.

    Raises:
        UsageError: see `read_content`.
        EnvironmentFault: it cannot be read.
    """
    return read_content(ValidationResult, read_json(path), path) if path.exists() else None


def find_harmful(directory: Path, strategy: Strategy, budget: float) -> str | None:
    """Return a line about the signals of a strategy that were judged harmful in its phases.

    `directory` is that of the calibration, `budget` in entries per kv head. What counts for a signal is the verdict at
    the budget nearest to this one, of those at which it was judged. None if no signal was harmful, if they were not
    validated, or if the validation was of another profile than the one in the directory.

    Raises:
        UsageError: the file of the validation is damaged.
    """
    validation = load_validation(directory / VALIDATION_FILE)
    profile = directory / PROFILE
    if validation is None:
        return None
    if profile.exists() and sha256(profile.read_bytes()).hexdigest() != validation.profile_sha256:
        return None
    uses = (("route", strategy.route), ("budgets", strategy.budgets))
    nearest = (_nearest(validation, use, strategy.phases, budget) for use in uses)
    bad = [(signal, at) for signal, at in filter(None, nearest) if signal.verdict == "harmful"]
    return "; ".join(f"{signal.words} was judged harmful at {at.size}: {signal.reason}" for signal, at in bad) or None


def _nearest(
    validation: ValidationResult, use: tuple[str, str | None], phases: str, budget: float
) -> tuple[JudgedSignal, BudgetVerdicts] | None:
    """Return what was judged of a signal in its use nearest to a budget, by ratio, and where."""
    verdicts = [
        (judged, at)
        for at in validation.budgets
        for judged in at.signals
        if (judged.kind, judged.signal, judged.phases) == (*use, phases)
    ]
    return min(verdicts, key=lambda verdict: abs(math.log(verdict[1].budget / budget)), default=None)
