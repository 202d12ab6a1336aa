"""Choices of a LU-KV calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from kvsearch.errors import UsageError
from kvsearch.naming import suggest

Normalization = Literal["effect", "layer", "layer_max", "output", "residual", "none"]
Aggregate = Literal["ratios", "importance"]
Group = Literal["sum", "max"]

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
    answer_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(LukvOptions).items():
            choices, value = get_args(hint), getattr(self, key)
            if choices and value not in choices:
                raise UsageError(f"{key} {value!r} is unknown{suggest(str(value), choices)}")
        if not 0 <= self.minimum < 1:
            raise UsageError(f"minimum {self.minimum} is outside [0, 1): it is a share of the context")
        if self.answer_tokens < 1:
            raise UsageError(f"answer_tokens must be 1 or more, got {self.answer_tokens}")
