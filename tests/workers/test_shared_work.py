"""Everything that is shared out to workers is the same, to the last bit, as what one process makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.calibration.options import (
    CakeOptions,
    LukvOptions,
    ProbeOptions,
    QueryBankOptions,
)
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.core.errors import InternalError, KvsearchWarning
from kvsearch.evaluation.headroom import measure_headroom
from kvsearch.evaluation.losses import measure_losses
from kvsearch.evaluation.table_check import check_table
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import make_full_program
from kvsearch.tasks.encode import encode_tasks
from tests import tiny
from tests.calibrations import (
    calibrate_cake,
    calibrate_dynamic,
    calibrate_lukv,
    calibrate_polykv,
    calibrate_probe,
    calibrate_query_bank,
)
from tests.workers.copies import shared
from tests.workers.works import stumble, warn

POLICY: Policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
DATA = tiny.calibration_data(60, 56, 60, 50, 52, 60)
FEW = replace(DATA, contexts=DATA.contexts[:3])
LONG = tiny.calibration_data(100, 110, 104)
TASKS = [tiny.listed((40, 2), (36, 1), (40, 2))]
LAYER = LukvOptions(normalization="layer", answers="given", params={"window": 4, "kernel": 3, "sinks": 2})


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded(num_hidden_layers=2)


def polykv(loaded: LoadedModel, directory: Path) -> Profile:
    params = {"snapkv.window": 4}
    options = PolykvOptions(budgets=(20,), batch=2, patterns=("snapkv", "streaming"), policy="snapkv", params=params)
    return calibrate_polykv(loaded, FEW, options, options.policies(), directory=directory)


METHODS: dict[str, Callable[[LoadedModel, Path], Profile]] = {
    "lukv": lambda loaded, _: calibrate_lukv(
        loaded, FEW, POLICY, LukvOptions(answer_tokens=2), compared_policies=[create_policy("keydiff")]
    ),
    "adakv": lambda loaded, _: calibrate_dynamic(loaded, DATA, POLICY, create_allocation("adakv", {})),
    "cake": lambda loaded, _: calibrate_cake(
        loaded, FEW, create_policy("cake", {"window": 4}), CakeOptions(tau1=1.6, window=4)
    ),
    "probe": lambda loaded, place: calibrate_probe(
        loaded, LONG, ProbeOptions(form="linear", answers="given"), directory=place
    ),
    "query_bank": lambda loaded, place: calibrate_query_bank(
        loaded, LONG, QueryBankOptions(bank=7, answer_tokens=2), directory=place
    ),
    "polykv": polykv,
}
USUAL = ("cake", "probe")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.nightly]) for name in METHODS]
)
def test_a_profile_is_the_same(method: str, model: LoadedModel, tmp_path: Path) -> None:
    both, copies = shared(model)
    for name in ("alone", "both"):
        (tmp_path / name).mkdir()
    alone = METHODS[method](model, tmp_path / "alone")
    assert METHODS[method](both, tmp_path / "both").to_bytes() == alone.to_bytes()
    assert sum(copies.items) >= 2
    written = {path.name for path in (tmp_path / "alone").rglob("*.safetensors")}
    assert {path.name for path in (tmp_path / "both").rglob("*.safetensors")} == written


def test_a_table_is_checked_alike(model: LoadedModel) -> None:
    both, copies = shared(model)
    profile = calibrate_lukv(model, DATA, POLICY, LAYER)
    assert check_table(both, DATA, LAYER, profile) == check_table(model, DATA, LAYER, profile)
    assert copies.items == [len(DATA.contexts)]


def programs(model: LoadedModel) -> dict[str, Program]:
    return {
        "small": Program.uniform(model.model, POLICY, lambda length: length // 2),
        "adakv": Program.uniform(model.model, POLICY, lambda length: 12, create_allocation("adakv", {})),
    }


def timeless(samples: list[Any]) -> list[dict[str, Any]]:
    """Samples without what they took."""
    return [{name: value for name, value in asdict(one).items() if "seconds" not in name} for one in samples]


def test_replies_are_the_same(model: LoadedModel) -> None:
    both, copies = shared(model)
    alone = tiny.run(model, programs(model), TASKS, 3, batch=2)
    assert timeless(tiny.run(both, programs(model), TASKS, 3, batch=2)) == timeless(alone)
    assert copies.items == [2]


def test_what_an_evaluation_measures_beside_replies_is_the_same(model: LoadedModel) -> None:
    both, copies = shared(model)
    given = programs(model), TASKS, 3
    assert measure_losses(both, *given) == measure_losses(model, *given)
    encoded = encode_tasks(model, TASKS, 3)
    full = tiny.run(model, {"full": make_full_program(model.model)}, TASKS, 3)
    assert timeless(measure_headroom(both, encoded, 0.5, full)) == timeless(measure_headroom(model, encoded, 0.5, full))
    assert min(copies.items) >= 1


def test_what_a_worker_warns_of_is_warned_of_here(model: LoadedModel) -> None:
    both, _ = shared(model)
    with pytest.warns(KvsearchWarning, match="^item 3 is doubtful$"):
        assert list(both.map(warn, [3])) == [6]


def test_a_bug_in_a_worker_says_where(model: LoadedModel) -> None:
    both, _ = shared(model)
    with pytest.raises(InternalError, match=r"please report it \(KeyError\('weights'\) in stumble, .*works.py:\d+\)$"):
        list(both.map(stumble, [3]))
