"""Profiles: all mistakes at once, arrays with the axes of what was measured, and the look-up between grid rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save

from kvsearch.core.errors import UsageError
from kvsearch.plan import Profile, ProfileMetadata, load_profile
from kvsearch.plan.profile_arrays import BESIDE_TABLE
from tests.examples import at_most
from tests.plan.builders import make_profile, metadata_dict, ratio_table
from tests.signals.profiles import make_signals


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.safetensors"


def write(path: Path, arrays: dict[str, np.ndarray], metadata: object, **header: str) -> None:
    path.write_bytes(save(arrays, {"kvsearch": json.dumps(metadata), **header}))


def message_of(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    return str(caught.value)


def test_foreign_files_are_refused(path: Path) -> None:
    assert "there is no file" in message_of(path)
    path.write_bytes(save({"a": np.zeros(2)}))
    assert "without kvsearch metadata" in message_of(path)
    path.write_bytes(save({"a": np.zeros(2)}, {"kvsearch": "{"}))
    assert "is not valid JSON at line 1" in message_of(path)
    write(path, {}, metadata_dict(format="kvsearch.plan"))
    assert "not a kvsearch.profile file" in message_of(path)


def bent(row: int, value: float) -> np.ndarray:
    table = ratio_table()
    table[row, 0, 0] = value
    return table


BAD_TABLES: list[tuple[np.ndarray, str]] = [
    (ratio_table()[:98], r"has shape [98, 2, 2], must be [99, 2, 2]"),
    (ratio_table().astype(np.float64), "has type float64, must be float32"),
    (bent(5, np.nan), "1 of 396 values are not finite"),
    (bent(5, -0.5), "has values outside [0, 1]"),
    (bent(49, 0.95), "1 of 99 rows do not average to their global ratio, e.g. row 49 (0.50)"),
]


@pytest.mark.parametrize(("table", "expected"), BAD_TABLES)
def test_wrong_tables_are_refused_in_memory_and_on_disk(path: Path, table: np.ndarray, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_profile(table)
    write(path, {"evicted_ratio": np.ascontiguousarray(table)}, metadata_dict())
    for message in (str(caught.value), message_of(path)):
        assert f"arrays.evicted_ratio: {expected}" in message


def test_everything_wrong_with_a_file_is_listed_at_once(path: Path) -> None:
    arrays = {"evicted_ratio": bent(5, 2.0)[:50], "extra": np.array([np.inf]), "half": np.zeros(2, np.float16)}
    write(path, arrays, metadata_dict(layers=[2, 0], questions=0, note="x"), author="me")
    places = [line.strip().partition(":")[0] for line in message_of(path).splitlines()[1:]]
    expected = ["layers", "questions", "note", "header.author", "arrays.half"]
    assert sorted(places) == sorted([*expected, "arrays.extra"])


def test_methods_that_make_a_table_need_it_and_others_do_not() -> None:
    for method in ("lukv", "lava", "cake", "adakv"):
        with pytest.raises(UsageError, match=f"evicted_ratio: is missing, a {method} profile needs it"):
            Profile(ProfileMetadata.model_validate(metadata_dict(method=method)), {})
        assert make_profile(method=method).local_ratios(0.5).mean() == pytest.approx(0.5)
    other = Profile(ProfileMetadata.model_validate(metadata_dict(method="cosine")), {"score": np.ones((2, 3))})
    with pytest.raises(UsageError, match="this 'cosine' profile has no 'evicted_ratio' table: calibrate lukv, lava"):
        other.local_ratios(0.5)


@pytest.mark.parametrize("layers", [[], [2, 1], [0, 3], [0.0]])
def test_layers_must_be_layers_of_the_model(layers: Any) -> None:
    with pytest.raises(ValidationError):
        ProfileMetadata.model_validate(metadata_dict(layers=layers))


def test_means_may_be_off_by_an_entry() -> None:
    """Rows below the floor are at what the floor allows."""
    table = np.minimum(ratio_table() + np.float32(0.0109), 1)  # 1 / 100 + 1e-3 is allowed
    assert make_profile(table).metadata.length == 100
    with pytest.raises(UsageError, match="do not average"):
        make_profile(table, length=1000)
    clipped = np.broadcast_to(np.minimum(np.arange(1, 100) / 100, 0.96)[:, None, None], (99, 2, 2)).astype(np.float32)
    make_profile(clipped, floor=4)
    with pytest.raises(UsageError, match="do not average"):
        make_profile(clipped, floor=1)


@pytest.mark.parametrize(
    ("ratio", "parts"),
    [(0.5, {49: 1}), (0.8025, {79: 0.75, 80: 0.25}), (0.004, {0: 0.4}), (1e-15, {}), (0.999, {98: 1})],
)
def test_between_rows_the_way_is_straight_below_them_towards_zero_and_above_them_flat(
    ratio: float, parts: dict[int, float]
) -> None:
    profile = make_profile()
    expected = sum(share * profile.arrays["evicted_ratio"][row].astype(np.float64) for row, share in parts.items())
    np.testing.assert_allclose(profile.local_ratios(ratio), expected, atol=1e-12)


@at_most(60)
@given(st.floats(1e-6, 0.99))
def test_the_mean_stays_the_global_ratio(ratio: float) -> None:
    local = make_profile().local_ratios(ratio)
    assert local.shape == (2, 2)
    assert local.mean() == pytest.approx(ratio, abs=1e-6)


@pytest.mark.parametrize("ratio", [0, 1, float("nan"), True])
def test_ratios_outside_the_open_interval_are_refused(ratio: float) -> None:
    with pytest.raises(UsageError, match="lies between 0 and 1"):
        make_profile().local_ratios(ratio)


SEEDS = Path(__file__).parents[1] / "seeds"


@pytest.fixture(scope="module", params=["lukv-rivals", "cake"])
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
        ("question_ratio", 1.5, "outside"),
        ("question_length", 0, "outside"),
        ("question_ratio", 1e30, "nothing"),
    ],
)
def test_every_value_has_its_range(profile: Profile, name: str, value: Any, problem: str) -> None:
    if name not in profile.arrays:
        return
    array = np.array(profile.arrays[name])
    array.flat[0] = value
    with pytest.raises(UsageError, match=rf"arrays.{name}: has values .*{problem}"):
        Profile(profile.metadata, {**profile.arrays, name: array})


def problems_of(**arrays: Any) -> list[str]:
    """What is wrong with a profile of 3 samples, 2 phases, 4 layers, 3 patterns and one budget."""
    with pytest.raises(UsageError) as caught:
        make_signals(**arrays)
    first, *lines = str(caught.value).splitlines()
    assert first == f"the profile is not valid, {len(lines)} problem{'s' if len(lines) > 1 else ''}:"
    return [line.strip() for line in lines]


def test_signals_are_optional_but_their_facts_are_not() -> None:
    profile = make_signals(cosine=None, relative_error=None, nll=None, full_nll=None, mean_entropy=None)
    assert set(profile.arrays) == {"sample_tokens", "sample_length", "sample_context"}
    assert problems_of(sample_length=None, sample_context=None) == [
        "arrays.sample_length: is missing, a polykv profile needs it",
        "arrays.sample_context: is missing, a polykv profile needs it",
    ]
    assert problems_of(full_nll=None) == ["arrays: nll and full_nll go together"]
