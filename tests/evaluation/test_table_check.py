"""A table of budgets beside even ones: the verdict, what it is about, and that export heeds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvsearch
from kvsearch.calibration import lukv
from kvsearch.calibration.options import LukvOptions
from kvsearch.calibration.tables import CHECKED_RATIOS, FOLDS, HELD_OUT, assign_folds
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.evaluation import table_check
from kvsearch.evaluation.table_check import check_table
from kvsearch.plan import Profile, load_profile, save_profile
from kvsearch.plan.profile import TableCheck
from tests import tiny
from tests.calibrations import calibrate_lukv

OPTIONS = LukvOptions(params={"window": 4, "kernel": 3, "sinks": 2}, normalization="layer", answers="given")


@pytest.fixture(scope="module")
def measured() -> tuple[Any, Any, Profile]:
    model, data = tiny.loaded(), tiny.calibration_data(*(90 + 4 * n for n in range(6)), questions=1)
    return model, data, calibrate_lukv(model, data, OPTIONS.make_policy(), OPTIONS)


def test_each_fold_has_the_table_of_all_other_contexts(measured: Any) -> None:
    model, data, profile = measured
    held_out, folds = profile.arrays[HELD_OUT], assign_folds(data)
    assert held_out.shape == (FOLDS, len(CHECKED_RATIOS), 4, 2)
    assert folds == [0, 1, 2, 3, 0, 1]
    others = [context for context, fold in zip(data.contexts, folds, strict=True) if fold != 1]
    alone = calibrate_lukv(model, replace(data, contexts=tuple(others)), OPTIONS.make_policy(), OPTIONS)
    for row, ratio in enumerate(CHECKED_RATIOS):
        np.testing.assert_allclose(held_out[1, row], alone.local_ratios(ratio), atol=1e-6)


def test_even_budgets_are_as_good_as_themselves_and_other_tables_are_not(measured: Any) -> None:
    _, data, profile = measured
    model = tiny.loaded()
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            weight.mul_(6 if "q_proj" in name or "o_proj" in name else 1)  # so that replies hang on what is kept
    even = np.broadcast_to(np.array(CHECKED_RATIOS, dtype=np.float32)[:, None, None], (FOLDS, 3, 4, 2))
    found = check_table(model, data, OPTIONS, Profile(profile.metadata, {**profile.arrays, HELD_OUT: even}))
    assert [one.ratio for one in found] == list(CHECKED_RATIOS)
    assert all(one.table == one.even and one.low == one.high == 0 for one in found)
    assert {(one.verdict, one.contexts) for one in found} == {("unproven", 6)}
    ragged = even.copy()
    ragged[:, :, 1:], ragged[:, :, 0] = 0.94, 0.2
    as_measured = OPTIONS.model_copy(update={"shrink": False})
    other = check_table(model, data, as_measured, Profile(profile.metadata, {**profile.arrays, HELD_OUT: ragged}))
    assert [one.even for one in other] == [one.even for one in found]
    assert any(one.table != one.even for one in other)


@pytest.mark.parametrize(
    ("leads", "verdict"),
    [
        ([-0.2] * 12, "harmful"),
        ([0.2] * 12, "useful"),
        ([-0.2] * 5, "unproven"),  # so few agree by chance
        ([-0.2, 0.2] * 6, "unproven"),
        ([0.0] * 12, "unproven"),
    ],
)
def test_a_verdict_is_beyond_doubt(leads: list[float], verdict: str) -> None:
    scores = np.stack([0.5 + np.array(leads), np.full(len(leads), 0.5)], 1)
    found = table_check._judge_ratio(0.8, scores, np.arange(len(leads)) % FOLDS, table_check.TABLE_AND_EVEN)
    assert found.mix == 1
    assert found.verdict == verdict
    assert found.table - found.even == pytest.approx(np.mean(leads))


def checked(profile: Profile, *verdicts: Any) -> Profile:
    checks = tuple(
        TableCheck(ratio=ratio, contexts=12, table=0.4, even=0.6, low=-0.3, high=-0.1, verdict=verdict)
        for ratio, verdict in zip(CHECKED_RATIOS, verdicts, strict=True)
    )
    return replace(profile, metadata=profile.metadata.model_copy(update={"checks": checks}))


def test_export_refuses_a_table_that_lost(measured: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    save_profile(checked(measured[2], "harmful", "unproven", "unproven"), path)
    assert load_profile(path).metadata.checks is not None
    with pytest.raises(UsageError, match=r"lose to even ones: at ratio 0.8 40.0%.*--allow-harmful") as refused:
        kvsearch.export(path, ratio=0.8, output=tmp_path / "plan.json")
    assert refused.value.exit_code == 2
    assert not (tmp_path / "plan.json").exists()
    with pytest.warns(KvsearchWarning, match="lose to even ones"):
        kvsearch.export(path, ratio=0.8, output=tmp_path / "plan.json", allow_harmful=True)
    assert (tmp_path / "plan.json").exists()
    kvsearch.export(path, ratio=0.9, output=tmp_path / "other.json")
    save_profile(measured[2], tmp_path / "old.safetensors")  # one without checks, as all were
    kvsearch.export(tmp_path / "old.safetensors", ratio=0.8, output=tmp_path / "old.json")


@pytest.mark.nightly
def test_a_table_of_the_wrong_layers_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 3 of six retrieves; with layers turned round, what it needs goes to layer 2."""
    monkeypatch.setattr(lukv, "_comparable", lambda question, *_: question.comparable[::-1])
    given = {"answers": "given", "shrink": False, "output": tmp_path / "one"}
    with pytest.warns(KvsearchWarning, match="the table loses to even budgets: at ratio 0.8"):
        kvsearch.calibrate("bundled", **given)
    with pytest.raises(UsageError, match="--allow-harmful"):
        kvsearch.export(tmp_path / "one", ratio=0.8, output=tmp_path / "plan.json")


