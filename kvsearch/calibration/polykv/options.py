"""The options of a PolyKV calibration (arXiv 2606.15157): which patterns are tried where, and what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from kvsearch.calibration.options import (
    ANSWER_TOKENS,
    AnswerTokens,
    CalibrationOptions,
    Flag,
    Number,
    ProtocolChoice,
    Whole,
)
from kvsearch.config.options import Listed, Option, above_zero
from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan import PHASES, Phase, PolicySpec
from kvsearch.plan.fields import Entries, refuse
from kvsearch.plan.protocol import QUESTION_AGNOSTIC

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.policies import Policy

Signal = Literal["cosine", "ppl", "entropy"]
PhaseNames = Literal["prefill", "decode", "both"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
GIGABYTE = 10**9
PANEL = "PolyKV"


class PolykvOptions(CalibrationOptions):
    """What is measured of every layer, phase and pattern, and how.

    `policy` is the pattern that strategies without a route use in all layers. `params` are settings as in
    `candidates`: window of all patterns that have one, or snapkv.window. Every pattern is tried at `budgets` entries
    per kv head, in one layer and one of `phases` at a time. Of `signals`, "cosine" brings the relative error with it,
    "ppl" the loss of the continuation, which is cut to `answer_tokens` of the answer. "entropy" is that of the mean
    attention row of the prompt (phase "prefill") and of the continuation (phase "decode"), and brings the mean entropy
    of the rows with it, of the last `entropy_rows` of the prompt and of all of the continuation.

    `naive` runs the model once for everything that is tried. `route`, `budget_signal` and `strategy_phases` only go
    into the profile, for those who make strategies of it. `max_memory` is in GB, besides the weights.
    """

    own_params: ClassVar[bool] = False
    # how it is run, not what is measured: results are the same up to rounding
    running: ClassVar[tuple[str, ...]] = ("batch", "max_memory")

    method: Literal["polykv"] = "polykv"
    policy: str = "snapkv"
    patterns: Annotated[
        tuple[str | PolicySpec, ...],
        Listed,
        Option(
            "Patterns that are tried; paper: its nine, all: every policy.",
            metavar="NAME,...",
            panel=PANEL,
            shown="paper",
        ),
    ] = ("paper",)
    budgets: Annotated[
        tuple[Entries, ...],
        Listed,
        AfterValidator(lambda budgets: tuple(sorted(budgets))),
        Option("Entries per kv head that patterns are tried at.", metavar="N,...", panel=PANEL, shown="512"),
    ] = (512,)
    phases: Annotated[PhaseNames, Option("When patterns are tried: prefill, decode or both.", panel=PANEL)] = "both"
    signals: Annotated[
        tuple[Signal, ...],
        Listed,
        AfterValidator(lambda signals: tuple(sorted(signals, key=SIGNALS.index))),
        Option(
            "What is measured: cosine (and relative error) of attention outputs, ppl of the answers, entropy (both).",
            metavar="NAME,...",
            panel=PANEL,
            shown="cosine,ppl,entropy",
        ),
    ] = SIGNALS
    entropy_rows: Annotated[
        Whole, Field(ge=1), Option("Last query rows of the prompt that entropy-rows is the mean over.", panel=PANEL)
    ] = 32
    answer_tokens: AnswerTokens = ANSWER_TOKENS
    protocol: ProtocolChoice = QUESTION_AGNOSTIC
    naive: Annotated[
        Flag,
        Option(
            "Run the model anew for everything that is tried, as the paper does: slow, to check the results by.",
            panel=PANEL,
        ),
    ] = False
    route: Annotated[
        str | None,
        Option("Recorded for strategies: what chooses patterns, cosine, error, ppl, nll or none.", panel=PANEL),
    ] = None
    budget_signal: Annotated[
        str | None,
        Option("Recorded for strategies: what shares out the budget, such as entropy, ppl or uniform.", panel=PANEL),
    ] = None
    strategy_phases: Annotated[
        PhaseNames | None, Option("Recorded for strategies: when they evict, if not in all phases.", panel=PANEL)
    ] = None
    batch: Annotated[Whole, Field(ge=1), Option("Prompts at a time.", panel=PANEL)] = 8
    max_memory: Annotated[
        Number | None,
        AfterValidator(above_zero),
        Option(
            "Most memory besides the weights.",
            metavar="GB",
            panel=PANEL,
            shown="4.3, of a GPU most of what is free",
        ),
    ] = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from kvsearch.signals.table import ROUTES, SENSITIVITIES

        problems: list[tuple[tuple[str | int, ...], str]] = []
        for name in ("patterns", "budgets", "signals"):
            values = getattr(self, name)
            if not values or any(value in values[:index] for index, value in enumerate(values)):
                problems.append(((name,), "must have at least one item, and each once"))
        for name, known in (("route", (*ROUTES, "none")), ("budget_signal", ("uniform", *SENSITIVITIES))):
            value = getattr(self, name)
            if value is not None and (what := self._not_measured(value, known)):
                problems.append(((name,), what))
        if self.strategy_phases not in (None, self.phases) and self.phases != "both":
            problems.append((("strategy_phases",), f"is {self.strategy_phases}, but only {self.phases} is measured"))
        refuse(problems)
        return self

    def _not_measured(self, value: str, known: tuple[str, ...]) -> str | None:
        """Return what is wrong with a route or a budget signal, if anything."""
        from kvsearch.signals.table import ENTROPIES, MEASURES, UNMEASURED

        if value == UNMEASURED:
            return f"is {value}, which only older profiles have: entropy is that of the mean row of the whole prompt"
        if value not in known:
            return f"{value!r} is unknown{suggest(value, known)}"
        measure = value.partition("-")[0]
        needed: Signal | None = None
        if value in ENTROPIES:
            needed = "entropy"
        elif measure in MEASURES:
            needed = "ppl" if MEASURES[measure] == "nll" else "cosine"
        if needed is None or needed in self.signals:
            return None
        return f"is {value}, which is not measured: ask for signals with {needed}"

    def _tried(self) -> tuple[list[Policy], list[str]]:
        from kvsearch.calibration.polykv.patterns import candidates

        return candidates(self.patterns, self.params, self.measured_phases, self.budgets)

    @property
    def measured_phases(self) -> tuple[Phase, ...]:
        """The phases in which patterns are tried."""
        return PHASES[self.phases]

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else int(self.max_memory * GIGABYTE)

    @property
    def for_strategies(self) -> dict[str, Any]:
        """What the profile records for those who make strategies of it."""
        only = None if self.phases == "both" else self.phases  # no strategy can use another phase
        stated = {"route": self.route, "budget_signal": self.budget_signal, "phases": self.strategy_phases or only}
        return {name: value for name, value in stated.items() if value is not None}

    def remarks(self) -> list[str]:
        """Return what is left out, and patterns that cannot be told apart; UsageError as `candidates`."""
        return self._tried()[1]

    def policies(self) -> list[Policy]:
        """Return the patterns that are tried; UsageError and EnvironmentFault as `candidates`."""
        return self._tried()[0]

    def make_policy(self) -> Policy:
        """Return the pattern of strategies without a route.

        Raises:
            UsageError, EnvironmentFault: as `candidates`, or it is none of the patterns.
        """
        policies, remarks = self._tried()
        for policy in policies:
            if policy.name == self.policy:
                return policy
        why = [f" ({remark})" for remark in remarks if remark.startswith(f"{self.policy} is left out")]
        raise UsageError(
            f"policy {self.policy!r}, for strategies without a route, is none of the patterns{''.join(why)}: name one "
            f"of {', '.join(policy.name for policy in policies)} with --policy"
        )

    def resolved(self) -> dict[str, Any]:
        """Return everything that decides what is measured, patterns with all their parameters; see `make_policy`."""
        self.make_policy()
        patterns = [{"name": policy.name, "params": policy.parameters()} for policy in self.policies()]
        own = {name for name in self.option_names() if name not in self.running}
        stated = self.model_dump(mode="json", include={"method", "policy", "max_length", *own})
        return {**stated, "patterns": patterns, "params": {}}

    def scope(self, data: CalibrationData) -> str:
        """See `CalibrationOptions.scope`."""
        if self.protocol == QUESTION_AGNOSTIC:
            return f"{data.questions} questions after {len(data.contexts)} contexts"
        return f"{data.questions} contexts with a question"
