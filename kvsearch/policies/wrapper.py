"""What policies share that add something to another policy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from kvsearch.core.errors import UsageError
from kvsearch.policies.base import Needs, Observation, Policy, Row
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.tensors import Tensor


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

    @property
    def sink_count(self) -> int:
        return self.inner.sink_count

    @property
    def recent_count(self) -> int:
        return self.inner.recent_count

    @property
    def online(self) -> bool:
        return self.inner.online

    @property
    def row(self) -> Row | None:
        return self.inner.row

    @property
    def refresh_interval(self) -> int:
        return self.inner.refresh_interval

    def needs(self) -> Needs:
        return self.inner.needs()

    def score(self, observation: Observation) -> Tensor:
        """Return the inner policy's score, [B, Hkv, T] fp32."""
        return self.inner.score(observation)

    def first_stage(self, observation: Observation) -> Tensor | None:
        return self.inner.first_stage(observation)

    def quota(self, budget: int) -> int:
        return self.inner.quota(budget)

    def recent_at(self, budget: int) -> int:
        return self.inner.recent_at(budget)

    def start(self, observation: Observation) -> State:
        return self.inner.start(observation)

    def step(self, step: Step) -> Tensor:
        return self.inner.step(step)
