"""What policies share that add something to another policy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvsearch.core.errors import UsageError
from kvsearch.policies.base import Policy


def _of_inner(name: str) -> Any:
    """Return the property that is what the inner policy has under this name, a value or a method."""
    return property(attrgetter(f"inner.{name}"))


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

    sink_count = _of_inner("sink_count")
    recent_count = _of_inner("recent_count")
    online = _of_inner("online")
    row = _of_inner("row")
    refresh_interval = _of_inner("refresh_interval")
    needs = _of_inner("needs")
    score = _of_inner("score")
    first_stage = _of_inner("first_stage")
    quota = _of_inner("quota")
    recent_at = _of_inner("recent_at")
    start = _of_inner("start")
    step = _of_inner("step")
