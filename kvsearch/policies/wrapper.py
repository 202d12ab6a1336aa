"""What policies share that add something to another policy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import forwarded
from kvsearch.policies.base import Policy


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

    sink_count = forwarded("inner.sink_count")
    recent_count = forwarded("inner.recent_count")
    online = forwarded("inner.online")
    row: ClassVar[Any] = forwarded("inner.row")
    refresh_interval = forwarded("inner.refresh_interval")
    needs = forwarded("inner.needs")
    score = forwarded("inner.score")
    first_stage = forwarded("inner.first_stage")
    quota = forwarded("inner.quota")
    recent_at = forwarded("inner.recent_at")
    start = forwarded("inner.start")
    step = forwarded("inner.step")
