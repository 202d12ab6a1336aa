"""Samples that are kept belong to one measurement: those of another one, and damaged ones, are told in a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.measure import calibrate_polykv
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.polykv.samples import kept_samples
from kvsearch.calibration.sample_files import SAMPLES, forget_samples, has_samples
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.policies import Policy, create_policy
from tests.tiny import calibration_data, loaded, wrap

OPTIONS = PolykvOptions(budgets=(8, 24), entropy_rows=8, batch=2)
DATA = calibration_data(40, 60, 50)
POLICIES = create_policy("snapkv", {"window": 4, "kernel": 3}), create_policy("tova")


def profile(
    directory: Path | None = None,
    model: LoadedModel | None = None,
    data: CalibrationData = DATA,
    policies: Sequence[Policy] = POLICIES,
    started: Callable[[], None] | None = None,
    **changes: Any,
) -> Profile:
    options = PolykvOptions(**{**OPTIONS.model_dump(), **changes})
    return calibrate_polykv(model or loaded(), data, options, policies, directory=directory, started=started)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples of a calibration, as an interrupted one leaves them; not to be changed."""
    directory = tmp_path_factory.mktemp("finished")
    profile(directory)
    return directory


@pytest.fixture
def part(finished: Path, tmp_path: Path) -> Path:
    """One of its files: two samples."""
    source = sorted((finished / SAMPLES).iterdir())[0]
    (tmp_path / SAMPLES).mkdir()
    path = tmp_path / SAMPLES / source.name
    path.write_bytes(source.read_bytes())
    return path


def other_weights() -> LoadedModel:
    model = loaded()
    model.model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)
    return wrap(model.model)


def half() -> LoadedModel:
    model = loaded()
    return replace(model, model=model.model.bfloat16())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"budgets": (8, 16)}, "budgets"),
        ({"phases": "decode"}, "phases"),
        ({"signals": ("cosine", "ppl")}, "signals"),
        ({"entropy_rows": 9}, "entropy_rows"),
        ({"answer_tokens": 100}, "answer_tokens"),
        ({"naive": True}, "naive"),
        ({"protocol": "question-aware"}, "prompts"),
        ({"data": DATA.limited(4)}, "prompts"),
        ({"data": calibration_data(40, 60, 70)}, "data"),
        ({"policies": POLICIES[::-1]}, "patterns"),
        ({"policies": (create_policy("snapkv", {"window": 5}), POLICIES[1])}, "patterns"),
        ({"model": other_weights()}, "model weights"),
        ({"model": loaded(rms_norm_eps=1e-3)}, "model configuration"),
        ({"model": half()}, "dtype"),
    ],
)
def test_samples_of_another_measurement_are_refused(changes: dict[str, Any], part: str, finished: Path) -> None:
    """One line, and nothing is measured or changed."""
    before = {path: path.read_bytes() for path in (finished / SAMPLES).iterdir()}
    with pytest.raises(UsageError) as caught:
        profile(finished, **changes)
    assert f"safetensors was measured with other {part}: give another directory, or start anew" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in (finished / SAMPLES).iterdir()} == before


def test_what_decides_nothing_may_change(finished: Path) -> None:
    """Batches, memory, and what is only recorded: all samples are taken over, so the model is not run."""
    found = profile(finished, batch=3, max_memory=1, policy="tova", route="ppl")
    assert found.metadata.policy.name == "tova"
    assert found.arrays["nll"].tobytes() == profile(finished).arrays["nll"].tobytes()


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the arrays of a file, and keep what it was measured of."""
    with safe_open(path, "np") as file:
        identity = file.metadata()
    arrays = load(path.read_bytes())
    change(arrays)
    path.write_bytes(save(arrays, identity))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda arrays: arrays.pop("nll"), "it has no nll"),
        (lambda arrays: arrays.pop("entropy"), "it has no entropy"),
        (lambda arrays: arrays.pop("prompt"), "it has no prompt"),
        (lambda arrays: arrays.update(prompt=arrays["prompt"].astype(np.float32)), "prompt is no list of whole num"),
        (lambda arrays: arrays.update(question=arrays["question"][:1]), r"question has shape \[1\], not \[2\]"),
        (lambda arrays: arrays.update(cosine=arrays["cosine"][..., :1].copy()), r"cosine has shape \[2, 2, 2, 4, 1\]"),
        (lambda arrays: arrays.update(nll=arrays["nll"] * np.nan), "nll holds something else than finite numbers"),
        (lambda arrays: arrays.update(mine=arrays["nll"]), "mine is unknown"),
        (lambda arrays: arrays.update(attention_sum=np.ones((2, 4))), "it has no attention_sum of the right shape"),
        (
            lambda arrays: arrays.update(prompt=0 * arrays["prompt"], question=0 * arrays["question"]),
            "a sample is in it twice",
        ),
    ],
)
def test_damaged_samples_are_told(change: Callable[[dict[str, Any]], object], problem: str, part: Path) -> None:
    rewritten(part, change)
    with pytest.raises(
        UsageError, match=rf"{part.name} is damaged \({problem}.*\): remove it, and what it held"
    ) as told:
        profile(part.parent.parent)
    assert "\n" not in str(told.value)


def test_a_sample_in_two_files_is_told(part: Path) -> None:
    """Each is whole by itself."""
    part.with_name("000099-0000.safetensors").write_bytes(part.read_bytes())
    with pytest.raises(UsageError, match=r"000099-0000.safetensors is damaged \(prompt 0 with question 0 is in anoth"):
        profile(part.parent.parent)


def test_files_of_others_are_left_alone(part: Path) -> None:
    mine = part.with_name("mine.safetensors")
    mine.write_text("mine")
    directory = part.parent.parent
    assert kept_samples(directory) == 2
    assert profile(directory).to_bytes() == profile().to_bytes()
    forget_samples(directory)
    assert [path.name for path in part.parent.iterdir()] == ["mine.safetensors"]
    assert not has_samples(directory)
    mine.unlink()
    forget_samples(directory)
    assert not part.parent.exists()


def test_a_file_says_what_it_was_measured_of(part: Path) -> None:
    with safe_open(part, "np") as file:
        identity = file.metadata()
    assert json.loads(identity["budgets"]) == [8, 24]
    assert identity["data"] == DATA.sha256
    assert identity["model weights"] == loaded().fingerprint.weights_sha256


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"policy": "h2o"},
            "policy 'h2o', for strategies without a route, is none of the patterns: name one of snapkv, t",
        ),
        ({"policies": (*POLICIES, POLICIES[1])}, "the pattern tova is given twice"),
        ({"policies": (*POLICIES, create_policy("full"))}, "policy full: it agrees with itself"),
        ({"policies": (create_policy("snapkv"), POLICIES[1])}, "it always keeps 32 entries .* than a budget of 8"),
        ({"policies": ()}, "there are no patterns"),
        ({"budgets": (8, 64)}, "nothing is evicted at a budget of 64"),
        ({"max_memory": 1e-6}, "--max-memory is 1e-06 GB"),
    ],
)
def test_nothing_starts_before_all_is_checked(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    started: list[bool] = []
    with pytest.raises(UsageError, match=problem):
        profile(tmp_path, started=lambda: started.append(True), **changes)
    assert (started, list(tmp_path.iterdir())) == ([], [])


def test_what_is_dropped_at_the_start_is_not_taken_over(part: Path) -> None:
    directory = part.parent.parent
    rewritten(part, lambda arrays: arrays.update(nll=arrays["nll"] + 1))
    assert profile(directory, started=lambda: forget_samples(directory)).to_bytes() == profile().to_bytes()
