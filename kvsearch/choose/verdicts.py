"""Verdicts of a validation of signals: their records, and the file that they are kept in.

A file is JSON with a "schema" of `SCHEMA` and the fields of `Validation`. Reading it needs nothing of an evaluation, so
that `kvsearch export` can heed the verdicts.
"""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan import ModelFingerprint, atomic_write, canonical_json
from kvsearch.plan.fields import Count, Index, Record, Sha256, Text
from kvsearch.plan.parsing import problems_of, read_json
from kvsearch.plan.protocol import Protocol
from kvsearch.plan.saved import PROFILE
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runs.identity import difference

if TYPE_CHECKING:
    from kvsearch.strategies.from_signals import Strategy

SCHEMA, FILE = "kvsearch.validation/3", "validation.json"
BEFORE = "kvsearch.validation/2"  # its "entropy" for budgets was that of rows
Kind = Literal["route", "budgets"]
Phases = Literal["prefill", "decode", "both"]
Verdict = Literal["useful", "unproven", "useless", "harmful"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SETTINGS: Final[tuple[Phases, ...]] = get_args(Phases)


class SignalUse(NamedTuple):
    """A signal, what for, and in which phases: what is judged."""

    signal: str
    kind: Kind
    phases: Phases


class Gains(Record):
    """What the forward strategy scores above its controls, paired by question; "random" is above their mean.

    The 95% intervals are over contexts, and take the controls as they were drawn. `reach` is how far from the mean of
    the random controls one more random strategy may be, by their spread (95%); 0 where they are all that there are. The
    uniform control is one strategy, too, so whatever gains less on either may be as random as they are.
    """

    inverse: Difference
    uniform: Difference
    random: Difference
    reach: float = Field(ge=0, allow_inf_nan=False)


class Judged(Record):
    """A signal as a route or for budgets: the scores of its strategy and controls, and what follows from them.

    `exact`: the random controls are all other orders of the forward budgets, each once.
    """

    signal: Text
    kind: Kind
    phases: Phases
    forward: Estimate
    inverse: Estimate
    uniform: Estimate
    random: tuple[Estimate, ...] = Field(min_length=1)
    exact: bool = False
    gains: Gains
    verdict: Verdict
    reason: Text

    @property
    def place(self) -> tuple[int, str, int]:
        """What was judged, as a key to sort by: routes first, then budgets, by signal and phases."""
        return KINDS.index(self.kind), self.signal, SETTINGS.index(self.phases)

    @property
    def lower(self) -> int:
        """How many of the random controls score lower than the forward strategy."""
        return sum(one.mean < self.forward.mean for one in self.random)

    @property
    def words(self) -> str:
        """What was judged, for people: `cosine as a route in prefill`."""
        use = "as a route" if self.kind == "route" else "for budgets"
        return f"{self.signal} {use} in {'both phases' if self.phases == 'both' else self.phases}"


class AtBudget(Record):
    """All that was judged at one size: `budget` entries per kv head, on average, or of a prompt as long as calibrated.

    `ratio` is the share to evict, where that was asked for.
    """

    budget: float = Field(gt=0, allow_inf_nan=False)
    ratio: float | None = Field(default=None, gt=0, lt=1)
    full: Estimate
    signals: tuple[Judged, ...]

    @property
    def size(self) -> str:
        """The size as it was asked for, for people."""
        return f"{self.budget:g} entries per kv head" if self.ratio is None else f"{100 * self.ratio:g}% evicted"


class TaskContent(Record):
    """What was asked of one task, by content."""

    contexts: Count
    questions: Count
    metric: Text
    rows_sha256: Sha256


class Conditions(Record):
    """What was asked of which profile. `split` is the part of the examples, None of tasks that have no parts."""

    model: ModelFingerprint
    profile_sha256: Sha256
    tasks: dict[Text, TaskContent] = Field(min_length=1)
    split: Text | None
    protocol: Protocol
    seed: Index

    def difference(self, other: Conditions) -> str | None:
        """Say where the other one is not of the same profile and questions, which makes it "there"; None if it is."""
        names = set(Conditions.model_fields) - {"model"}  # the profile has it
        mine, theirs = (one.model_dump(mode="json", include=names) for one in (self, other))
        return difference(theirs, mine)


class Validation(Conditions):
    """Signals of one profile, judged by the same questions at one or several sizes, smaller budgets first."""

    budgets: tuple[AtBudget, ...] = Field(min_length=1)

    def merged(self, other: Validation) -> Validation:
        """Return all of this validation, and what only the other one, of the same conditions, has judged."""
        found = {(at.budget, at.ratio or 0.0): at for at in other.budgets}
        for at in self.budgets:
            size = at.budget, at.ratio or 0.0
            there = found[size].signals if size in found else ()
            signals = {one.place: one for one in (*there, *at.signals)}
            found[size] = at.model_copy(update={"signals": tuple(signals[place] for place in sorted(signals))})
        return self.model_copy(update={"budgets": tuple(found[size] for size in sorted(found))})


def side(gain: Difference) -> int:
    """Return 1 if a difference is above zero, -1 if below, 0 if its interval cannot tell."""
    return int(gain.low > 0) - int(gain.high < 0)


def as_json(found: Validation) -> dict[str, Any]:
    """Return the content of a file."""
    return {"schema": SCHEMA, **found.model_dump(mode="json")}


def save_validation(found: Validation, path: Path) -> None:
    """Write a file in one step, in place of one that is there; EnvironmentFault if it cannot be written."""
    atomic_write(path, canonical_json(as_json(found)))


def load_validation(path: Path) -> Validation | None:
    """Read a file; None if there is none.

    Raises:
        UsageError: it is no such file, or is damaged.
        EnvironmentFault: it cannot be read.
    """
    if not path.exists():
        return None
    remedy = "delete it and validate again"
    try:
        content = read_json(path)
    except UsageError as error:
        raise UsageError(f"{error}: {remedy}") from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if schema not in (SCHEMA, BEFORE):
        raise UsageError(f"{path} is no {SCHEMA} file: {remedy}")
    try:
        found = Validation.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged ({problems_of(error)[0]}): {remedy}") from error
    return found if schema == SCHEMA else _renamed(found)


def _renamed(found: Validation) -> Validation:
    """Return a validation of `BEFORE` with the names that signals have today."""

    def renamed(at: AtBudget) -> AtBudget:
        rows = {"signal": "entropy-rows"}
        signals = (one.model_copy(update=rows) if one.signal == "entropy" else one for one in at.signals)
        return at.model_copy(update={"signals": tuple(signals)})

    return found.model_copy(update={"budgets": tuple(renamed(at) for at in found.budgets)})


def harmful(directory: Path, strategy: Strategy, budget: float) -> str | None:
    """Return a line about the signals of a strategy that were judged harmful in its phases.

    `directory` is that of the calibration, `budget` in entries per kv head. What counts for a signal is the verdict at
    the budget nearest to this one, of those at which it was judged. None if no signal was harmful, if they were not
    validated, or if the validation was of another profile than the one in the directory. Only forward directions are
    judged.

    Raises:
        UsageError: the file of the validation is damaged.
    """
    found, profile = load_validation(directory / FILE), directory / PROFILE
    if found is None:
        return None
    if profile.exists() and sha256(profile.read_bytes()).hexdigest() != found.profile_sha256:
        return None
    route = None if strategy.inverse_route else strategy.route
    budgets = None if strategy.inverse_budgets else strategy.budgets
    nearest = (_nearest(found, use, strategy.phases, budget) for use in (("route", route), ("budgets", budgets)))
    bad = [(one, at) for one, at in filter(None, nearest) if one.verdict == "harmful"]
    return "; ".join(f"{one.words} was judged harmful at {at.size}: {one.reason}" for one, at in bad) or None


def _nearest(
    found: Validation, use: tuple[str, str | None], phases: str, budget: float
) -> tuple[Judged, AtBudget] | None:
    """Return what was judged of a signal in its use nearest to a budget, by ratio, and where."""
    there = [
        (one, at) for at in found.budgets for one in at.signals if (one.kind, one.signal, one.phases) == (*use, phases)
    ]
    return min(there, key=lambda judged: abs(math.log(judged[1].budget / budget)), default=None)
