"""Where a file came from: versions, seed, data and settings; never a time, so that equal inputs give equal files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvsearch.plan.fields import Provenance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvsearch.plan.profile import Profile

CHANGES = "changes"
POLICIES = "policies."


def provenance(method: str, seed: int, data_sha256: str | None, settings: Mapping[str, Any]) -> Provenance:
    """Return the provenance of something made now, by this installation."""
    return Provenance(
        method=method,
        seed=seed,
        kvsearch=version("kvsearch"),
        torch=version("torch"),
        transformers=version("transformers"),
        data_sha256=data_sha256,
        settings=dict(settings),
    )


def extended(profile: Profile, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Profile:
    """Return a profile with more arrays, and more settings in its provenance."""
    metadata, origin = profile.metadata, profile.metadata.provenance
    origin = _with_settings(origin, {**origin.settings, **settings})
    return replace(
        profile, metadata=metadata.model_copy(update={"provenance": origin}), arrays={**profile.arrays, **arrays}
    )


def changed(provenance: Provenance, change: str) -> Provenance:
    """Add a line on what was done to `settings["changes"]`, the oldest first."""
    before = provenance.settings.get(CHANGES, ())
    changes = (*before, change) if isinstance(before, tuple) else (before, change)
    return _with_settings(provenance, {**provenance.settings, CHANGES: changes})


def with_policies_of(policies: Provenance, budgets: Provenance) -> Provenance:
    """Take the provenance `budgets` and add `policies` as settings named "policies.method", "policies.settings.data".

    Such settings of `budgets` are dropped: they are about policies that are no longer in the plan.
    """
    own = {key: value for key, value in budgets.settings.items() if not key.startswith(POLICIES)}
    origin = {"method": policies.method, "seed": policies.seed, "data_sha256": policies.data_sha256}
    origin |= {f"settings.{key}": value for key, value in policies.settings.items()}
    return _with_settings(budgets, own | {f"{POLICIES}{key}": value for key, value in origin.items()})


def _with_settings(provenance: Provenance, settings: Mapping[str, Any]) -> Provenance:
    return Provenance(**{**dict(provenance), "settings": dict(settings)})
