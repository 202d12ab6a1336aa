"""What a validation of signals found: the rule of its verdicts, its records, their file, and the table of them.

A file is JSON with a "schema" of `SCHEMA` and the fields of `Validation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError

from kvsearch.errors import UsageError
from kvsearch.evaluation.compare import LEAST_USEFUL
from kvsearch.evaluation.plan_comparison import PlanComparison
from kvsearch.evaluation.run_directory import difference
from kvsearch.evaluation.statistics import Difference, Estimate
from kvsearch.plan import ModelFingerprint, atomic_write, canonical_json
from kvsearch.plan.fields import Count, Index, Record, Sha256, Text
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import parse_json, problems_of
from kvsearch.plan.protocol import Protocol

if TYPE_CHECKING:
    from rich.console import Group

SCHEMA, FILE = "kvsearch.validation/2", "validation.json"
Kind = Literal["route", "budgets"]
Phases = Literal["prefill", "decode", "both"]
Verdict = Literal["useful", "useless", "harmful"]

SCORES = ("signal", "kind", "phases", "forward", "inverse", "uniform", "random", "verdict")
GAINS = ("signal", "kind", "phases", "forward minus", "difference", "95% interval")
TEXTS = ("signal", "kind", "phases", "verdict", "forward minus")
LEAST_CONTEXTS: Final = 6  # of fewer, all agree by chance more often than one time in twenty (2 * 0.5**6 = 0.031)
_UNIFORM: Final[dict[Kind, str]] = {"route": "one pattern in all layers", "budgets": "equal budgets"}
_CHANCE: Final = "more than strategies differ by chance"
_RANDOM: Final[dict[Kind, str]] = {"route": "random patterns", "budgets": "random permutations"}


class Subject(NamedTuple):
    """What is judged: a signal, what for, and in which phases."""

    signal: str
    kind: Kind
    phases: Phases


class Compared(NamedTuple):
    """The names, in a comparison, of the strategies that a subject is judged by."""

    forward: str
    inverse: str
    uniform: str
    random: tuple[str, ...]


class Gains(Record):
    """What the forward strategy scores above its controls, paired by question; "random" is above their mean.

    The 95% intervals are over contexts, and take the controls as they were drawn. `reach` is how far from the mean of
    the random controls one more random strategy may be, by their spread (95%). The uniform control is one strategy,
    too, so whatever gains less than `reach` on either may be as random as they are.
    """

    inverse: Difference
    uniform: Difference
    random: Difference
    reach: float = Field(ge=0)

    @property
    def beyond(self) -> tuple[int, int]:
        """Of the uniform and the random controls: 1 if above, -1 if below, 0 if a random strategy could score that."""
        uniform, random = (_side(one) if abs(one.mean) > self.reach else 0 for one in (self.uniform, self.random))
        return uniform, random


class Judged(Record):
    """A signal as a route or for budgets: the scores of its strategy and controls, and what follows from them."""

    signal: Text
    kind: Kind
    phases: Phases
    forward: Estimate
    inverse: Estimate
    uniform: Estimate
    random: tuple[Estimate, ...] = Field(min_length=1)
    gains: Gains
    verdict: Verdict
    reason: Text

    @property
    def place(self) -> tuple[int, str, int]:
        """What was judged, as a key to sort by: routes first, then budgets, by signal and phases."""
        return get_args(Kind).index(self.kind), self.signal, get_args(Phases).index(self.phases)

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

    budget: float = Field(gt=0)
    ratio: float | None = None
    full: Estimate
    signals: tuple[Judged, ...]

    @property
    def size(self) -> str:
        """The size as it was asked for, for people."""
        return f"{self.budget:g} entries per kv head" if self.ratio is None else f"{100 * self.ratio:g}% evicted"

    @property
    def doubt(self) -> str | None:
        """Why the verdicts may say little, if they do."""
        if self.full.mean >= LEAST_USEFUL:
            return None
        return f"the full cache itself scores {self.full.mean:.2f}: these questions cannot tell signals apart"


class Asked(Record):
    """What was asked of one task, by content."""

    contexts: Count
    questions: Count
    metric: Text
    rows_sha256: Sha256


class Conditions(Record):
    """What was asked of which profile. `split` is the part of the examples, None of tasks that have no parts."""

    model: ModelFingerprint
    profile_sha256: Sha256
    tasks: dict[Text, Asked] = Field(min_length=1)
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
        """All of this validation, and what only the other one, of the same conditions, has judged."""
        found = {(at.budget, at.ratio or 0.0): at for at in other.budgets}
        for at in self.budgets:
            size = at.budget, at.ratio or 0.0
            there = found[size].signals if size in found else ()
            signals = {one.place: one for one in (*there, *at.signals)}
            found[size] = at.model_copy(update={"signals": tuple(signals[place] for place in sorted(signals))})
        return self.model_copy(update={"budgets": tuple(found[size] for size in sorted(found))})


def judge(kind: Kind, gains: Gains, contexts: int, constant: bool = False) -> tuple[Verdict, str]:
    """The verdict on a signal, and the reason for it, from what its forward strategy gains on its controls.

    "Above" and "below" mean that the 95% interval of the difference is; "by more than chance" that it is also more than
    strategies differ by chance (`Gains.reach`). The first that applies:

    1. useless: the signal is `constant`, so that forward and inverse are the same strategy;
    2. useless: there are fewer than `LEAST_CONTEXTS` different contexts, which cannot tell;
    3. harmful: forward is below the uniform control, so not using the signal is better on this model, be it by the
       signal's fault or by bad luck; or it is below the random controls by more than chance;
    4. useful: forward is above its inverse, and above the uniform or the random controls by more than chance;
    5. useless: all else.

    Of signals that say nothing about one in twenty is called useful. Harmful are those whose strategy is a bad one.
    """
    (uniform, random), inverse = gains.beyond, _side(gains.inverse)
    uniform = min(uniform, _side(gains.uniform))
    names = {_UNIFORM[kind]: uniform, _RANDOM[kind]: random}
    if constant:
        return "useless", "constant: forward and inverse are the same strategy"
    if contexts < LEAST_CONTEXTS:
        return "useless", f"too few contexts to tell: {contexts} different ones, at least {LEAST_CONTEXTS} are needed"
    if min(uniform, random) < 0:
        return "harmful", f"forward is below {' and '.join(name for name, side in names.items() if side < 0)}"
    if inverse > 0 and max(uniform, random) > 0:
        above = " and ".join(name for name, side in names.items() if side > 0)
        level = [f"; {name} could be as good by chance" for name, side in names.items() if side == 0]
        return "useful", f"forward is above its inverse, and above {above} by {_CHANCE}{''.join(level)}"
    return "useless", _useless(kind, gains)


def prediction_reach(controls: Sequence[float]) -> float:
    """How far from the mean of some random draws one more may be (95%): t s sqrt(1 + 1/n); n is 2 or more."""
    from scipy.stats import t

    count = len(controls)
    return float(t.ppf(0.975, count - 1) * stdev(controls) * (1 + 1 / count) ** 0.5)


def judged(result: PlanComparison, subject: Subject, names: Compared) -> Judged:
    """A signal with its verdict, from the scores of a comparison."""
    gains = Gains(
        inverse=result.gain(names.forward, [names.inverse]),
        uniform=result.gain(names.forward, [names.uniform]),
        random=result.gain(names.forward, names.random),
        reach=prediction_reach([result.score(name).mean for name in names.random]),
    )
    constant = result.labels[names.forward] == result.labels[names.inverse]
    verdict, reason = judge(subject.kind, gains, sum(result.comparison.distinct.values()), constant)
    return Judged(
        **subject._asdict(),
        forward=result.score(names.forward),
        inverse=result.score(names.inverse),
        uniform=result.score(names.uniform),
        random=tuple(map(result.score, names.random)),
        gains=gains,
        verdict=verdict,
        reason=reason,
    )


def _useless(kind: Kind, gains: Gains) -> str:
    """Why a signal that does no harm does no good."""
    inverse, better = _side(gains.inverse), max(gains.beyond)
    controls = f"{_UNIFORM[kind]} and {_RANDOM[kind]}"
    if all(gain.wins == gain.losses == 0 for gain in (gains.inverse, gains.uniform, gains.random)):
        return "forward and all controls score the same on every question"
    sides = {_UNIFORM[kind]: _side(gains.uniform), _RANDOM[kind]: _side(gains.random)}
    above = " and ".join(name for name, side in sides.items() if side > 0)
    if inverse > 0 and above:
        return f"forward is above {above}, but not by {_CHANCE}: it may be luck"
    if inverse > 0:
        return f"forward is not above {controls}: the gap to the inverse comes from a bad inverse"
    if better > 0:
        return "forward is above a control, but no better than its inverse: the signal's direction does not matter"
    if inverse < 0:
        return f"forward is below its inverse, and not above {controls} by {_CHANCE}: it points the wrong way"
    return f"forward is not above its inverse, nor above {controls} by {_CHANCE}"


def _side(gain: Difference) -> int:
    """1 if a difference is above zero, -1 if below, 0 if its interval cannot tell."""
    return int(gain.low > 0) - int(gain.high < 0)


def as_json(found: Validation) -> dict[str, Any]:
    """The content of a file."""
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
        content = parse_json(read_bytes(path), str(path))
    except UsageError as error:
        raise UsageError(f"{error}: {remedy}") from error
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise UsageError(f"{path} is no {SCHEMA} file: {remedy}")
    try:
        return Validation.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged ({problems_of(error)[0]}): {remedy}") from error


def validation_tables(found: Validation, at: AtBudget) -> tuple[Group, Group]:
    """Scores at one size in percent with the verdicts, and what every strategy gains on its controls.

    They are two, and narrow, so that 80 columns show them whole.
    """
    questions = sum(task.questions for task in found.tasks.values())
    title = f"{found.model.name}, {at.size}, {found.protocol}: score in percent, full cache {100 * at.full.mean:.1f}"
    scores = [tuple(_score_cells(judged)) for judged in at.signals]
    note = f"{questions} questions of {', '.join(found.tasks)}; paired differences, 95% intervals over contexts"
    gains = [row for judged in at.signals for row in _gain_rows(judged)]
    return (
        _titled(title, SCORES, scores, "random: mean of the random controls\n"),
        _titled("forward minus its controls, in points", GAINS, gains, note),
    )


def _titled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Group:
    """A table between its title and its note."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="italic"), table, Text(note, style="italic"))


