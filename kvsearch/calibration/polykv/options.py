"""The options of a PolyKV calibration (arXiv 2606.15157): patterns, phases, budgets and signals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, model_validator

from kvsearch.calibration.options import ANSWER_TOKENS, AnswerTokens, CalibrationOptions, ProtocolChoice, Whole
from kvsearch.config.options import Listed, option
from kvsearch.core.errors import KvsearchError, UsageError
from kvsearch.core.fields import Entries, Scalar, refuse
from kvsearch.core.naming import check_unique, require_known, suggest
from kvsearch.plan import PHASES, Phase, PhaseNames, PolicySpec
from kvsearch.plan.schema import QUESTION_AGNOSTIC
from kvsearch.policies import Policy, create_policy, find_policy_class, list_policy_names

Signal = Literal["cosine", "ppl", "entropy"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
PAPER_PATTERNS = ("h2o", "tova", "cam", "pyramidkv", "snapkv", "d2o", "cake", "scissorhands", "streaming")
PATTERN_SETS = ("paper", "all")
FULL_CACHE = "full"
WHOLE_PROMPT = 2**20  # a budget that is the whole prompt


class PolykvOptions(CalibrationOptions):
    """Options of PolyKV: the signals, phases, patterns and budgets that are measured.

    `policy` is the pattern that strategies without a route use in all layers. `params` are settings as in
    `make_candidates`: window of all patterns that have one, or snapkv.window. Every pattern is tried at `budgets`
    entries per kv head, in one layer and one of `phases` at a time. Of `signals`, "cosine" brings the relative error
    with it, "ppl" the loss of the continuation, which is cut to `answer_tokens` of the answer. "entropy" is that of the
    mean attention row of the prompt (phase "prefill") and of the continuation (phase "decode").
    """

    own_params: ClassVar[bool] = False

    method: Literal["polykv"] = "polykv"
    policy: str = "snapkv"
    patterns: Annotated[tuple[str | PolicySpec, ...], Listed] = option(
        ("paper",), "Patterns that are tried; paper: its nine, all: every policy.", metavar="NAME,...", shown="paper"
    )
    budgets: Annotated[tuple[Entries, ...], Listed, AfterValidator(lambda budgets: tuple(sorted(budgets)))] = option(
        (512,), "Entries per kv head that patterns are tried at.", metavar="N,...", shown="512"
    )
    phases: PhaseNames = option("both", "When patterns are tried: prefill, decode or both.")
    signals: Annotated[
        tuple[Signal, ...], Listed, AfterValidator(lambda signals: tuple(sorted(signals, key=SIGNALS.index)))
    ] = option(
        SIGNALS,
        "What is measured: cosine (and relative error) of attention outputs, ppl of the answers, entropy.",
        metavar="NAME,...",
        shown="cosine,ppl,entropy",
    )
    answer_tokens: AnswerTokens = ANSWER_TOKENS
    protocol: ProtocolChoice = QUESTION_AGNOSTIC
    batch: Whole = option(8, "Prompts at a time.", ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("patterns", "budgets", "signals"):
            values = getattr(self, name)
            if not values or any(value in values[:index] for index, value in enumerate(values)):
                refuse([((name,), "must have at least one item, and each once")])
        return self

    def _tried(self) -> tuple[list[Policy], list[str]]:
        return make_candidates(self.patterns, self.params, self.measured_phases, self.budgets)

    @property
    def measured_phases(self) -> tuple[Phase, ...]:
        """The phases in which patterns are tried."""
        return PHASES[self.phases]

    def remarks(self) -> list[str]:
        """Return remarks on patterns that are left out; UsageError as `make_candidates`."""
        return self._tried()[1]

    def policies(self) -> list[Policy]:
        """Return the patterns to try; UsageError and EnvironmentFault as `make_candidates`."""
        return self._tried()[0]

    def make_policy(self) -> Policy:
        """Return the pattern of strategies without a route.

        Raises:
            UsageError, EnvironmentFault: as `make_candidates`, or it is none of the patterns.
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
        """Return all settings that decide the measurement, patterns with all their parameters; see `make_policy`."""
        self.make_policy()
        patterns = [{"name": policy.name, "params": policy.parameters()} for policy in self.policies()]
        stated = self.model_dump(mode="json", include={"method", "policy", "max_length", *self.option_names()})
        return {**stated, "patterns": patterns, "params": {}}


