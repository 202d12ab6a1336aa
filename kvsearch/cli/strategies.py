"""What commands on a PolyKV calibration share: its directory, its model, the sizes to try, and finished replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.calibration.directory import PROFILE
from kvsearch.errors import UsageError
from kvsearch.runs.identity import CONFIG

if TYPE_CHECKING:
    from kvsearch.cli.common import Common
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile, Size

HOW = "run `kvsearch calibrate MODEL --method polykv -o DIR` first"

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory that `calibrate --method polykv` wrote.", show_default=False),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="A hub id, a local directory, or `bundled`.", show_default="as calibrated"
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        help="Entries to keep per kv head, on average.", min=1, show_default="those that were measured, one by one"
    ),
]
Ratio = Annotated[
    float | None, typer.Option(help="Share of the cache to evict, 0 to 1, in place of a budget.", show_default=False)
]


def load_signals(directory: Path) -> Profile:
    """The profile of a PolyKV calibration.

    Raises:
        UsageError: there is no such directory or no profile in it, or the profile is damaged or has no signals.
    """
    from kvsearch.plan.profile import load_profile
    from kvsearch.signals.table import SignalTable

    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"{directory} {what}: give the directory of a calibration, or {HOW}")
    if not (directory / PROFILE).exists():
        raise UsageError(f"{directory} has no {PROFILE}: give the directory of a finished calibration, or {HOW}")
    return SignalTable(load_profile(directory / PROFILE)).profile


def calibrated_model(directory: Path, typed: str | None) -> str:
    """The model to load: what was `typed`, or else what the calibration was told to measure.

    Raises:
        UsageError: nothing was typed and `directory` does not say.
    """
    if typed is not None:
        return typed
    name = _config(directory).get("model")
    if not isinstance(name, str):
        raise UsageError(f"{directory / CONFIG} does not say which model was calibrated: give --model")
    return name


def _config(directory: Path) -> Mapping[str, Any]:
    """What a calibration was told to do; empty if `directory` does not say."""
    from kvsearch.plan.files import read_bytes
    from kvsearch.plan.parsing import parse_json

    path = directory / CONFIG
    found = parse_json(read_bytes(path), str(path)) if path.exists() else None
    return found if isinstance(found, dict) else {}


def load_calibrated(common: Common, directory: Path, typed: str | None, profile: Profile) -> LoadedModel:
    """Load the model of a calibration, in the dtype and revision that were measured unless others are typed.

    Raises:
        UsageError: which model it is cannot be told.
        IncompatibleError: it is another model than the one that was measured.
        EnvironmentFault: it cannot be loaded here.
    """
    config = _config(directory)
    dtype, revision = config.get("dtype"), config.get("revision")
    if common.dtype == "auto" and isinstance(dtype, str):
        common = replace(common, dtype=dtype)
    if common.revision is None and typed is None and isinstance(revision, str):
        common = replace(common, revision=revision)
    loaded = common.load(calibrated_model(directory, typed))
    profile.metadata.model.require(loaded.fingerprint, f"the profile in {directory}")
    return loaded


def sizes_of(profile: Profile, budget: int | None = None, ratio: float | None = None) -> list[Size]:
    """The sizes to try: the one that was typed, or else all budgets that the calibration measured, ascending.

    Raises:
        UsageError: both a budget and a ratio, or one out of range.
    """
    from kvsearch.plan import Size
    from kvsearch.signals.table import SignalTable

    if budget is None and ratio is None:
        return [Size(budget=measured) for measured in SignalTable(profile).axes.budgets]
    return [Size(budget, ratio)]


def comma_separated(flag: str, typed: str | None) -> list[str] | None:
    """The names in a list such as cosine,ppl; UsageError if one of them is empty."""
    if typed is None:
        return None
    names = [name.strip() for name in typed.split(",")]
    if not all(names):
        raise UsageError(f"{flag} takes names with commas between them, got {typed!r}")
    return names