def verdict_lines(at: AtBudget) -> Iterator[str]:
    """Why every signal got its verdict, a line each."""
    for judged in at.signals:
        advice = ", do not build strategies of this size on it" if judged.verdict == "harmful" else ""
        scores = [one.mean for one in judged.random]
        spread = f"they score {_percent(min(scores))} to {_percent(max(scores))}"
        rank = f"{judged.lower} of {len(judged.random)} random controls score lower, {spread}"
        yield f"{judged.words} is {judged.verdict}{advice}: {judged.reason}; {rank}"


def _score_cells(judged: Judged) -> Iterator[str]:
    yield from (judged.signal, judged.kind, judged.phases)
    yield from (_percent(one.mean) for one in (judged.forward, judged.inverse, judged.uniform))
    yield from (_percent(fmean(one.mean for one in judged.random)), judged.verdict)


def _gain_rows(judged: Judged) -> Iterator[tuple[str, ...]]:
    """A row for every control; what is judged is named in the first."""
    named: tuple[str, ...] = (judged.signal, judged.kind, judged.phases)
    gains = judged.gains
    for control, gain in (("inverse", gains.inverse), ("uniform", gains.uniform), ("random", gains.random)):
        interval = f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        yield (*named, control, f"{100 * gain.mean:+.1f}", interval)
        named = ("", "", "")


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"
