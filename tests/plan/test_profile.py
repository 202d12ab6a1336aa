"""Profiles: byte-stable round trips, all mistakes at once, and the look-up between grid rows."""

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
from tests.examples import at_most
from tests.plan.builders import make_profile, metadata_dict, ratio_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.safetensors"


def write(path: Path, arrays: dict[str, np.ndarray], metadata: object, **header: str) -> None:
    path.write_bytes(save(arrays, {"kvsearch": json.dumps(metadata), **header}))


def message_of(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    return str(caught.value)


def test_bytes_do_not_depend_on_order_or_memory_layout() -> None:
    table, extra = ratio_table(), np.arange(6).reshape(2, 3)
    metadata = ProfileMetadata.model_validate(metadata_dict())
    one = Profile(metadata, {"evicted_ratio": table, "ranks": extra})
    two = Profile(metadata, {"ranks": extra.astype(">i8"), "evicted_ratio": np.asfortranarray(table)})
    assert one.to_bytes() == two.to_bytes()


def test_arrays_are_read_only_copies() -> None:
    table = ratio_table()
    profile = make_profile(table)
    table[:] = 0
    assert profile.arrays["evicted_ratio"].any()
    with pytest.raises(ValueError, match="read-only"):
        profile.arrays["evicted_ratio"][0] = 0


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
    (ratio_table(3), r"has shape [99, 3, 2], must be [99, 2, 2]"),
    (ratio_table()[0], r"has shape [2, 2], must be [99, 2, 2]"),
    (ratio_table().astype(np.float64), "has type float64, must be float32"),
    (bent(5, np.nan), "1 of 396 values are not finite"),
    (bent(5, -0.5), "has values outside [0, 1]"),
    (bent(49, 0.95), "1 of 99 rows do not average to their global ratio, e.g. row 49 (0.50)"),
    (ratio_table()[::-1], "98 of 99 rows do not average to their global ratio, e.g. row 0 (0.01)"),
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


@pytest.mark.parametrize("layers", [[], [0, 0], [2, 1], [0, 3], [-1], [0.0], "ab"])
def test_layers_must_be_layers_of_the_model(layers: Any) -> None:
    with pytest.raises(ValidationError):
        ProfileMetadata.model_validate(metadata_dict(layers=layers))


def test_means_may_be_off_by_an_entry() -> None:
    table = np.minimum(ratio_table() + np.float32(0.0109), 1)  # 1 / 100 + 1e-3 is allowed
    assert make_profile(table).metadata.length == 100
    with pytest.raises(UsageError, match="do not average"):
        make_profile(table, length=1000)


def test_grid_ratios_give_their_row() -> None:
    profile = make_profile()
    for row, ratios in enumerate(profile.arrays["evicted_ratio"]):
        assert np.array_equal(profile.local_ratios((row + 1) / 100), ratios.astype(np.float64))


@pytest.mark.parametrize(
    ("ratio", "parts"),
    [(0.505, {49: 0.5, 50: 0.5}), (0.8025, {79: 0.75, 80: 0.25}), (0.004, {0: 0.4}), (1e-15, {}), (0.999, {98: 1})],
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


@pytest.mark.parametrize("ratio", [0, 1, -0.1, 1.5, float("nan"), float("inf"), True])
def test_ratios_outside_the_open_interval_are_refused(ratio: float) -> None:
    with pytest.raises(UsageError, match="lies between 0 and 1"):
        make_profile().local_ratios(ratio)


def test_rows_below_the_floor_stay_at_what_the_floor_allows() -> None:
    clipped = np.broadcast_to(np.minimum(np.arange(1, 100) / 100, 0.96)[:, None, None], (99, 2, 2)).astype(np.float32)
    make_profile(clipped, floor=4)
    with pytest.raises(UsageError, match="do not average"):
        make_profile(clipped, floor=1)
