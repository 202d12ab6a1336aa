"""What a calibration left: the profile in its directory, and the model that it measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.calibration.directory import HOW, PROFILE, CalibratedModel, calibrated_model
from kvsearch.errors import UsageError
from kvsearch.runs.identity import CONFIG

if TYPE_CHECKING:
    from kvsearch.jobs.groups import Loading
    from kvsearch.jobs.talk import Talk
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile


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
    known, instead = calibrated_model(directory) or CalibratedModel(None, None, None), dict[str, Any]()
    if loading.dtype == "auto" and known.dtype is not None:
        instead["dtype"] = known.dtype
    if loading.revision is None and model is None and known.revision is not None:
        instead["revision"] = known.revision
    name = known.name if model is None else model
    if name is None:
        raise UsageError(f"{directory / CONFIG} does not say which model was calibrated: give --model")
    loaded = loading.load(name, talk, **instead)
    profile.metadata.model.require(loaded.fingerprint, f"the profile in {directory}")
    return loaded
