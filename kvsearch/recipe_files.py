"""Recipes: YAML files of options, yours or shipped with kvsearch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.files import read_bytes
from kvsearch.resources import resource


def find_recipe(name: str, folder: str) -> Path:
    """Find the file of that name or, for a bare name, the recipe shipped in `folder`; UsageError if there is none.

    A name with a suffix is taken as a file without a look.
    """
    path = Path(name)
    if path.suffix or path.exists():
        return path
    shipped = {candidate.stem: candidate for candidate in sorted(resource(folder).glob("*.yaml"))}
    if name not in shipped:
        raise UsageError(f"unknown recipe {name!r}{suggest(name, list(shipped))}")
    return shipped[name]


def read_recipe(path: Path, example: str) -> dict[str, Any]:
    """Return the options of a recipe as they stand in the file; `example` is one of them, for whoever wrote no mapping.

    Raises:
        UsageError: there is no such file, or it is no YAML, or no mapping.
        EnvironmentFault: the file cannot be read.
    """
    try:
        content = yaml.safe_load(read_bytes(path).decode("utf-8", "replace"))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a recipe: it should be a mapping such as `{example}`")
    return content
