"""Named parts of kvsearch that other packages may add to: policies, tasks and calibration methods.

Built-in parts are named in one mapping each, parts of installed packages by an entry point group (see
https://packaging.python.org/en/latest/specifications/entry-points/). A part is imported when it is first used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Final, Generic, TypeVar

from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.naming import require_known
from kvsearch.core.parsing import format_error

Part = TypeVar("Part")
OWN_PACKAGE: Final = "kvsearch"


class PluginRegistry(Generic[Part]):
    """The parts of one kind by name.

    Args:
        noun: what a part is called in messages, such as "policy".
        group: the entry point group of other packages; the name of an entry point is the name of its part.
        built_in: names of kvsearch's own parts, and where they are: "module:attribute".
        expected: where the class is that an entry point of the group must be a subclass of, "module:attribute".
    """

    def __init__(self, noun: str, group: str, built_in: Mapping[str, str], expected: str) -> None:
        self.noun = noun
        self.group = group
        self.built_in = built_in
        self.expected = expected

    def find_third_party(self) -> list[EntryPoint]:
        """Return the entry points of other packages, by name; of one name, the first is the one in use."""
        return sorted(entry_points(group=self.group), key=lambda point: point.name)

    def list_names(self) -> list[str]:
        """Return all names: built-in ones in their order, then other packages' names, sorted."""
        return list(dict.fromkeys([*self.built_in, *(point.name for point in self.find_third_party())]))

    def find(self, name: str) -> Part:
        """Import and return the part of this name.

        Raises:
            UsageError: there is none; the message has the nearest names.
            EnvironmentFault: the package that brings it is broken.
        """
        if name in self.built_in:
            return resolve_name(self.built_in[name])  # type: ignore[no-any-return]
        require_known(self.noun, name, sorted(self.list_names()))
        return self.load(next(point for point in self.find_third_party() if point.name == name))

    def load(self, point: EntryPoint) -> Part:
        """Import the class of an entry point; EnvironmentFault if it is none of this kind, or named otherwise."""
        try:
            loaded: Any = point.load()
        except (Exception, SystemExit) as error:
            raise self.broken_error(point, f"cannot be imported ({format_error(error)})") from error
        if not (inspect.isclass(loaded) and issubclass(loaded, self._base)):
            raise self.broken_error(point, f"is no {self._base.__name__}: {point.value}")
        if inspect.isabstract(loaded):
            missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
            raise self.broken_error(point, f"does not define {missing}: {point.value}")
        if getattr(loaded, "name", None) != point.name:
            raise self.broken_error(point, f"calls itself {getattr(loaded, 'name', None)!r}: {point.value}")
        return loaded  # type: ignore[return-value]

    @cached_property
    def _base(self) -> type[Any]:
        return resolve_name(self.expected)  # type: ignore[no-any-return]

    def broken_error(self, point: EntryPoint, problem: str) -> EnvironmentFault:
        """Return the error that says what is wrong with the part of an entry point, and whose it is."""
        advice = "repair or uninstall that package"
        return EnvironmentFault(f"{self.noun} {point.name} of {name_package(point)} {problem}: {advice}")

    def find_package(self, name: str) -> str:
        """Return the distribution that brings a part, with its version where it is not kvsearch."""
        if name in self.built_in:
            return OWN_PACKAGE
        return next(name_package(point) for point in self.find_third_party() if point.name == name)


def name_package(point: EntryPoint) -> str:
    """Return the distribution an entry point comes from, with its version, or else its module."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module
