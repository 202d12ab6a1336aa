"""Weights beside the files that name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.core.errors import UsageError
from kvsearch.plan import load_plan, save_plan
from kvsearch.plan import saved as weights
from tests.plan.builders import make_plan
from tests.policies.probes import fitted


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    plan = make_plan()
    layers = [None if layer is None else layer.model_copy(update={"policy": fitted().spec})
              for layer in plan.prefill.layers]  # fmt: skip
    path = tmp_path / "plan.json"
    save_plan(plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"layers": tuple(layers)})}), path)
    return path


@pytest.fixture
def forgotten(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan as another process finds it."""
    monkeypatch.setattr(weights, "_known", {})
    return saved


def test_a_plan_brings_its_weights(forgotten: Path) -> None:
    plan = load_plan(forgotten)
    (spec,) = plan.policies
    (beside,) = forgotten.parent.glob("probe-*.safetensors")
    assert weights.read_known_weights(str(spec.params["weights"])) == (beside, beside.read_bytes())
    copied = forgotten.parent / "copied"
    copied.mkdir()
    save_plan(plan, copied / "other.json")
    assert (copied / beside.name).read_bytes() == beside.read_bytes()


def test_a_plan_with_other_weights(forgotten: Path) -> None:
    (beside,) = forgotten.parent.glob("probe-*.safetensors")
    beside.write_bytes(beside.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match=rf"{beside.name} has other weights than .*plan.json names"):
        load_plan(forgotten)
