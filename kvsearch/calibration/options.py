"""The options of the calibration methods: one model per method, each option with its help text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from kvsearch.config.options import SIZE, Names, Option, Params, Seeded, merge_params, option
from kvsearch.core.errors import UsageError
from kvsearch.core.fields import refuse
from kvsearch.core.naming import join_choices, suggest
from kvsearch.plan.methods import CALIBRATION_METHODS
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies.probe import FEATURES, SINKS, SPREAD
from kvsearch.tasks.base import Answers

if TYPE_CHECKING:
    from kvsearch.budgets.dynamic import Allocation
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.policies import Policy

Normalization = Literal["error", "layer", "none"]
Group = Literal["sum", "max"]
Compare = Literal["best", "all"]
Number = Annotated[float, Field(strict=True)]
Exponent = Annotated[Number | None, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]

ANSWER_TOKENS = 128
TUNED_FOR = 1024  # entries per kv head of CAKE's exponents
STABILITY_RATIOS = tuple(round(0.1 * step, 1) for step in range(1, 10))
POLICIES_WITHOUT_RANKING = ("full",)
TARGETS = ("answers", "reconstruction")
BANK_CANDIDATES = 4096  # tokens whose queries a bank is chosen of
MIN_DRAWN_PER_CONTEXT = 50  # entries or tokens of a context that a ranking is fitted on

# recent entries that stay under policies that need not keep all they look at, where they are compared at small budgets:
# as many as under fitted rankings; with more, what is protected is most of what is kept
DEFAULT_RECENT = 8
# parameters of a policy that looks at the last queries and need not keep all of these
WINDOW_PARAMETERS = ("window", "protect")

AnswerTokens = Annotated[
    Whole, Field(ge=1), Option("The longest answer that is teacher-forced, in tokens; lukv, polykv.")
]
ANSWERS_OPTION = Option(
    "What is teacher-forced after a question: own, the model's greedy reply under its full cache where that is right "
    "(any reply where no metric judges it), else the right answer; or given, always the right answer."
)
Minimum = Annotated[
    Number,
    Field(ge=0, lt=1),
    Option(
        "The least share of a context that every head keeps, on top of protected entries; all but polykv.",
        shown="lukv 0.01, others 0",
    ),
]
Check = Annotated[
    bool, Option("Do not compare the table with even budgets on held-out contexts.", flag="--no-check", negated=True)
]
ProtocolChoice = Annotated[
    Protocol,
    Option(
        "All but lukv: a prompt is a context (question-agnostic), or a context with a question and all that leads to "
        "the reply (question-aware)."
    ),
]
FloorShare = Annotated[
    Number,
    Field(ge=0, le=1),
    Option("lava, adakv: the share of a head's even budget that it keeps in any case.", shown="0.2"),
]


class CalibrationOptions(Seeded):
    """Options of all methods: a policy, and its parameters where they differ from the method's own.

    `unit` is one of what is counted while the method runs. `own_params` says whether `params` belong to `policy`, and
    not to all policies that are measured. `bare` says whether contexts may have no questions. `protection` is by
    policy, where the method differs from it.
    """

    job: ClassVar[str] = "calibrate"
    recipes: ClassVar[bool] = True
    unit: ClassVar[str] = "question"
    own_params: ClassVar[bool] = True
    bare: ClassVar[bool] = False
    protection: ClassVar[dict[str, dict[str, Any]]] = {}

    method: str = option("lukv", f"Calibration method: {join_choices(CALIBRATION_METHODS.built_in)}.", SIZE)
    policy: str = option(
        "snapkv",
        "Eviction policy the budgets are for, or probe=DIR, query_bank=DIR or kvzap=DIR, a fitted one; polykv: of "
        "strategies without a route.",
        SIZE,
        shown="lukv, adakv, polykv: snapkv; lava, cake: their own",
        completes="kvsearch.policies.registry:list_policy_names",
    )
    params: Params = option(
        {},
        "A policy parameter, as in --set window=16; polykv: of all patterns that have it, or of one, as in --set "
        "snapkv.window=16; repeatable.",
        flag="--set",
        metavar="KEY=VALUE",
        repeated=True,
    )

    max_length: int | None = option(
        None,
        "Most tokens of a context with its question and answer; the middle of longer contexts is cut out. At most, "
        "and by default, what the model takes.",
        ge=1,
    )

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the options that belong to the method alone."""
        method_model = next(model for model in cls.__mro__ if "method" in get_annotations(model))
        fields = method_model.model_fields if issubclass(method_model, CalibrationOptions) else {}
        return [name for name in fields if name not in CalibrationOptions.model_fields]

    @classmethod
    def merge(cls, stated: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `given` options over those `stated` in a recipe, without settings of another policy."""
        policy = stated.get("policy", cls.model_fields["policy"].default)
        return merge_params(stated, given, policy if cls.own_params else None)

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Raise UsageError for the first `given` option that the method lacks, or a wrong choice."""
        for key, value in given.items():
            if key not in cls.model_fields:
                raise UsageError(
                    f"method {cls.model_fields['method'].default} has no option "
                    f"{key!r}{suggest(key, cls.option_names())}"
                )
            hint = get_args(cls.model_fields[key].annotation)
            if (
                key in cls.option_names()
                and hint
                and all(isinstance(choice, str) for choice in hint)
                and value not in hint
            ):
                raise UsageError(f"unknown {key} {value!r}{suggest(str(value), hint)}")

    def make_policy(self) -> Policy:
        """Return the policy with the method's protected entries, unless `params` differ.

        Raises:
            UsageError: an unknown policy or parameter, or one that cannot be calibrated.
        """
        from kvsearch.policies import create_policy, find_policy_class
        from kvsearch.policies.fitted import parse_policy

        if self.policy in POLICIES_WITHOUT_RANKING:
            raise UsageError(f"policy {self.policy!r} evicts nothing, so it has no budgets to calibrate")
        name, fitted = parse_policy(self.policy)
        find_policy_class(name)
        return create_policy(name, {**self.protection.get(name, {}), **fitted, **self.params})

    def policies(self) -> list[Policy]:
        """Return all measured policies, `make_policy` among them; UsageError as it raises them."""
        return [self.make_policy()]

    def remarks(self) -> list[str]:
        """Return what to know before the measurement; UsageError as `policies`."""
        return []

    def texts(self, data: CalibrationData) -> dict[str, Any]:
        """Return the record of the texts for the provenance of a profile."""
        return {"data": data.name, **({} if self.max_length is None else {"max_length": self.max_length})}

    def settings(self) -> dict[str, Any]:
        """Return the method's own options, as they go into the provenance of a profile."""
        return self.model_dump(include=set(self.option_names()))

    def resolved(self) -> dict[str, Any]:
        """Return all settings that decide the measurement, as JSON; UsageError as `make_policy`."""
        return {
            "method": self.method, "policy": self.policy, "params": self.make_policy().parameters(),
            **self.model_dump(mode="json", include={"max_length", *self.option_names()}),
        }  # fmt: skip


class AnsweredOptions(CalibrationOptions):
    """Options of methods that measure importance: answers after questions, and aggregation of query heads."""

    answers: Answers = option("own", ANSWERS_OPTION)
    answer_tokens: AnswerTokens = ANSWER_TOKENS
    group: Group = option("sum", "How the query heads of a kv head are combined: sum or max.")


class LukvOptions(AnsweredOptions):
    """Options of LU-KV that its paper leaves open, and its ablations.

    `normalization` makes layers comparable, which the paper asks for without saying how. "layer" gives the importance
    of every layer the same mass, the usual reading of the paper, and "none" takes importance as it is. "error" measures
    something that compares as it is: the weighted output error that an entry takes away, see `measure_output_errors`.

    `group` is how importance is combined over the query heads of a kv head; errors add up. `gap=False` is the ablation
    that trusts the ranking. `answers` is what entries are worth something to: "own" replies (the paper's full-attention
    decoding) of up to `answer_tokens`, or the "given" answers.
    """

    # App. E: four sinks; 32 recent tokens under SnapKV, one under policies that score every key
    protection: ClassVar[dict[str, dict[str, Any]]] = {
        "snapkv": {"sinks": 4},
        "keydiff": {"sinks": 4, "window": 1},
        "expected_attention": {"sinks": 4, "window": 1},
    }

    method: Literal["lukv"] = "lukv"
    policy: str = "snapkv"
    normalization: Normalization = option(
        "error",
        "What entries are worth: error (of the output without them), or importance: layer (each layer has as much, the "
        "usual reading of the paper) or none (as it is).",
    )
    gap: bool = option(True, "Ablation: trust the policy's ranking.", flag="--no-gap", negated=True)
    minimum: Minimum = 0.01
    check: Check = True
    shrink: bool = option(
        True,
        "Write the measured budgets as they are, also where a mixture with even ones keeps more answers.",
        flag="--no-shrink",
        negated=True,
    )
    rivals: Names = option(
        (),
        "Policies that are measured in the same pass, beside --policy and protecting the same entries: `export` "
        "then chooses one for every layer.",
        metavar="NAME,...",
        shown="none",
    )

    @model_validator(mode="after")
    def _errors_add_up(self) -> Self:
        if self.normalization == "error" and self.group != "sum":
            refuse([(("group",), "is of importance: leave it out, or give normalization layer or none")])
        return self

    def make_rivals(self) -> list[Policy]:
        """Make the rival policies, which are measured in the same pass as `make_policy`.

        They protect the same entries, as what these are worth is not measured: a policy that protects others would keep
        more or less than its curve says.

        Raises:
            UsageError: an unknown policy, one that is measured already, or one that cannot protect these entries.
        """
        from kvsearch.policies.registry import protect_like

        policy_of_method = self.make_policy()
        others = [self.model_copy(update={"policy": name, "params": {}}).make_policy() for name in self.rivals]
        rivals = [protect_like(policy, policy_of_method) for policy in others]
        measured = [policy_of_method, *rivals]
        for number, policy in enumerate(rivals, 1):
            if policy in measured[:number]:
                raise UsageError(f"policy {policy.name} is measured already: name each once in --policy and --rivals")
        return rivals

    def policies(self) -> list[Policy]:
        return [*super().policies(), *self.make_rivals()]

    def settings(self) -> dict[str, Any]:
        """Return the method's own options but rivals, which are in the profile's metadata."""
        return {name: value for name, value in super().settings().items() if name != "rivals"}

    def resolved(self) -> dict[str, Any]:
        rivals = [{"name": policy.name, "params": policy.parameters()} for policy in self.make_rivals()]
        return {**super().resolved(), "rivals": rivals}


class RankingOptions(AnsweredOptions):
    """Options of a fitted ranking: the questions on a context, and the ranked entries.

    `targets` are "answers" (questions with their answers) and "reconstruction" (the context itself, asked for again
    chunk by chunk). Contexts without questions are asked for themselves alone.
    """

    unit: ClassVar[str] = "context"
    bare: ClassVar[bool] = True
    named: ClassVar[dict[str, tuple[str, ...]]] = {"targets": TARGETS}  # options that are names, and which there are

    targets: Names = option(
        TARGETS, "What entries are important for: answers, reconstruction or both.", metavar="NAME,..."
    )
    protect: Whole = option(DEFAULT_RECENT, "Recent entries that are never ranked.", ge=0)
    compare: Compare = option(
        "best", "Built-in rankings whose losses are measured: best, the three that recall most importance, or all."
    )

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for key, known in self.named.items():
            given = getattr(self, key)
            wrong = next((name for name in given if name not in known), None)
            refuse([((key,), f"{wrong!r} is unknown{suggest(str(wrong), known)}")] if wrong is not None else [])
            refuse([((key,), "names nothing: leave it out, or name what to take")] if not given else [])
        return self

    @property
    def drawn(self) -> int:
        """Number of entries or tokens of all contexts that a head is fitted on."""
        return BANK_CANDIDATES

    @property
    def looked_at(self) -> tuple[str, ...]:
        """Features of entries that are noted: only an even spread, by which some heads may be ranked."""
        return (SPREAD,)

    def make_policy(self) -> Policy:
        """Raise UsageError: the policy does not exist before it is fitted."""
        raise UsageError(f"method {self.method} makes a policy: it has none before")

    def policies(self) -> list[Policy]:
        """Return the rival policies of the fit, which protect the same entries, or fewer."""
        from kvsearch.policies.registry import create_policy, list_rivals

        alike = {"sinks": SINKS, "protect": self.protect, "recent": max(self.protect, 1)}  # 0 recent are half a budget
        rivals = map(create_policy, list_rivals())
        return [replace(policy, **{name: alike[name] for name in alike if hasattr(policy, name)}) for policy in rivals]

    def resolved(self) -> dict[str, Any]:
        return {"method": self.method, **self.model_dump(mode="json", include=set(self.option_names()))}


class QueryBankOptions(RankingOptions):
    """Options of a ranking by stored queries of questions; see `kvsearch.policies.query_bank`."""

    method: Literal["query_bank"] = "query_bank"
    policy: str = "query_bank"
    bank: Whole = option(64, "query_bank: queries to store for every head.", ge=1)


class ProbeOptions(RankingOptions):
    """Options of a ranking by regressions: its features and its form.

    `form` "network" also tries a small network for every head, "linear" regressions only; which of them a head gets is
    chosen on contexts that none was fitted on.
    """

    named: ClassVar[dict[str, tuple[str, ...]]] = {"features": FEATURES, "targets": TARGETS}

    method: Literal["probe"] = "probe"
    policy: str = "probe"
    features: Names = option(FEATURES, "What the fit looks at of an entry.", metavar="NAME,...", shown="all there are")
    form: Literal["network", "linear"] = option("network", "The largest fit that is tried.")
    entries: Whole = option(20_000, "Entries of every head to fit on.", ge=100)

    @property
    def looked_at(self) -> tuple[str, ...]:
        """The features, always with the spread, which ranks heads without any attention on the context."""
        return self.features if SPREAD in self.features else (*self.features, SPREAD)

    @property
    def drawn(self) -> int:
        return self.entries


class QueryStatisticsOptions(CalibrationOptions):
    """Statistics of queries for other tools; the policy says how many first tokens are left out, its sinks."""

    unit: ClassVar[str] = "context"
    bare: ClassVar[bool] = True

    method: Literal["query_statistics"] = "query_statistics"
    policy: Literal["expected_attention"] = "expected_attention"


class DynamicOptions(CalibrationOptions):
    """Options of methods that decide budgets anew for every prompt.

    `protocol` says what a prompt is: every context, or every context with a question and all that leads to the reply.
    A `minimum` of 0 is the rule as it runs.
    """

    unit: ClassVar[str] = "prompt"

    method: str = "dynamic"
    policy: str = "snapkv"
    protocol: ProtocolChoice = QUESTION_AGNOSTIC
    minimum: Minimum = 0.0
    check: Check = True

    def make_allocation(self, model: str = "") -> Allocation:  # noqa: ARG002
        """Make the allocation for a model of this name; UsageError if options contradict each other."""
        from kvsearch.budgets.dynamic import find_allocation_class

        rule = find_allocation_class(self.method)
        allocation: Allocation = rule(**{field.name: getattr(self, field.name) for field in fields(rule)})
        return allocation

    def make_policy(self) -> Policy:
        """Return the policy; UsageError if the method cannot share its entries, too."""
        policy = super().make_policy()
        self.make_allocation().check(policy, f"method {self.method}")
        return policy


class LavaOptions(DynamicOptions):
    """LAVa: layers and heads, by the entropy of a layer and where its highest scores are."""

    method: Literal["lava"] = "lava"
    policy: str = "lava"
    floor_share: FloorShare = 0.2
    layers: Literal["dynamic", "planned", "scores"] = option(
        "dynamic", "lava: budgets of layers, dynamic, planned, or by where the highest scores of all are (scores)."
    )
    heads: Literal["dynamic", "equal"] = option("dynamic", "lava: budgets of heads, dynamic or equal.")


class AdakvOptions(DynamicOptions):
    """AdaKV: the heads of a layer, by where its highest scores are."""

    method: Literal["adakv"] = "adakv"
    policy: str = "snapkv"
    floor_share: FloorShare = 0.2
    variant: Literal["exact", "kvpress"] = option("exact", "adakv: exact, or what kvpress computes.")


class CakeOptions(DynamicOptions):
    """CAKE: layers, by how dispersed their attention is and how much it shifts.

    Without `tau1` and `tau2` the exponents are what its authors tuned for the model, 1 and 1 if nothing. `window` is
    CAKE's: 0 means that of the policy.
    """

    method: Literal["cake"] = "cake"
    policy: str = "cake"
    tau1: Exponent = option(None, "cake: temperature of the dispersion.", shown="its authors' for the model")
    tau2: Exponent = option(None, "cake: temperature of the shift.", shown="its authors' for the model")
    window: Whole = option(
        0, "Last queries whose attention is looked at.", flag="--cake-window", shown="the policy's", ge=0
    )

    def make_allocation(self, model: str = "") -> Allocation:
        from kvsearch.budgets.cake import CAKEAllocation, find_exponents

        tuned = find_exponents(model)
        return CAKEAllocation(self.tau1 or tuned[0], self.tau2 or tuned[1], self.window)

    def settings(self) -> dict[str, Any]:
        """Return the method's own options, and where the exponents come from."""
        is_given = self.tau1 is not None or self.tau2 is not None
        source = {"exponents": "fixed"} if is_given else {"exponents": "auto", "tuned_for": TUNED_FOR}
        return {**super().settings(), **source}
