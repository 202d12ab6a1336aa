"""Provenance of plans made of other plans: that of the source, and what was done since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsearch.plan.fields import Provenance

CHANGES = "changes"
POLICIES = "policies."


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
