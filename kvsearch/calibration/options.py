"""Choices of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan import PHASES, Phase
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol

Normalization = Literal["effect", "layer", "layer_max", "output", "residual", "none"]
Aggregate = Literal["ratios", "importance"]
Group = Literal["sum", "max"]
Exponents = Literal["auto", "fixed", "fit"]
Signal = Literal["cosine", "ppl", "entropy"]

ANSWER_TOKENS = 128
SAMPLES = "samples"  # folder in the directory of a PolyKV calibration: what is finished of it

SIGNALS: tuple[Signal, ...] = get_args(Signal)

STABILITY_RATIOS = tuple(round(0.1 * step, 1) for step in range(1, 10))


@dataclass(frozen=True)
class LukvOptions:
    """What the paper leaves open, and its ablations.

    `normalization` makes layers comparable, which the paper asks for without saying how. "effect" measures it: a
    layer's importance adds up to what the answer loses when the layer sees only the protected entries of the context.
    "layer" gives every layer the same mass, "layer_max" the same largest value, "output" and "residual" divide by the
    mean norm of the attention output or of the residual stream it is added to, "none" takes importance as it is.

    `aggregate` averages the questions' ratios (paper) or their importance before solving once. `group` is how the query
    heads of a kv head are combined. `gap=False` is the ablation that trusts the ranking. `minimum` is the least share
    of the context every head keeps, `answer_tokens` the longest answer that is teacher-forced.
    """

    normalization: Normalization = "effect"
    aggregate: Aggregate = "ratios"
    group: Group = "sum"
    gap: bool = True
    minimum: float = 0.01
    answer_tokens: int = ANSWER_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_minimum(self.minimum)
        _check_answer_tokens(self.answer_tokens)


@dataclass(frozen=True)
class DynamicOptions:
    """How the decisions of a dynamic allocation are collected.

    `protocol` says what a prompt is: every context ("question-agnostic"), or every context with a question and all that
    leads to the reply ("question-aware"). `minimum` is the least share of a prompt that every head keeps, on top of
    the policy's protected entries; 0 is the rule as it runs.
    """

    protocol: Protocol = QUESTION_AGNOSTIC
    minimum: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_minimum(self.minimum)


@dataclass(frozen=True)
class CakeOptions:
    """Where CAKE's exponents tau1 and tau2 come from.

    "auto" looks up what its authors tuned for the model and for budgets of `tuned_for` entries per kv head, 1 and 1 if
    nothing; "fixed" takes `tau1` and `tau2`; "fit" chooses the pair that costs the answers least when `fit_ratio` of a
    prompt is evicted, with `answer_tokens` of an answer at most. `window` is CAKE's: 0 means that of the policy.
    """

    exponents: Exponents = "auto"
    tau1: float = 1.0
    tau2: float = 1.0
    window: int = 0
    tuned_for: int = 1024
    fit_ratio: float = 0.8
    answer_tokens: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_answer_tokens(self.answer_tokens)
        if self.tuned_for < 1:
            raise UsageError(f"tuned_for must be 1 entry or more, got {self.tuned_for}")
        if not 0 < self.fit_ratio < 1:
            raise UsageError(
                f"fit_ratio {self.fit_ratio} is outside (0, 1): it is the share to evict, 0.8 keeps a fifth"
            )


@dataclass(frozen=True)
class PolykvOptions:
    """What is measured of every layer, phase and pattern, and how.

    `base` is the pattern that strategies without a route use in all layers. Every pattern is tried at `budgets` entries
    per kv head, in one layer and one of `phases` at a time. Of `signals`, "cosine" brings the relative error with it,
    "ppl" the loss of the continuation, which is cut to `answer_tokens` of the answer. "entropy" is that of the last
    `entropy_rows` query rows of the prompt (phase "prefill") and of the rows of the continuation (phase "decode");
    `literal_entropy` takes that of the mean row as well, as Eq. 4 reads, which needs prompts of one length.

    `protocol` is that of `DynamicOptions`. `naive` runs the model once for everything that is tried. Prompts are read
    `batch` at a time, with at most `max_memory` bytes besides the weights (None: what is free). `recorded` only goes
    into the profile: the `route`, `budget_signal` and `phases` that a strategy made of it should use.
    """

    base: str = "snapkv"
    budgets: tuple[int, ...] = (512,)
    phases: tuple[Phase, ...] = PHASES["both"]
    signals: tuple[Signal, ...] = SIGNALS
    literal_entropy: bool = False
    entropy_rows: int = 32
    answer_tokens: int | None = ANSWER_TOKENS
    protocol: Protocol = QUESTION_AGNOSTIC
    naive: bool = False
    batch: int = 8
    max_memory: int | None = None
    recorded: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choices(self)
        for name, known in (("phases", PHASES["both"]), ("signals", SIGNALS)):
            _check_listed(name, getattr(self, name), known)
        if not self.budgets or sorted(set(self.budgets)) != list(self.budgets) or self.budgets[0] < 1:
            raise UsageError(f"budgets must be ascending entries per kv head, each once, got {list(self.budgets)}")
        for name in ("entropy_rows", "answer_tokens", "batch", "max_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be 1 or more, got {value}")
        if self.literal_entropy and "entropy" not in self.signals:
            raise UsageError("literal_entropy is another reading of the signal entropy: ask for that, too")


def _check_listed(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    """UsageError if some of `values` are unknown or there twice, or there are none."""
    unknown = [value for value in values if value not in known]
    if unknown:
        raise UsageError(f"{name} {unknown[0]!r} is unknown{suggest(unknown[0], known)}")
    if len(set(values)) != len(values) or not values:
        raise UsageError(f"{name} must name some of {', '.join(known)}, each once, got {list(values)}")


def _check_choices(options: LukvOptions | DynamicOptions | CakeOptions | PolykvOptions) -> None:
    for key, hint in get_type_hints(type(options)).items():
        choices, value = get_args(hint) if get_origin(hint) is Literal else (), getattr(options, key)
        if choices and value not in choices:
            raise UsageError(f"{key} {value!r} is unknown{suggest(str(value), choices)}")


def _check_minimum(minimum: float) -> None:
    if not 0 <= minimum < 1:
        raise UsageError(f"minimum {minimum} is outside [0, 1): it is a share of the context")


def _check_answer_tokens(tokens: int) -> None:
    if tokens < 1:
        raise UsageError(f"answer_tokens must be 1 or more, got {tokens}")
