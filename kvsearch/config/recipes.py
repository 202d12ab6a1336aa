"""Recipes: YAML files of options, yours or shipped with kvsearch, or the config.json of a run."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

from kvsearch.core.errors import UsageError
from kvsearch.core.naming import describe_unknown
from kvsearch.core.parsing import read_json
from kvsearch.core.resources import find_resource
from kvsearch.runs.identity import SCHEMA

JOBS = ("calibrate", "evaluate", "evolve", "run")  # that recipes are shipped for


def find_recipe(name: str, job: str) -> Path:
    """Find the file of that name, or the shipped recipe of a job; errors as `find_shipped_recipe`."""
    path = Path(name)
    return path if path.exists() or path.suffix in (".yaml", ".yml", ".json") else find_shipped_recipe(name, job)[1]


def list_shipped_recipes(job: str = "") -> dict[str, Path]:
    """List the shipped recipes of one job or of all, by job and name, as in run/bundled."""
    jobs = [known for known in JOBS if job in ("", known)]
    return {
        f"{job}/{path.stem}": path for job in jobs for path in sorted(find_resource(f"recipes/{job}").glob("*.yaml"))
    }


def find_shipped_recipe(name: str, job: str = "") -> tuple[str, Path]:
    """Find job/name and file of a shipped recipe; the name alone is enough if one job has it.

    Raises:
        UsageError: there is no such recipe, or several jobs have one of that name.
    """
    known = list_shipped_recipes(job)
    matches = [full for full in known if name in (full, full.partition("/")[2])]
    if len(matches) > 1:
        raise UsageError(f"several recipes are called {name!r}: give {' or '.join(matches)}")
    if not matches:
        raise UsageError(describe_unknown("recipe", name, [full.partition("/")[2] if job else full for full in known]))
    return matches[0], known[matches[0]]


def read_description(path: Path) -> str:
    """Read the description of a recipe: its leading comment, as one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = list(takewhile(lambda line: line.startswith("#"), lines))
    return " ".join(line.removeprefix("#").strip() for line in comment)


def read_recipe(path: Path, job: str) -> dict[str, Any]:
    """Read the options of a recipe file, or of a run of the same `job`.

    Raises:
        UsageError: there is no such file, or it is no YAML, no mapping, or the configuration of another job.
        EnvironmentFault: the file cannot be read.
    """
    content: Any
    if path.suffix == ".json":
        content = read_json(path)
    else:
        from kvsearch.core.yaml_document import read_yaml

        content = read_yaml(path)
    if isinstance(content, dict) and "schema" in content:
        return _read_run_options(content, path, job)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a recipe: it should be a mapping of options such as `seed: 1`")
    return content


def _read_run_options(config: dict[str, Any], path: Path, job: str) -> dict[str, Any]:
    if config["schema"] != SCHEMA or not isinstance(config.get("options"), dict) or not config["options"]:
        raise UsageError(
            f"{path} does not say the options of its run: give the config.json of a whole one, of this version"
        )
    if config.get("job") != job:
        raise UsageError(f"{path} is of kvsearch {config.get('job')}, not of {job}: give the file of another run")
    return dict(config["options"])
