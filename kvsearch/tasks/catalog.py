"""Tasks by name: the synthetic suite, and a user's own JSONL file."""

from __future__ import annotations

from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.tasks.base import Task
from kvsearch.tasks.jsonl import JsonlTask
from kvsearch.tasks.synthetic.suite import BUILDERS, SyntheticTask

KINDS = ("synthetic", "jsonl")


def find_tasks(spec: str, length: int = 1024, split: str = "report") -> list[Task]:
    """The tasks of `synthetic`, `synthetic:NAME,NAME` or `jsonl:FILE`; UsageError for anything else."""
    kind, _, rest = spec.partition(":")
    if kind == "jsonl" and rest:
        return [JsonlTask.load(rest)]
    if kind != "synthetic":
        raise UsageError(f"unknown task {spec!r}{suggest(kind, KINDS)}; a file is given as jsonl:FILE")
    names = list(dict.fromkeys(name.strip() for name in rest.split(","))) if rest else list(BUILDERS)
    for name in names:
        if name not in BUILDERS:
            raise UsageError(f"unknown synthetic task {name!r}{suggest(name, list(BUILDERS))}")
    return [SyntheticTask(name, length, split) for name in names]
