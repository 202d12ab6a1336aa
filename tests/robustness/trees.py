"""Documents as trees that keep what parsers throw away: keys that occur twice, numbers as they are written.

A tree is an `Object` (pairs, in order), a list, a scalar of JSON, or `Raw`: text that is put out as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Path = tuple[int, ...]  # numbers of children, from the root


class Raw(str):
    """What is put out as it is, such as 1e999."""


class Object(list[list[Any]]):
    """Pairs of a key and a tree."""


def parse(text: str | bytes) -> Any:
    """Return the tree of JSON."""
    return json.loads(text, object_pairs_hook=lambda pairs: Object([list(pair) for pair in pairs]))


def dump(tree: Any) -> str:
    """Return a tree as JSON, or what its `Raw` parts make of it."""
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Object):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(dump, tree)) + "]"
    return json.dumps(tree)


def children(tree: Any) -> list[Any]:
    """Return what is directly below a tree."""
    return [value for _, value in tree] if isinstance(tree, Object) else tree if isinstance(tree, list) else []


def places(tree: Any, before: Path = ()) -> Iterator[Path]:
    """Yield where everything in a tree is, the root first."""
    yield before
    for number, child in enumerate(children(tree)):
        yield from places(child, (*before, number))


def at(tree: Any, place: Path) -> Any:
    """Return what is at a place."""
    for number in place:
        tree = children(tree)[number]
    return tree


def put(tree: Any, place: Path, value: Any) -> Any:
    """Put a value at a place, in the tree itself, and return the tree: the value, where the place is the root."""
    if not place:
        return value
    parent = at(tree, place[:-1])
    if isinstance(parent, Object):
        parent[place[-1]][1] = value
    else:
        parent[place[-1]] = value
    return tree
