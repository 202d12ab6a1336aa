"""What a directory of kept replies holds, before a command goes on with it or begins anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsearch.errors import UsageError
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.evaluation.run_directory import CONFIG, LEDGER, SCHEMA, check_directories, difference
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import parse_json

DEPENDENT = ("batch", "max_memory")  # settings that replies depend on by rounding alone


def without_rounding(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what changes replies by rounding alone: others go on with the same replies."""
    return {name: value for name, value in config.items() if name not in DEPENDENT}


def begins_anew(place: Path, config: Mapping[str, Any], force: bool) -> bool:
    """Whether to throw away what is in `place`: only with `force`, and only what cannot be gone on with.

    So a command that is interrupted goes on when it is given again, with `force` or without.

    Raises:
        UsageError: `place` holds no replies, or its configuration is damaged: it has to be deleted.
    """
    try:
        check_directories(place, None, config[SCHEMA])
    except UsageError as error:
        raise UsageError(f"{place} is where replies are kept, but has something else in it: delete it") from error
    return force and _is_other(place, config)


def check_place(place: Path) -> None:
    """UsageError if `place` can be no directory, because it or something on the way to it is a file."""
    for path in (place, *place.parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"cannot keep replies in {place}: {path} is a file, name a directory")
            return


def _is_other(place: Path, config: Mapping[str, Any]) -> bool:
    if not (place / CONFIG).exists():
        return False
    try:
        if (place / LEDGER).exists():
            read_replies(place / LEDGER)
    except UsageError:
        return True
    there = parse_json(read_bytes(place / CONFIG), str(place / CONFIG))
    return difference(there, parse_json(canonical_json(config), "the configuration")) is not None
