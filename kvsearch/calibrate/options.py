"""Choices of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from kvsearch.errors import UsageError
from kvsearch.naming import suggest

Normalization = Literal["effect", "layer", "layer_max", "output", "residual", "none"]
Aggregate = Literal["ratios", "importance"]
Group = Literal["sum", "max"]
Protocol = Literal["question-agnostic", "question-aware"]
Exponents = Literal["auto", "fixed", "fit"]

QUESTION_AGNOSTIC: Protocol = "question-agnostic"
ANSWER_TOKENS = 128

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


def _check_choices(options: LukvOptions | DynamicOptions | CakeOptions) -> None:
    for key, hint in get_type_hints(type(options)).items():
        choices, value = get_args(hint), getattr(options, key)
        if choices and value not in choices:
            raise UsageError(f"{key} {value!r} is unknown{suggest(str(value), choices)}")


def _check_minimum(minimum: float) -> None:
    if not 0 <= minimum < 1:
        raise UsageError(f"minimum {minimum} is outside [0, 1): it is a share of the context")


def _check_answer_tokens(tokens: int) -> None:
    if tokens < 1:
        raise UsageError(f"answer_tokens must be 1 or more, got {tokens}")