# --- patterns ---------------------------------------------------------------------------------------------------------


def make_candidates(
    patterns: str | Sequence[str | PolicySpec],
    settings: Mapping[str, Scalar],
    phases: Sequence[Phase],
    budgets: Sequence[int],
) -> tuple[list[Policy], list[str]]:
    """Make the policies to try, in the given order, and remarks on them.

    `patterns` are names, or names with parameters. "paper" stands for the nine of PolyKV (arXiv 2606.15157), "all" for
    every registered policy. `settings` are parameters of all patterns that have them (window), or of one
    (snapkv.window); they win over parameters that come with a name, and a parameter of one pattern over one of all.

    Of a set, a pattern is left out with a remark if it cannot be tried: it always keeps more than the smallest of
    `budgets`, it has no rule for one of `phases`, or its budget does not say what it keeps.

    Raises:
        UsageError: a pattern or parameter is unknown or given twice, a pattern that is named cannot be tried, or none
            of a set can.
        EnvironmentFault: a pattern that is named comes from a broken package.
    """
    wanted: dict[str, PolicySpec] = {}  # one that is named takes the place that a set has for it
    named: list[str] = []
    for item in [patterns] if isinstance(patterns, str) else patterns:
        if item in PATTERN_SETS:
            built_in = [name for name in list_policy_names() if name != FULL_CACHE]
            for name in PAPER_PATTERNS if item == "paper" else built_in:
                wanted.setdefault(name, PolicySpec(name=name))
            continue
        spec = PolicySpec(name=item) if isinstance(item, str) else item
        require_known("pattern", spec.name, [*PATTERN_SETS, *list_policy_names()])
        named.append(spec.name)
        wanted[spec.name] = spec
    check_unique("the pattern", named)
    policies: list[Policy] = []
    remarks: list[str] = []
    for name, params in _params(wanted, settings).items():
        is_stated = name in named or bool(params)  # what the user said about it cannot be right
        try:
            policy = create_policy(name, params)
            is_stated = name in named
            check_pattern(policy, phases, min(budgets))
        except KvsearchError as error:
            if is_stated:
                raise
            remarks.append(f"{name} is left out: {str(error).removeprefix(f'policy {name}: ')}")
        else:
            policies.append(policy)
    if not policies:
        raise UsageError(f"no pattern is left to try; {remarks[0]}" if remarks else "there are no patterns: name some")
    return policies, remarks


def _params(specs: Mapping[str, PolicySpec], settings: Mapping[str, Scalar]) -> dict[str, dict[str, Scalar]]:
    """Return the parameters of every pattern by its name."""
    known: dict[str, list[str]] = {}
    for name in specs:
        try:
            known[name] = [field.name for field in dataclasses.fields(find_policy_class(name))]
        except KvsearchError:
            known[name] = []  # a broken package: its error shows when the policy is made
    params = {name: dict(spec.params) for name, spec in specs.items()}
    for key in sorted(settings, key=lambda key: "." in key):  # those of one pattern win
        name, dot, parameter = key.rpartition(".")
        takers = [name] if dot else [other for other in params if parameter in known[other]]
        others = list(params) if dot else sorted({other for names in known.values() for other in names})
        if not takers or takers[0] not in params:
            problem = f"{name!r} is none of the patterns" if dot else "none of the patterns has such a parameter"
            raise UsageError(f"setting {key!r}: {problem}{suggest(name or key, others)}")
        for taker in takers:
            params[taker][parameter] = settings[key]
    return params


def check_pattern(policy: Policy, phases: Sequence[Phase], smallest: int) -> None:
    """Raise a UsageError if nothing can be learnt about `policy` in these phases at this budget."""
    from kvsearch.runtime.decode.rule import decode_needs  # takes seconds to import, and most mistakes show before

    name = policy.name
    if name == FULL_CACHE:
        raise UsageError(f"policy {name}: it agrees with itself, so no signal can judge it: leave it out")
    if policy.keeps_all(WHOLE_PROMPT, WHOLE_PROMPT):
        raise UsageError(f"policy {name}: some of its heads are never evicted, so budgets do not say what it keeps")
    if policy.least > smallest:
        raise UsageError(
            f"policy {name}: it always keeps {policy.least} entries ({policy.sink_count} sinks, {policy.recent_count} "
            f"recent), more than a budget of {smallest}: lower them with --set, or raise the budget"
        )
    if "decode" in phases:
        decode_needs(policy)
