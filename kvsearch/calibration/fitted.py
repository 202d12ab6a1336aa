"""Policies that a calibration fitted, by the directory that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsearch.errors import UsageError
from kvsearch.plan import Profile
from kvsearch.plan.files import read_bytes
from kvsearch.plan.saved import PROFILE
from kvsearch.plan.weights import WEIGHTS, know
from kvsearch.policies.fitted import Fitted, profile_of
from kvsearch.policies.registry import FITTED, policy_class


def fitted_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return the policy that NAME=DIR, as in "probe=DIR", or a plain name stands for, and the parameters this says.

    They are the weights, and what entries were protected where they were fitted.

    DIR is a directory with the policy's weights, or their file there.

    Raises:
        UsageError: another policy than the fitted ones with a directory, no such file, or one without weights of it;
            a fit that every built-in ranking is better than, unless it was made with --allow-harmful.
    """
    name, given, source = text.partition("=")
    if name not in FITTED:
        if given:
            known = ", ".join(f"{one}=DIR" for one in FITTED)
            raise UsageError(f"policy {text!r}: only {known} are read from a directory")
        return name, {}
    policy = policy_class(name)
    assert issubclass(policy, Fitted)
    if not given:
        raise UsageError(f"policy {name} is fitted: give {name}=DIR, a directory that {policy.made_by} wrote")
    path = Path(source)
    path = path / (policy.published or PROFILE) if path.is_dir() else path
    digest = know(read_bytes(path), path)
    policy.check_weights(digest)
    if policy.published:
        return name, {WEIGHTS: digest}
    profile = profile_of(digest, name)
    _refuse_last(profile, text)
    return name, {**profile.metadata.policy.params, WEIGHTS: digest}


def _refuse_last(profile: Profile, text: str) -> None:
    """Raise UsageError if a fit loses to every ranking that it was compared with, and was not insisted on."""
    settings = profile.metadata.provenance.settings
    loss = profile.arrays.get("loss")  # [P, B], the fit first; older fits did not measure it
    if loss is None or settings.get("allow_harmful"):
        return
    mean = loss.mean(1)
    if bool((mean[1:] < mean[0]).all()):
        raise UsageError(
            f"policy {text}: on contexts that it never saw every built-in ranking is better than this fit: fit on more "
            f"contexts, or insist with calibrate --method {profile.metadata.method} --allow-harmful"
        )
