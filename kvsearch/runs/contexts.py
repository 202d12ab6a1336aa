"""The contexts that a run asked, all of them, in its directory: what a plan's record has no room for.

A record in a plan has the Merkle root of each set (`kvsearch.plan.origin`), which tells whether this file is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from kvsearch.core.canonical import canonical_json
from kvsearch.core.fields import Record, Sha256
from kvsearch.core.files import atomic_write
from kvsearch.core.parsing import read_json, require_header, validated
from kvsearch.plan.origin import Use
from kvsearch.runs.identity import CONTEXTS
from kvsearch.runs.lock import require_lock

CONTEXTS_FORMAT, CONTEXTS_VERSION = "kvsearch.contexts", 1


class ContextsFile(Record):
    """The hashes of the contexts that a run asked, by use, ascending."""

    format: Literal["kvsearch.contexts"] = "kvsearch.contexts"
    version: Literal[1] = 1
    fitted: tuple[Sha256, ...] = ()
    chosen: tuple[Sha256, ...] = ()
    reported: tuple[Sha256, ...] = ()


def write_contexts(directory: Path, hashes: Mapping[Use, Iterable[str]]) -> None:
    """Write the hashes of a run's contexts into its directory; errors as for `require_lock` and `atomic_write`."""
    require_lock(directory)
    content = ContextsFile.model_validate({use: tuple(sorted(set(found))) for use, found in hashes.items()})
    atomic_write(directory / CONTEXTS, canonical_json(content))


def read_contexts(directory: Path) -> ContextsFile:
    """Read the hashes of a run's contexts.

    Raises:
        UsageError: there is no such file, or it is not valid.
        EnvironmentFault: it cannot be read.
    """
    path = directory / CONTEXTS
    data = require_header(read_json(path), CONTEXTS_FORMAT, CONTEXTS_VERSION, str(path))
    return validated(ContextsFile.model_validate, data, str(path))
