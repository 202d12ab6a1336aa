"""What policies share that add something to another policy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from kvsearch.core.errors import UsageError
from kvsearch.policies.base import Observation, Policy, Row
from kvsearch.policies.tensors import Tensor


def _delegated(name: str) -> Any:
    """Return a property: the attribute, or the bound method, that the inner policy has by that name."""
    # untyped, as a property takes the place of methods, too
    return property(lambda policy: getattr(policy.inner, name))


@dataclass(frozen=True)
class Wrapper(Policy):
    """A policy around an `inner` one, which decides on everything but merging that is not overridden."""

    def __post_init__(self) -> None:
        self._settle_protect()
        try:
            self.inner  # noqa: B018
        except UsageError as error:
            raise UsageError(f"policy {self.name}: its base {str(error).removeprefix('policy ')}") from None

    @property
    @abstractmethod
    def inner(self) -> Policy:
        """The policy inside."""

    def score(self, observation: Observation) -> Tensor:
        """Return the inner policy's score, [B, Hkv, T] fp32."""
        return self.inner.score(observation)

    @property
    def row(self) -> Row | None:
        return self.inner.row

    sink_count = _delegated("sink_count")
    recent_count = _delegated("recent_count")
    needs = _delegated("needs")
    first_stage = _delegated("first_stage")
    quota = _delegated("quota")
    exempt = _delegated("exempt")
    drop_at = _delegated("drop_at")
    online = _delegated("online")
    refresh_interval = _delegated("refresh_interval")
    recent_at = _delegated("recent_at")
    start = _delegated("start")
    step = _delegated("step")