def test_the_mixture_that_keeps_most_is_written_ratio_by_ratio(measured: Any) -> None:
    profile = measured[2]
    table = profile.arrays["evicted_ratio"].astype(np.float64)
    mixes = (1 / 3, 1.0, 0.0)
    scored = [
        TableCheck(ratio=ratio, contexts=6, table=0.5, even=0.5, low=0, high=0, verdict="unproven", mix=mix)
        for ratio, mix in zip(CHECKED_RATIOS, mixes, strict=True)
    ]
    found = table_check.shrink_table(profile, tuple(scored)).arrays["evicted_ratio"]
    even = table.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(found[:80], (table / 3 + even * 2 / 3)[:80], atol=1e-6)  # up to a ratio of 0.8
    np.testing.assert_allclose(found[89], table[89], atol=1e-6)
    np.testing.assert_allclose(found[94:], np.broadcast_to(even, table.shape)[94:], atol=1e-6)
    np.testing.assert_allclose(found.mean((1, 2)), table.mean((1, 2)), atol=1e-6)
    assert table_check.shrink_table(profile, tuple(one.model_copy(update={"mix": 1.0}) for one in scored)) is profile


def test_no_context_judges_the_mixture_that_it_chose() -> None:
    mixes = (1.0, 0.5, 0.0)
    # every fold alone likes another mixture best; what the other folds choose is never its own
    liked = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    found = table_check._judge_ratio(0.8, liked + 0.001 * np.array([0, 0, 1]), np.array([0, 1, 2, 0, 1, 2]), mixes)
    assert found.table < liked.mean() + 0.001
    good = np.tile([0.9, 0.7, 0.5], (12, 1))
    assert (table_check._judge_ratio(0.8, good, np.arange(12) % 4, mixes).mix) == 1.0
    equal = np.tile([0.9, 0.9, 0.9], (12, 1))  # what is not shown to help is left out
    assert (table_check._judge_ratio(0.8, equal, np.arange(12) % 4, mixes).mix) == 0.0
    both = np.tile([0.9, 0.9, 0.5], (12, 1))
    assert (table_check._judge_ratio(0.8, both, np.arange(12) % 4, mixes).mix) == 1.0
    small = np.tile([0.5, 0.9, 0.5], (12, 1))
    kept = table_check._judge_ratio(0.8, small, np.arange(12) % 4, mixes)
    assert (kept.mix, kept.verdict) == (0.5, "useful")
    assert "50% of the table, even for the rest" in kept.words
