"""CAKE: layer budgets by how dispersed a layer's attention is and how much it shifts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsearch.budgets.allocator import check_at_least
from kvsearch.budgets.dynamic import Allocation
from kvsearch.core.errors import UsageError
from kvsearch.signals.attention_rows import measure_dispersion

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


def find_exponents(model: str) -> tuple[float, float]:
    """Look up (tau1, tau2) as tuned in the official code, by a model's name with its version and size; else (1, 1)."""
    name = model.lower().replace("_", "-")
    return next((tuned for pattern, tuned in EXPONENTS.items() if re.search(pattern, name)), (1.0, 1.0))


DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class CAKEAllocation(Allocation):
    """CAKE (Qin et al. 2025, arXiv 2503.12491): a pool of all free entries, shared in proportion to the preferences.

    A layer prefers H^(1/tau1) V^(1/tau2) by the entropy H and the variance V of `measure_dispersion`. The pool is what
    lies above the floors, which stand for the window, and the heads of a layer get equal budgets. All zero preferences
    mean equal layers. Where a cap binds, the other layers get the rest in proportion; the official code spreads it
    equally and then cuts what overflows.

    Args:
        tau1: temperature of the dispersion, > 0; see `find_exponents` for what the authors tuned.
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
        for option, tau in (("tau1", self.tau1), ("tau2", self.tau2)):
            if not 0 < tau < math.inf:
                raise UsageError(f"{option} must be finite and above 0, got {tau}")
        check_at_least(0, window=self.window)

    def needs(self, policy: Policy) -> Needs:
        """Return the window's query rows."""
        from kvsearch.policies.base import Needs

        return Needs(query_rows=self._rows(policy))

    def weight(self, policy: Policy, observation: Observation, scores: Sequence[Tensor]) -> list[float]:  # noqa: ARG002
        """Return the logarithm of every sequence's preference H^(1/tau1) V^(1/tau2), NaN where attention is."""
        entropy, variance = (part.double().log() for part in measure_dispersion(observation, self._rows(policy)))
        # Logarithms: a small tau makes powers that over- or underflow.
        wanted: list[float] = (entropy / self.tau1 + variance / self.tau2).tolist()
        return wanted

    def _rows(self, policy: Policy) -> int:
        return self.window or policy.observed or DEFAULT_WINDOW
