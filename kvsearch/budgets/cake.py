"""CAKE: layer budgets by how dispersed a layer's attention is and how much it shifts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from kvsearch.budgets.allocator import (
    Signals,
    check_at_least,
    check_bounds,
    check_shape,
    check_signals,
    share_above,
)
from kvsearch.budgets.dynamic import Allocation
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError
from kvsearch.signals.attention_rows import dispersion

if TYPE_CHECKING:
    from torch import Tensor

    from kvsearch.policies.base import Needs, Observation, Policy

# (tau1, tau2) by model, as its name is matched: those for 1024 entries per kv head of CAKE's model2tau.json
EXPONENTS: dict[str, tuple[float, float]] = {
    r"llama-?3\.1-8b": (1.6, 0.4),
    r"llama-?2-7b": (1.9, 1.8),
    r"llama-?2-13b": (0.5, 0.4),
    r"mistral\b.*\bv?0\.3": (0.8, 0.5),
    r"qwen-?2\.5-7b": (1.5, 0.6),
}


def exponents(model: str) -> tuple[float, float]:
    """Look up (tau1, tau2) as tuned in the official code, by a model's name with its version and size; else (1, 1)."""
    name = model.lower().replace("_", "-")
    return next((tuned for pattern, tuned in EXPONENTS.items() if re.search(pattern, name)), (1.0, 1.0))


DEFAULT_WINDOW = 32


def preference(entropy: ArrayLike, variance: ArrayLike, tau1: float = 1.0, tau2: float = 1.0) -> Floats:
    """Return how much cache a layer wants: entropy ** (1 / tau1) * variance ** (1 / tau2) (CAKE).

    Args:
        entropy: -sum a * log(a) of the window rows' attention to the candidates, over heads, rows and keys, [L].
        variance: sum over heads and keys of the unbiased variance of that attention over the rows, [L].
        tau1: temperature of the dispersion, > 0.
        tau2: temperature of the shift, > 0.

    Returns:
        float64 [L]; a factor that is common to all layers cancels in their budgets.

    Raises:
        UsageError: entropy or variance is negative, not finite or of another shape; tau is not above 0; a preference is
            too large for a float.
    """
    spread = check_signals(entropy, "entropy", 0.0)
    shift = check_signals(variance, "variance", 0.0)
    check_shape(shift, "variance", spread.shape)
    _check_temperatures(tau1, tau2)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = spread ** (1 / tau1) * shift ** (1 / tau2)
    return check_signals(wanted, "preferences", 0.0)


@dataclass(frozen=True)
class CAKEAllocation(Allocation):
    """CAKE (Qin et al. 2025, arXiv 2503.12491): a pool of all free entries, shared in proportion to the preferences.

    The pool is what lies above the floors, which stand for the window, and the heads of a layer get equal budgets. All
    zero preferences mean equal layers. Where a cap binds, the other layers get the rest in proportion; the official
    code spreads it equally and then cuts what overflows.

    As an allocator its signals are preferences [L] >= 0.

    Args:
        tau1: temperature of the dispersion, > 0; see `exponents` for what the authors tuned.
        tau2: temperature of the shift, > 0.
        window: query rows that are looked at; 0 means the window of the layer's policy, or 32 where it has none.
    """

    name: ClassVar[str] = "cake"
    shares_layers: ClassVar[bool] = True
    shares_heads: ClassVar[bool] = False
    weighs_in_logarithms: ClassVar[bool] = True
    tau1: float = 1.0
    tau2: float = 1.0
    window: int = 0

    def __post_init__(self) -> None:
        _check_temperatures(self.tau1, self.tau2)
        check_at_least(0, window=self.window)

    def needs(self, policy: Policy) -> Needs:
        """Return the window's query rows."""
        from kvsearch.policies.base import Needs

        return Needs(query_rows=self._rows(policy))

    def weight(self, policy: Policy, observation: Observation, scores: Sequence[Tensor]) -> list[float]:  # noqa: ARG002
        """Return the logarithm of every sequence's preference, NaN where attention is."""
        entropy, variance = (part.double().log() for part in dispersion(observation, self._rows(policy)))
        wanted: list[float] = (entropy / self.tau1 + variance / self.tau2).tolist()
        return wanted

    def _rows(self, policy: Policy) -> int:
        return self.window or policy.observed or DEFAULT_WINDOW

    def allocate(self, signals: Signals, total: int, floors: Ints, caps: Ints) -> Ints:
        """Allocate `total` entries by preferences [L]: int64 [L, Hkv].

        Raises:
            UsageError: preferences are negative, not finite or not [L]; `total` is outside [sum of floors, sum of
                caps].
        """
        low, high = check_bounds(total, floors, caps)
        wanted = check_signals(signals, "preferences", 0.0)
        check_shape(wanted, "preferences", low.shape[:1])
        return share_above(wanted[:, None], total, low, high)


def _check_temperatures(tau1: float, tau2: float) -> None:
    for option, tau in (("tau1", tau1), ("tau2", tau2)):
        if not 0 < tau < math.inf:
            raise UsageError(f"{option} must be finite and above 0, got {tau}")
