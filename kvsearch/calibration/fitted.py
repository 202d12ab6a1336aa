"""Policies that a calibration fitted, by the directory that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsearch.calibration.sample_files import PROFILE
from kvsearch.errors import UsageError
from kvsearch.plan.files import read_bytes
from kvsearch.plan.weights import WEIGHTS, know
from kvsearch.policies.probe import Probe, profile_of


def fitted_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return the policy that "probe=DIR" or a plain name stands for, and the parameters that this says.

    DIR is a directory that `calibrate --method probe` wrote, or its profile.

    Raises:
        UsageError: another policy than probe with a directory, no such profile, or one without weights of a ranking.
    """
    name, found, source = text.partition("=")
    if not found and name == Probe.name:
        raise UsageError("policy probe is fitted: give probe=DIR, a directory that `calibrate --method probe` wrote")
    if not found:
        return name, {}
    if name != Probe.name:
        raise UsageError(f"policy {text!r}: only {Probe.name}=DIR is read from a directory")
    path = Path(source)
    path = path / PROFILE if path.is_dir() else path
    digest = know(read_bytes(path), path)
    profile_of(digest)
    return name, {WEIGHTS: digest}
