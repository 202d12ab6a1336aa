"""The executor that is always there: one job after the other, in this process."""

from __future__ import annotations

from typing import ClassVar

from kvsearch.errors import KvsearchError
from kvsearch.workers.base import Evaluator, Executor, Jobs, Outcome, Values, attempt


class SerialExecutor(Executor[Jobs, Values]):
    """Evaluates one job in each `poll`, in the order they were submitted; closing it closes the evaluator.

    After Ctrl-C the job that was under way is still pending.
    """

    name: ClassVar[str] = "serial"

    def __init__(self, evaluator: Evaluator[Jobs, Values]) -> None:
        super().__init__()
        self._evaluator = evaluator

    @property
    def workers(self) -> int:
        """One."""
        return 1

    def _poll(self, timeout: float | None) -> list[Outcome[Values]]:  # noqa: ARG002 - nothing to wait for
        job = self._waiting[0]
        try:
            outcome = attempt(self._evaluator, job)
        except KvsearchError:
            self._waiting.popleft()
            self._drop(job)
            raise
        self._waiting.popleft()
        return [outcome]

    def _close(self) -> None:
        self._evaluator.close()
