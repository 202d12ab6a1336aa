"""The arrays of profiles: every one has the axes and the range of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import describe_validation_error
from kvsearch.plan import Profile, ProfileMetadata, Size
from kvsearch.plan.profile import load_profile
from kvsearch.plan.profile_arrays import BESIDE_TABLE, SignalAxes
from kvsearch.selection.joint import make_joint_plan, read_policy_curves
from tests.signals.profiles import make_signals, signal_metadata

SEEDS = Path(__file__).parents[1] / "seeds"


@pytest.fixture(scope="module", params=["lukv", "lukv-rivals", "cake", "adakv"])
def profile(request: pytest.FixtureRequest) -> Profile:
    return load_profile(SEEDS / f"{request.param}.safetensors")


def test_every_array_that_a_calibration_wrote_has_its_shape(profile: Profile) -> None:
    known = BESIDE_TABLE.keys() | {"evicted_ratio", "kept"}
    assert profile.arrays.keys() <= known
    for name in profile.arrays.keys() & BESIDE_TABLE.keys():
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


def test_a_minimum_that_is_no_share_gives_no_plan() -> None:
    found = load_profile(SEEDS / "lukv-rivals.safetensors")
    origin = found.metadata.provenance
    for minimum in ("much", -1, 2**40):
        told = origin.model_copy(update={"settings": {**origin.settings, "minimum": minimum}})
        other = Profile(found.metadata.model_copy(update={"provenance": told}), found.arrays)
        with pytest.raises(UsageError, match=r"has a minimum of .*, which is a share of 0 to 1"):
            make_joint_plan(read_policy_curves(other), Size(16))


AXES: dict[str, Any] = {
    "patterns": [{"name": "snapkv", "params": {"window": 4}}, {"name": "tova"}],
    "phases": ["prefill", "decode"],
    "budgets": [16, 64],
    "protocol": "question-agnostic",
}


def problems_of(**arrays: Any) -> list[str]:
    """What is wrong with a profile of 3 samples, 2 phases, 4 layers, 3 patterns and one budget."""
    with pytest.raises(UsageError) as caught:
        make_signals(**arrays)
    first, *lines = str(caught.value).splitlines()
    assert first == f"the profile is not valid, {len(lines)} problem{'s' if len(lines) > 1 else ''}:"
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"budgets": [64, 16]}, "budgets: must be ascending, each once"),
        ({"budgets": [0, 16]}, "budgets.0: "),
        ({"patterns": [{"name": "tova"}, {"name": "tova", "params": {"sinks": 2}}]}, "patterns: names a pattern twice"),
        ({"phases": ["prefil"]}, "phases.0: "),
        ({"colour": 1}, "colour: unknown key"),
    ],
)
def test_axes_that_cannot_be(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SignalAxes.model_validate({**AXES, **changes})
    assert problem in describe_validation_error(caught.value, "axes")


def test_signals_are_optional_but_their_facts_are_not() -> None:
    profile = make_signals(cosine=None, relative_error=None, nll=None, full_nll=None, mean_entropy=None)
    assert set(profile.arrays) == {"sample_tokens", "sample_length", "sample_context"}
    assert problems_of(sample_length=None, sample_context=None) == [
        "arrays.sample_length: is missing, a polykv profile needs it",
        "arrays.sample_context: is missing, a polykv profile needs it",
    ]


@pytest.mark.parametrize("missing", ["nll", "full_nll"])
def test_losses_need_those_of_the_full_cache(missing: str) -> None:
    assert problems_of(**{missing: None}) == ["arrays: nll and full_nll go together"]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("cosine", (3, 1, 2, 4), [3, 1, 2, 4, 3]),
        ("relative_error", (3, 1, 2, 3, 4), [3, 1, 2, 4, 3]),
        ("nll", (2, 1, 2, 4, 3), [3, 1, 2, 4, 3]),
        ("full_nll", (3, 1), [3]),
        ("sample_context", (2,), [3]),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...], expected: list[int]) -> None:
    dtype = np.int32 if name == "sample_context" else np.float32
    assert problems_of(**{name: np.zeros(shape, dtype=dtype)}) == [
        f"arrays.{name}: has shape {list(shape)}, must be {expected}"
    ]


def test_axes_are_of_polykv_profiles() -> None:
    plain = {**signal_metadata().model_dump(), "signals": None}
    with pytest.raises(UsageError, match="signals: is missing, a polykv profile needs it"):
        Profile(ProfileMetadata.model_validate(plain), make_signals().arrays)
