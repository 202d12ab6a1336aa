"""Every error kvsearch raises on purpose, the exit code each one means on the command line, and its warning."""

from __future__ import annotations

import warnings
from typing import TypeVar

Value = TypeVar("Value")


class KvsearchError(Exception):
    """Root of all errors raised by kvsearch. The message is one line: what is wrong, where, and what to do."""

    exit_code = 1


class UsageError(KvsearchError):
    """The request cannot be carried out as asked: a bad option, ratio, file or configuration."""

    exit_code = 2


class EnvironmentFault(KvsearchError):
    """The machine or installation is at fault: no such device, a full disk, a missing extra, no network."""

    exit_code = 3


class IncompatibleError(UsageError):
    """Model, plan and data do not fit together: an unsupported architecture, a plan of another model, NaN weights."""

    exit_code = 4


class NonFiniteError(IncompatibleError):
    """What the model computes for sequence `row` of a batch is NaN or infinite."""

    def __init__(self, problem: str, row: int) -> None:
        super().__init__(problem)
        self.row = row


class InternalError(KvsearchError):
    """A bug in kvsearch: please report it."""


class KvsearchWarning(UserWarning):
    """Something that works but is probably not what one wants."""


def require(value: Value | None, problem: str, kind: type[KvsearchError] = UsageError) -> Value:
    """Return `value`; raise an error of this `kind` with the problem if it is None."""
    if value is None:
        raise kind(problem)
    return value


def assert_present(value: Value | None, problem: str) -> Value:
    """Return `value`, which is None only if kvsearch has a bug."""
    return require(value, problem, InternalError)


_said: set[str] = set()


def warn_once(problem: str, stacklevel: int = 2) -> None:
    """Warn (KvsearchWarning) of something that holds for all of this process, once."""
    if problem not in _said:
        _said.add(problem)
        warnings.warn(problem, KvsearchWarning, stacklevel=stacklevel + 1)
