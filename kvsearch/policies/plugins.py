"""Whose policy it is: a fault in one of another package is told as that package's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvsearch.errors import EnvironmentFault, InternalError, KvsearchError
from kvsearch.models.memory import is_out_of_memory

if TYPE_CHECKING:
    from kvsearch.policies.base import Policy

GROUP = "kvsearch.policies"
OURS = "kvsearch"
ADVICE = "repair it, or use another policy"


def package_of(point: EntryPoint) -> str:
    """Return the distribution an entry point comes from, with its version, or else its module."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module


def package_of_class(policy: type[Policy]) -> str:
    """Return the distribution whose entry point a policy is, or else its module."""
    for point in entry_points(group=GROUP):
        if (point.module, point.attr) == (policy.__module__, policy.__qualname__):
            return package_of(point)
    return policy.__module__


def is_ours(policy: type[Policy]) -> bool:
    """Tell whether a policy is a part of kvsearch."""
    return policy.__module__.partition(".")[0] == OURS


def fault(policy: type[Policy], problem: str) -> KvsearchError:
    """Return the error that says what is wrong with a policy, and whose it is."""
    name = getattr(policy, "name", policy.__name__)
    if is_ours(policy):
        return InternalError(f"policy {name} {problem}: a bug in kvsearch, please report it")
    return EnvironmentFault(f"policy {name} of {package_of_class(policy)} {problem}: {ADVICE}")


def guard(policy: type[Policy]) -> None:
    """Make every method and property that a class of another package defines report what it raises as its own."""
    left = vars(policy).get("__annotations__", {})  # parameters, whose defaults may be functions, too
    for name, member in list(vars(policy).items()):
        if isinstance(member, property) and member.fget is not None:
            setattr(policy, name, property(_guarded(member.fget, name), doc=member.__doc__))
        elif isinstance(member, FunctionType) and name not in left and (name == "__post_init__" or name[:2] != "__"):
            setattr(policy, name, _guarded(member, name))


def _guarded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Policy, *given: Any, **more: Any) -> Any:
        try:
            return method(self, *given, **more)
        except (Exception, SystemExit) as error:
            if isinstance(error, KvsearchError) or is_out_of_memory(error):
                raise
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise fault(type(self), f"failed in {name}() ({words})") from error

    return guarded
