"""What stands beside a table in a profile: every array has the shape and range of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.errors import UsageError
from kvsearch.plan import Profile, Size
from kvsearch.plan.measured import MEASURED
from kvsearch.plan.profile import load_profile
from kvsearch.strategies.joint import joint_plan, policy_curves

SEEDS = Path(__file__).parents[1] / "robustness" / "seeds"


@pytest.fixture(scope="module", params=["lukv", "lukv-rivals", "cake", "cake-fit", "adakv"])
def profile(request: pytest.FixtureRequest) -> Profile:
    return load_profile(SEEDS / f"{request.param}.safetensors")


def test_every_array_that_a_calibration_wrote_has_its_shape(profile: Profile) -> None:
    known = MEASURED.keys() | {"evicted_ratio", "kept"}
    assert profile.arrays.keys() <= known
    for name in profile.arrays.keys() & MEASURED.keys():
        for wrong in (profile.arrays[name][None], profile.arrays[name][:0], profile.arrays[name].reshape(-1)[:-1]):
            with pytest.raises(UsageError, match=rf"arrays.{name}: has shape \[.*\], must be \["):
                Profile(profile.metadata, {**profile.arrays, name: wrong})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("question_ratio", 1.5, "outside"), ("question_ratio", -0.5, "outside"), ("question_length", 0, "outside"),
        ("ratio_deviation", -1, "outside"), ("question_context", -1, "outside"), ("question_ratio", 1e30, "nothing"),
    ],
)  # fmt: skip
def test_every_value_has_its_range(profile: Profile, name: str, value: Any, problem: str) -> None:
    if name not in profile.arrays:
        return
    array = np.array(profile.arrays[name])
    array.flat[0] = value
    with pytest.raises(UsageError, match=rf"arrays.{name}: has values .*{problem}"):
        Profile(profile.metadata, {**profile.arrays, name: array})


def test_what_goes_together(profile: Profile) -> None:
    if "fit_loss" in profile.arrays:
        apart = {name: array for name, array in profile.arrays.items() if name != "fit_loss"}
        with pytest.raises(UsageError, match="fit_loss and fit_exponents go together"):
            Profile(profile.metadata, apart)


def test_a_minimum_that_is_no_share_gives_no_plan() -> None:
    found = load_profile(SEEDS / "lukv-rivals.safetensors")
    origin = found.metadata.provenance
    for minimum in ("much", -1, 2**40):
        told = origin.model_copy(update={"settings": {**origin.settings, "minimum": minimum}})
        other = Profile(found.metadata.model_copy(update={"provenance": told}), found.arrays)
        with pytest.raises(UsageError, match=r"has a minimum of .*, which is a share of 0 to 1"):
            joint_plan(policy_curves([other]), Size(16))
