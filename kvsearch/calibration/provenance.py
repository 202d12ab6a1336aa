"""Where a file came from: versions, seed, data and settings; never a time, so that equal inputs give equal files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from kvsearch.plan import PolicySpec, Profile, ProfileMetadata, Provenance

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.models.loading import LoadedModel
    from kvsearch.policies import Policy


def provenance(method: str, seed: int, data_sha256: str | None, settings: Mapping[str, Any]) -> Provenance:
    """Provenance of something made now, by this installation."""
    return Provenance(
        method=method,
        seed=seed,
        kvsearch=version("kvsearch"),
        torch=version("torch"),
        transformers=version("transformers"),
        data_sha256=data_sha256,
        settings=dict(settings),
    )


def profile_metadata(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    method: str,
    seed: int,
    settings: Mapping[str, Any],
    lengths: Sequence[int],
    floor: int,
) -> ProfileMetadata:
    """Metadata of a profile made now: of prompts of these `lengths`, `floor` entries per head kept of the longest."""
    from kvsearch.models.architecture import describe

    return ProfileMetadata(
        model=loaded.fingerprint,
        method=method,
        policy=PolicySpec(name=policy.name, params=policy.parameters()),
        length=max(lengths),
        questions=len(lengths),
        layers=describe(loaded.model).full_layers,
        floor=floor,
        provenance=provenance(method, seed, data.sha256, settings),
    )


def extended(profile: Profile, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Profile:
    """A profile with more settings in its provenance and more arrays."""
    origin = profile.metadata.provenance
    origin = origin.model_copy(update={"settings": {**origin.settings, **settings}})
    return Profile(profile.metadata.model_copy(update={"provenance": origin}), {**profile.arrays, **arrays})
