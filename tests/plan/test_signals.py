"""The axes of signals in a profile, and what is wrong with arrays that do not have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvsearch.errors import UsageError
from kvsearch.plan import Profile, ProfileMetadata, load_profile, save_profile
from kvsearch.plan.parsing import describe_validation_error
from kvsearch.plan.signals import SignalAxes, signal_problems
from tests.signals.profiles import make_signals, signal_metadata

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


def test_round_trip(tmp_path: Path) -> None:
    profile = make_signals(signal_metadata(budgets=(16, 64)), literal_entropy=np.ones((2, 4)))
    save_profile(profile, tmp_path / "profile.safetensors")
    loaded = load_profile(tmp_path / "profile.safetensors")
    assert loaded.metadata == profile.metadata
    assert loaded.metadata.signals == profile.metadata.signals
    assert loaded.arrays.keys() == profile.arrays.keys()
    assert all(np.array_equal(loaded.arrays[name], profile.arrays[name]) for name in profile.arrays)


def test_axes() -> None:
    axes = SignalAxes.model_validate(AXES)
    assert [pattern.name for pattern in axes.patterns] == ["snapkv", "tova"]
    assert (axes.phases, axes.budgets) == (("prefill", "decode"), (16, 64))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"budgets": [64, 16]}, "budgets: must be ascending, each once"),
        ({"budgets": [16, 16]}, "budgets: must be ascending, each once"),
        ({"budgets": [0, 16]}, "budgets.0: "),
        ({"budgets": [16.0]}, "budgets.0: "),
        ({"budgets": []}, "budgets: "),
        ({"patterns": [{"name": "tova"}, {"name": "tova", "params": {"sinks": 2}}]}, "patterns: names a pattern twice"),
        ({"patterns": []}, "patterns: "),
        ({"phases": ["prefil"]}, "phases.0: "),
        ({"phases": []}, "phases: "),
        ({"colour": 1}, "colour: unknown key"),
        ({"protocol": ""}, "protocol: "),
    ],
)
def test_axes_that_cannot_be(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SignalAxes.model_validate({**AXES, **changes})
    assert problem in describe_validation_error(caught.value, "axes")


def test_signals_are_optional_but_their_facts_are_not() -> None:
    profile = make_signals(cosine=None, relative_error=None, nll=None, full_nll=None, entropy=None, mean_entropy=None)
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
        ("entropy", (3, 4, 2), [3, 2, 4]),
        ("mean_entropy", (3, 2, 4), [2, 4]),
        ("literal_entropy", (3, 2, 4), [2, 4]),
        ("sample_context", (2,), [3]),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...], expected: list[int]) -> None:
    dtype = np.int32 if name == "sample_context" else np.float32
    assert problems_of(**{name: np.zeros(shape, dtype=dtype)}) == [
        f"arrays.{name}: has shape {list(shape)}, must be {expected}"
    ]


def test_the_samples_are_counted_by_their_tokens() -> None:
    tokens = np.ones(2, dtype=np.int32)
    assert len(problems_of(sample_tokens=tokens)) == 7  # all others have three samples
    table = np.ones((3, 1), dtype=np.int32)
    assert "arrays.sample_tokens: has shape [3, 1], must be [3]" in problems_of(sample_tokens=table)


def test_numbers_must_be_finite() -> None:
    (problem,) = problems_of(full_nll=np.array([1.0, np.nan, np.inf]))
    assert problem == "arrays.full_nll: 2 of 3 values are not finite"


def test_axes_are_of_polykv_profiles() -> None:
    plain = {**signal_metadata().model_dump(), "signals": None}
    with pytest.raises(UsageError, match="signals: is missing, a polykv profile needs it"):
        Profile(ProfileMetadata.model_validate(plain), make_signals().arrays)
    assert list(signal_problems({}, None, 4)) == ["signals: is missing, a polykv profile needs it"]
