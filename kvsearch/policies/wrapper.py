"""Base of policies that add something to another policy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import delegate
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

    sink_count = delegate("inner.sink_count")
    recent_count = delegate("inner.recent_count")
    has_decode_rule = delegate("inner.has_decode_rule")
    row: ClassVar[Any] = delegate("inner.row")
    refresh_interval = delegate("inner.refresh_interval")
    needs = delegate("inner.needs")
    score = delegate("inner.score")
    first_stage = delegate("inner.first_stage")
    first_stage_budget = delegate("inner.first_stage_budget")
    recent_at = delegate("inner.recent_at")
    start = delegate("inner.start")
    step = delegate("inner.step")
