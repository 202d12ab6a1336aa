"""What a calibration left: the profile in its directory, and the model that it measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.jobs.groups import Loading
    from kvsearch.jobs.talk import Talk
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile

PROFILE, CONFIG = "profile.safetensors", "config.json"
HOW = "run `kvsearch calibrate MODEL --method polykv -o DIR` first"


def profile_file(path: Path) -> Path:
    """Return the profile in a directory, or the file itself; UsageError if its calibration is unfinished."""
    if not path.is_dir():
        return path
    from kvsearch.calibration.polykv.samples import has_samples, kept_samples

    unfinished = has_samples(path)
    if (unfinished or not (path / PROFILE).exists()) and (model := _calibrated(path)) is not None:
        count = kept_samples(path) if unfinished else 0
        questions = "1 question" if count == 1 else f"{count} questions"
        kept = f"what is kept of it: {questions}" if unfinished else "nothing of it is kept"
        raise UsageError(
            f"the calibration in {path} is not finished, {kept}: repeat its command, kvsearch calibrate {model} ... "
            f"-o {path}, to go on"
        )
    return path / PROFILE


def load_signals(directory: Path) -> Profile:
    """Read the profile of a PolyKV calibration.

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


def load_calibrated(loading: Loading, directory: Path, model: str | None, profile: Profile, talk: Talk) -> LoadedModel:
    """Load the model of a calibration, in the dtype and revision that were measured unless others are given.

    Raises:
        UsageError: which model it is cannot be told.
        IncompatibleError: it is another model than the one that was measured.
        EnvironmentFault: it cannot be loaded here.
    """
    config, instead = _config(directory), dict[str, Any]()
    dtype, revision = config.get("dtype"), config.get("revision")
    if loading.dtype == "auto" and isinstance(dtype, str):
        instead["dtype"] = dtype
    if loading.revision is None and model is None and isinstance(revision, str):
        instead["revision"] = revision
    name = config.get("model") if model is None else model
    if not isinstance(name, str):
        raise UsageError(f"{directory / CONFIG} does not say which model was calibrated: give --model")
    loaded = loading.load(name, talk, **instead)
    profile.metadata.model.require(loaded.fingerprint, f"the profile in {directory}")
    return loaded


def _config(directory: Path) -> Mapping[str, Any]:
    """Return what a calibration was told to do; empty if its directory does not say."""
    from kvsearch.plan.files import read_bytes
    from kvsearch.plan.parsing import parse_json

    path = directory / CONFIG
    found = parse_json(read_bytes(path), str(path)) if path.is_file() else None
    return found if isinstance(found, dict) else {}


def _calibrated(directory: Path) -> str | None:
    """Return the model in the configuration of a calibration; None if it is of something else."""
    found = _config(directory)
    if not isinstance(found.get("recipe"), dict) or "method" not in found["recipe"]:
        return None
    return str(found.get("model", "MODEL"))
