"""A ranking calibrated end to end on a tiny model, and its parts."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.fitted import fitted_policy
from kvsearch.calibration.lukv import calibrate_lukv
from kvsearch.calibration.options import COMPARED, LukvOptions, ProbeOptions
from kvsearch.calibration.probe.measure import calibrate_probe, recall_of
from kvsearch.calibration.probe.reading import BUDGETS, split
from kvsearch.calibration.prompts import prompts_of
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile, Size, load_plan, save_plan, save_profile
from kvsearch.policies import create_policy
from kvsearch.report.ranking import RankingView
from kvsearch.runtime import Program
from kvsearch.strategies.from_profile import plan_from_profile
from tests import tiny

SMALL = ProbeOptions(entries=200, form="linear")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return tiny.calibration_data(120, 110, 100, 130, 90, 120)


@pytest.fixture(scope="module")
def profile(model: LoadedModel, data: CalibrationData) -> Profile:
    return calibrate_probe(model, data, SMALL)


def test_a_profile_has_weights_and_how_good_they_are(model: LoadedModel, profile: Profile) -> None:
    layers, heads = profile.metadata.shape
    dim = model.model.config.head_dim
    assert profile.arrays["linear"].shape == (layers, heads, 2 * dim + 5)
    assert profile.arrays["hidden"].shape[-1] == 0
    recall = profile.arrays["recall"]
    assert recall.shape == (1 + len(COMPARED), len(BUDGETS), layers, heads)
    assert ((recall > 0) & (recall <= 1 + 1e-6)).all()
    assert profile.metadata.provenance.settings["contexts"] == (4, 1, 1)
    view = RankingView(profile)
    assert next(view.remarks()) == "fitted on 4 contexts, chosen on 1, reported on 1"
    assert set(view.as_json()["recall"]) == {"probe", *COMPARED}


def test_the_same_bytes_again(model: LoadedModel, data: CalibrationData, profile: Profile) -> None:
    assert calibrate_probe(model, data, SMALL).to_bytes() == profile.to_bytes()


def test_a_fit_that_loses_says_so(profile: Profile) -> None:
    loss = np.ones_like(profile.arrays["loss"])
    loss[0] = 0.5
    better = Profile(profile.metadata, {**profile.arrays, "loss": loss.copy()})
    assert RankingView(better).loses_to() is None
    loss[2] = 0.0
    worse = Profile(profile.metadata, {**profile.arrays, "loss": loss.copy()})
    assert f"{COMPARED[1]} ranks better than the fit" in list(RankingView(worse).remarks())[-1]
    loss[0] = 2.0
    last = Profile(profile.metadata, {**profile.arrays, "loss": loss})
    assert "every other ranking is better" in list(RankingView(last).remarks())[-1]


def test_budgets_on_top_of_a_ranking(
    model: LoadedModel, data: CalibrationData, profile: Profile, tmp_path: Path
) -> None:
    """From a directory to a plan in a folder of its own, which has the weights beside it."""
    save_profile(profile, tmp_path / "profile.safetensors")
    name, params = fitted_policy(f"probe={tmp_path}")
    found = calibrate_lukv(model, data, create_policy(name, params), LukvOptions(normalization="layer"))
    plan = plan_from_profile(found, Size(ratio=0.5))
    (tmp_path / "there").mkdir()
    save_plan(plan, tmp_path / "there" / "plan.json")
    assert len(list((tmp_path / "there").glob("probe-*.safetensors"))) == 1
    Program.from_plan(model.model, load_plan(tmp_path / "there" / "plan.json"))


def test_directories_without_a_ranking(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="policy probe is fitted: give probe=DIR"):
        fitted_policy("probe")
    with pytest.raises(UsageError, match=r"only probe=DIR, query_bank=DIR.* are read from a directory"):
        fitted_policy("snapkv=runs")
    with pytest.raises(UsageError, match="there is no file"):
        fitted_policy(f"probe={tmp_path}")


def test_contexts_are_used_once(model: LoadedModel, data: CalibrationData) -> None:
    prompts = prompts_of(model, data)
    for seed in range(5):
        parts = split(prompts, seed)
        assert sorted(prompt.context for part in parts for prompt in part) == list(range(6))
        assert [len(part) for part in parts] == [4, 1, 1]
    with pytest.raises(UsageError, match="there are 2: give at least 3, better dozens"):
        split(prompts[:2], 0)


def test_recall_is_a_share_of_the_oracle() -> None:
    """Of 10 entries, 5% and 10% are one entry, 20% are two."""
    values = [8.0, 4.0, 2.0, 1.0] + [0.0] * 6
    for order in permutations(range(4)):
        ranked = np.array([values[i] for i in order] + values[4:])
        assert recall_of(ranked) == pytest.approx([ranked[0] / 8, ranked[0] / 8, (ranked[0] + ranked[1]) / 12])
    assert recall_of(np.zeros(10)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"features": ("keys",)}, "'keys' is unknown; did you mean 'key'"),
        ({"targets": ("answer",)}, "'answer' is unknown; did you mean 'answers'"),
        ({"features": ()}, "names nothing"),
        ({"entries": 5}, "greater than or equal to 100"),
    ],
)
def test_bad_options(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ProbeOptions(**given)
