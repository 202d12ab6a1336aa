"""The recipe of a PolyKV calibration (arXiv 2606.15157): which patterns are tried where, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvsearch.calibration.base import Flag, Number, Progress, Recipe, Whole
from kvsearch.calibration.options import ANSWER_TOKENS, SIGNALS, PolykvOptions, Signal
from kvsearch.calibration.polykv.patterns import candidates
from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan import PHASES, Phase, PolicySpec
from kvsearch.plan.fields import Entries, refuse
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies import Policy
from kvsearch.signals.table import ENTROPIES, MEASURES, ROUTES, SENSITIVITIES

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile

GIGABYTE = 10**9
PhaseNames = Literal["prefill", "decode", "both"]
CHOICES = {"route": (*ROUTES, "none"), "budget_signal": ("uniform", *SENSITIVITIES)}


def _listed(value: object) -> object:
    """A list of names or numbers as it is typed, "a,b" or 64, as a list."""
    if isinstance(value, str):
        return [_number(item.strip()) for item in value.split(",")]
    return [value] if isinstance(value, int) else value


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _ascending(budgets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(budgets))


def _in_order(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
    return tuple(sorted(signals, key=SIGNALS.index))


Listed = BeforeValidator(_listed)


class PolykvRecipe(Recipe):
    """PolyKV; see `PolykvOptions`.

    `policy` is the pattern of strategies without a route. `params` are settings as in `candidates`: window of all
    patterns that have one, or snapkv.window. `route`, `budget_signal` and `strategy_phases` are recorded for those who
    make strategies of the profile. `max_memory` is in GB.
    """

    unit: ClassVar[str] = "questions"
    own_params: ClassVar[bool] = False
    # how it is run, not what is measured: results are the same up to rounding
    running: ClassVar[tuple[str, ...]] = ("batch", "max_memory")

    method: Literal["polykv"] = "polykv"
    policy: str = "snapkv"
    patterns: Annotated[tuple[str | PolicySpec, ...], Listed] = ("paper",)
    budgets: Annotated[tuple[Entries, ...], Listed, AfterValidator(_ascending)] = (512,)
    phases: PhaseNames = "both"
    signals: Annotated[tuple[Signal, ...], Listed, AfterValidator(_in_order)] = SIGNALS
    literal_entropy: Flag = False
    entropy_rows: Whole = Field(default=32, ge=1)
    answer_tokens: Whole = Field(default=ANSWER_TOKENS, ge=1)
    protocol: Protocol = QUESTION_AGNOSTIC
    naive: Flag = False
    route: str | None = None
    budget_signal: str | None = None
    strategy_phases: PhaseNames | None = None
    batch: Whole = Field(default=8, ge=1)
    max_memory: Number | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _consistent(self) -> PolykvRecipe:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        for name in ("patterns", "budgets", "signals"):
            values = getattr(self, name)
            if not values or any(value in values[:index] for index, value in enumerate(values)):
                problems.append(((name,), "must have at least one item, and each once"))
        if self.literal_entropy and "entropy" not in self.signals:
            problems.append((("literal_entropy",), "is another reading of the signal entropy, which is not measured"))
        problems += [((name,), what) for name in CHOICES if (what := self._not_measured(name))]
        if self.strategy_phases not in (None, self.phases) and self.phases != "both":
            problems.append((("strategy_phases",), f"is {self.strategy_phases}, but only {self.phases} is measured"))
        refuse(problems)
        return self

    def _not_measured(self, name: str) -> str | None:
        """What is wrong with the route or the budget signal, if anything."""
        value, known = getattr(self, name), CHOICES[name]
        if value is None:
            return None
        if value not in known:
            return f"{value!r} is unknown{suggest(value, known)}"
        needed = _measured_by(value)
        if needed is None or (needed in self.signals and (value != "entropy-literal" or self.literal_entropy)):
            return None
        advice = "literal_entropy" if value == "entropy-literal" else f"signals with {needed}"
        return f"is {value}, which is not measured: ask for {advice}"

    def _tried(self) -> tuple[list[Policy], list[str]]:
        return candidates(self.patterns, self.params, self.measured_phases, self.budgets)

    @property
    def measured_phases(self) -> tuple[Phase, ...]:
        """The phases in which patterns are tried."""
        return PHASES[self.phases]

    def remarks(self) -> list[str]:
        """What is left out, and patterns that cannot be told apart; UsageError as `candidates`."""
        return self._tried()[1]

    def policies(self) -> list[Policy]:
        """The patterns that are tried; UsageError and EnvironmentFault as `candidates`."""
        return self._tried()[0]

    def make_policy(self) -> Policy:
        """The pattern of strategies without a route; UsageError as `candidates`, or if it is none of the patterns."""
        for policy in self.policies():
            if policy.name == self.policy:
                return policy
        names = [policy.name for policy in self.policies()]
        why = [f" ({remark})" for remark in self.remarks() if remark.startswith(f"{self.policy} is left out")]
        raise UsageError(
            f"policy {self.policy!r}, for strategies without a route, is none of the patterns{''.join(why)}: name one "
            f"of {', '.join(names)} with --policy"
        )

    def resolved(self) -> dict[str, Any]:
        """Everything that decides what is measured, patterns with all their parameters; UsageError as `make_policy`."""
        self.make_policy()
        patterns = [{"name": policy.name, "params": policy.parameters()} for policy in self.policies()]
        return {**self.model_dump(mode="json", exclude=set(self.running)), "patterns": patterns, "params": {}}

    def scope(self, data: CalibrationData) -> str:
        if self.protocol == QUESTION_AGNOSTIC:
            return f"{data.questions} questions after {len(data.contexts)} contexts"
        return f"{data.questions} contexts with a question"

    def options(self) -> PolykvOptions:
        """The settings of the calibration."""
        only = None if self.phases == "both" else self.phases  # no strategy can use another phase
        recorded = {"route": self.route, "budget_signal": self.budget_signal, "phases": self.strategy_phases or only}
        return PolykvOptions(
            base=self.policy,
            budgets=self.budgets,
            phases=self.measured_phases,
            signals=self.signals,
            literal_entropy=self.literal_entropy,
            entropy_rows=self.entropy_rows,
            answer_tokens=self.answer_tokens,
            protocol=self.protocol,
            naive=self.naive,
            batch=self.batch,
            max_memory=None if self.max_memory is None else int(self.max_memory * GIGABYTE),
            recorded={name: value for name, value in recorded.items() if value is not None},
        )

    def calibrate(
        self,
        loaded: LoadedModel,
        data: CalibrationData,
        policy: Policy,  # noqa: ARG002 - one of the patterns
        seed: int,
        progress: Progress | None = None,
        directory: Path | None = None,
        started: Callable[[], None] | None = None,
    ) -> Profile:
        """See `calibrate_polykv`; finished samples are kept in `directory`, and those that are there taken over."""
        from kvsearch.calibration.polykv import measure

        options, policies = self.options(), self.policies()
        return measure.calibrate_polykv(loaded, data, options, policies, seed, progress, directory, started)


def _measured_by(name: str) -> Signal | None:
    """The signal that a route or budget signal is computed from; None: it needs none."""
    if name in ENTROPIES:
        return "entropy"
    measure = name.partition("-")[0]
    if measure not in MEASURES:
        return None
    return "ppl" if MEASURES[measure] == "nll" else "cosine"
