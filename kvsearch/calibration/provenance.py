"""The metadata of a profile that a calibration makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsearch.plan import PolicySpec, ProfileMetadata
from kvsearch.plan.contexts import ContextRecord
from kvsearch.plan.origin import provenance

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.models.loading import LoadedModel


def profile_metadata(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: PolicySpec,
    method: str,
    seed: int,
    settings: Mapping[str, Any],
    lengths: Sequence[int],
    floor: int,
    rivals: Sequence[PolicySpec] = (),
) -> ProfileMetadata:
    """Describe a profile made now: of prompts of these `lengths`, `floor` entries per head kept of the longest.

    `rivals` are policies that were measured beside `policy`.
    """
    from kvsearch.models.architecture import describe

    return ProfileMetadata(
        model=loaded.fingerprint,
        method=method,
        policy=policy,
        length=max(lengths),
        questions=len(lengths),
        layers=describe(loaded.model).full_layers,
        floor=floor,
        policies=(policy, *rivals) if rivals else None,
        provenance=provenance(method, seed, data.sha256, settings, ContextRecord(fitted=data.asked)),
    )
