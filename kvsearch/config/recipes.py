"""Recipes: YAML files of options, yours or shipped with kvsearch, or the config.json of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import parse_json
from kvsearch.resources import resource
from kvsearch.runs.identity import SCHEMA


def find_recipe(name: str, folder: str | None) -> Path:
    """Return the file of that name or, for a bare name, the recipe that is shipped in `folder`.

    A name with a suffix is taken as a file without a look.

    Raises:
        UsageError: there is no such recipe.
    """
    path = Path(name)
    if path.suffix or path.exists():
        return path
    files = sorted(resource(folder).glob("*.yaml")) if folder else []
    shipped = {candidate.stem: candidate for candidate in files}
    if name not in shipped:
        raise UsageError(f"unknown recipe {name!r}{suggest(name, list(shipped))}")
    return shipped[name]


def read_recipe(path: Path, job: str, example: str) -> dict[str, Any]:
    """Return the options of a recipe as they stand in the file, or those of a run of the same `job`.

    `example` is an option, for whoever wrote no mapping.

    Raises:
        UsageError: there is no such file, or it is no YAML, no mapping, or the configuration of another job.
        EnvironmentFault: the file cannot be read.
    """
    content: Any
    if path.suffix == ".json":
        content = parse_json(read_bytes(path), str(path))
        if isinstance(content, dict) and "schema" in content:
            return _of_run(content, path, job)
    else:
        import yaml

        try:
            content = yaml.safe_load(read_bytes(path).decode("utf-8", "replace"))
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a recipe: it should be a mapping such as `{example}`")
    return content


def _of_run(config: dict[str, Any], path: Path, job: str) -> dict[str, Any]:
    if config["schema"] != SCHEMA or not isinstance(config.get("options"), dict):
        raise UsageError(f"{path} does not say the options of its run: it was written by another version of kvsearch")
    if not config["options"]:
        raise UsageError(f"{path} is of a part of a run: give the config.json of the whole one")
    if config.get("job") != job:
        raise UsageError(f"{path} is of kvsearch {config.get('job')}, not of {job}: give the file of another run")
    return dict(config["options"])
