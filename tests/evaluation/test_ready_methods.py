"""Methods by name: what they stand for, that all of a size hold the same, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.evaluation.methods import Method, parse_methods
from kvsearch.evaluation.names import list_method_names
from kvsearch.evaluation.ready_methods import describe_different_settings, prepare_methods, read_request
from kvsearch.evaluation.totals import check_totals
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan, Profile, ProfileMetadata, Size, save_plan
from kvsearch.plan.build import plan_from_profile
from kvsearch.plan.profile import save_profile
from kvsearch.policies import create_policy
from kvsearch.policies.random import RandomEviction
from tests import tiny
from tests.examples import at_most

HEADS = (4, 2)


def one(name: str, *typed: str) -> Method:
    (method,) = parse_methods(name, typed)
    return method


def test_what_names_stand_for() -> None:
    uniform, pyramidal, lava, layers, h2o = parse_methods("uniform, pyramid,lava,lava-uniform,h2o")
    assert (uniform.policy, uniform.allocation) == (create_policy("snapkv"), None)
    assert pyramidal.policy == create_policy("pyramidkv")
    assert pyramidal.layout == Pyramid(20.0, 8)
    assert (lava.policy, lava.allocation) == (create_policy("lava"), LAVaAllocation())
    assert layers.allocation == LAVaAllocation(layers="planned")
    assert (h2o.policy, h2o.allocation) == (create_policy("h2o"), None)
    assert one("ada-pyramid").allocation == AdaKVAllocation()


def test_settings_of_all_and_of_one() -> None:
    found = {m.name.partition(":")[0]: m for m in parse_methods(
        "uniform,pyramid:window=9:beta=5,h2o,cake,lava", ["window=6", "floor_share=0", "tau1=2"]
    )}  # fmt: skip
    windows = {name: method.policy.recent_count for name, method in found.items()}
    assert windows == {"uniform": 6, "pyramid": 9, "h2o": 1, "cake": 6, "lava": 6}
    assert found["pyramid"].layout == Pyramid(5.0, 9)
    assert found["lava"].allocation == LAVaAllocation(floor_share=0.0)
    assert found["cake"].allocation.parameters() == {"tau1": 2.0, "tau2": 1.0, "window": 0}


@pytest.mark.parametrize(
    ("names", "typed", "problem"),
    [
        ("unifrom", (), "unknown method 'unifrom'; did you mean 'uniform'"),
        ("uniform,,lava", (), "empty name"),
        ("full,uniform", (), "the full cache is always there"),
        ("lava:snapk", (), "unknown policy 'snapk'; did you mean 'snapkv'"),
        ("lava,lava", (), "the method lava is given twice"),
        ("uniform,h2o,snapkv", (), "the methods uniform and snapkv are the same"),
        ("uniform", ("windw=3",), "--set windw: none of these methods"),
        ("uniform,lava:windw=3", (), "method lava:windw=3 has no setting 'windw'; did you mean 'window'"),
        ("lava-uniform:layers=dynamic", (), "no setting 'layers'"),
        ("lava", ("floor_share=2",), r"method lava: floor_share must be in \[0, 1\]"),
        ("lukv=none", (), "there is no file none"),
        ("uniform=none", (), "a profile cannot be called 'uniform'"),
        ("pyramid:beta=5:keydiff", (), "method pyramid:beta=5:keydiff: it is METHOD, METHOD:POLICY or either with"),
        ("pyramid,pyramid:beta=20", (), "the methods pyramid and pyramid:beta=20 are the same"),
    ],
)
def test_bad_methods(names: str, typed: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_methods(names, typed)


EVERY = [name for name in list_method_names() if name != "duo_attention"]


@pytest.fixture(scope="module")
def every(model: LoadedModel) -> list[Method]:
    return parse_methods(",".join(name for name in EVERY if name != "snapkv"), ["window=4", "sinks=2"])


@pytest.mark.parametrize("phases", ["prefill", pytest.param("decode", marks=pytest.mark.nightly), "both"])
def test_every_method_holds_the_same_of_every_prompt(model: LoadedModel, every: list[Method], phases: str) -> None:
    sizes = [Size(8), Size(33), Size(ratio=0.7)]
    if phases != "prefill":
        every = [method for method in every if method.policy.no_decode_rule() is None]
    ready = prepare_methods(model, every, sizes, phases)
    assert len(ready) == 1 + len(sizes) * len(every)
    check_totals(model, ready, range(1, 60, 6))
    for method in ready[1:]:
        assert method.label == f"{method.name}@{method.size}"
        assert (method.program.prefill is not None, method.program.decode is not None) == (
            phases != "decode", phases != "prefill",
        )  # fmt: skip
        for length in (1, 7, 8, 20, 33, 59):
            total = method.size.held(length, 8)
            if method.program.prefill is not None:
                table = method.program.prefill.table(length)
                assert table.sum() == min(total, 8 * length)
                assert table.max() <= length
            if method.program.decode is not None:
                assert method.program.decode.table(length).sum() == total


@given(st.integers(1, 80), st.integers(1, 90), st.sampled_from(["uniform", "pyramid", "pyramid:keydiff"]))
@at_most(20)
def test_totals_are_exact_and_floors_hold_where_they_can(budget: int, length: int, name: str) -> None:
    method = one(name, "window=5")
    total = min(Size(budget).held(length, 8), 8 * length)
    budgets = method.budgets(total, length, HEADS)
    assert budgets.sum() == total
    assert budgets.min() >= min(5, budget, length)
    assert budgets.max() <= length


@dataclass(frozen=True)
class Generous(RandomEviction):
    """Never evicts heads with even budgets."""

    def keeps_all(self, budget: int, length: int) -> bool:
        return budget % 2 == 0


def test_heads_that_are_never_evicted_are_found_out(model: LoadedModel) -> None:
    method = replace(one("random"), policy=Generous())
    check_totals(model, prepare_methods(model, [method], [Size(7)]), [40, 50])
    with pytest.raises(UsageError, match="random would hold 320 entries of a prompt of 40 tokens, 8 entries per kv he"):
        check_totals(model, prepare_methods(model, [method], [Size(8)]), [40])
    check_totals(model, prepare_methods(model, [method], [Size(7)], "decode"), [40, 50])
    with pytest.raises(UsageError, match="hold 328 entries while it replies to a prompt of 40 tokens, 8 entries per"):
        check_totals(model, prepare_methods(model, [method], [Size(8)], "decode"), [40])


def profile(model: LoadedModel, **changes: Any) -> Profile:
    """Local ratios around every global one, for prompts of 50 tokens."""
    offsets = np.linspace(-0.009, 0.009, 8).reshape(HEADS)
    grid = np.arange(1, 100)[:, None, None] / 100
    table = (grid + offsets * np.minimum(grid, 1 - grid) * 100).astype(np.float32)
    plan = tiny.plan_for(model, [[15, 15]] * 4)
    metadata = ProfileMetadata.model_validate(
        {
            "model": model.fingerprint.model_dump(), "method": "lukv", "length": 50, "questions": 2, "floor": 1,
            "policy": {"name": "keydiff", "params": {"window": 1}}, "layers": [0, 1, 2, 3],
            "provenance": plan.provenance.model_dump(), **changes,
        }
    )  # fmt: skip
    return Profile(metadata, {"evicted_ratio": table})


def test_a_profile_is_looked_up(model: LoadedModel, tmp_path: Path) -> None:
    made = profile(model)
    (tmp_path / "run").mkdir()
    save_profile(made, tmp_path / "run" / "profile.safetensors")
    method = one(f"lukv={tmp_path / 'run'}")
    assert method.policy == create_policy("keydiff", {"window": 1})
    for budget, length in ((12, 50), (12, 40), (30, 50)):
        prefill = method.program(model, Size(budget)).prefill
        plan = plan_from_profile(made, Size(budget=budget, length=length))
        assert prefill.table(length).tolist() == [list(row or ()) for row in plan.budgets("prefill")]
        assert len(set(prefill.table(length).flatten())) > 3
    prefill = method.program(model, Size(12)).prefill
    assert prefill.table(9).tolist() == [[9, 9]] * 4
    assert method.definition(Size(12), "prefill")["budgets"]["calibrated"] == "lukv"
    with pytest.raises(UsageError, match="none of these methods"):
        parse_methods(f"lukv={tmp_path / 'run'}", ["kernel=3"])
    with pytest.warns(
        KvsearchWarning, match="method lukv keeps window=1 of its profile: --set window=3 is for the others"
    ):
        (_, same) = parse_methods(f"uniform,lukv={tmp_path / 'run'}", ["window=3"])
    assert same.policy == method.policy


def test_methods_take_the_settings_of_a_profile_with_their_policy(model: LoadedModel, tmp_path: Path) -> None:
    """So that budgets are compared, not sinks; what is typed wins, and two profiles must agree."""
    stated = {"sinks": 4, "window": 6, "protect": 3, "kernel": 5}
    save_profile(profile(model, policy={"name": "snapkv", "params": stated}), tmp_path / "one.safetensors")
    save_profile(profile(model, policy={"name": "snapkv", "params": {"window": 6}}), tmp_path / "two.safetensors")
    one_, two = (f"{name}={tmp_path / name}.safetensors" for name in ("one", "two"))
    found = {m.name: m.policy for m in parse_methods(f"uniform,adakv,pyramid,{one_}")}
    assert found["uniform"] == found["adakv"] == found["one"] == create_policy("snapkv", stated)
    assert found["pyramid"] == create_policy("pyramidkv")
    typed = parse_methods(f"uniform:sinks=0,adakv:kernel=9,{one_}")
    assert [method.policy for method in typed[:2]] == [
        create_policy("snapkv", {**stated, "sinks": 0}), create_policy("snapkv", {**stated, "kernel": 9}),
    ]  # fmt: skip
    assert parse_methods(f"uniform,{one_},{two}")[0].policy == create_policy("snapkv")


def test_settings_that_differ_are_named(model: LoadedModel) -> None:
    def told(names: str, *settings: str) -> str | None:
        return describe_different_settings(prepare_methods(model, parse_methods(names, settings), [Size(12), Size(20)]))

    assert told("uniform,adakv", "window=4") is None
    assert told("uniform,streaming,random", "window=4") == "settings differ: sinks 0 (uniform), 4 (streaming)"
    assert told("uniform,pyramid:window=6,adakv", "window=4") == (
        "settings differ: window 4 (uniform, adakv), 6 (pyramid:window=6)"
    )
    assert told("uniform:protect=2,cake", "window=4", "pooling=avg", "kernel=5") == (
        "settings differ: protect 2 (uniform:protect=2), 4 (cake)"
    )
    assert told("scissorhands:history=8,scissorhands:history=9", "window=2") == (
        "settings differ: scissorhands.history 8 (scissorhands:history=8), 9 (scissorhands:history=9)"
    )


def written(model: LoadedModel, tmp_path: Path, name: str = "mine", budget: int = 15, **changes: Any) -> Path:
    plan = tiny.plan_for(model, [[budget - 3, budget + 3]] * 4, **changes)
    save_plan(plan, tmp_path / f"{name}.json")
    return tmp_path / f"{name}.json"


def test_a_plan_joins_the_size_it_has(model: LoadedModel, tmp_path: Path) -> None:
    fixed = written(model, tmp_path, scaling="fixed")
    share = written(model, tmp_path, "share", 10)
    request = read_request([fixed, share], "uniform,streaming", "20,15", "0.75", settings=["window=4"])
    labels = [method.label for method in request.prepare(model)]
    assert labels == [
        "full", "uniform@20", "streaming@20", "uniform@15", "streaming@15", "mine@15",
        "uniform@0.75", "streaming@0.75", "share@0.75",
    ]  # fmt: skip
    told = request.as_json()
    assert (told["subject"], told["phases"], told["plans"]) == ("uniform", "prefill", ["mine", "share"])
    assert told["sizes"] == [{"budget": 20}, {"budget": 15}, {"ratio": 0.75}]


def test_plans_that_do_not_fit_the_methods(model: LoadedModel, tmp_path: Path) -> None:
    fixed = written(model, tmp_path, scaling="fixed")

    def ask(path: Path, methods: str = "streaming", budgets: str = "15", **more: Any) -> None:
        read_request([path], methods, budgets, **more)

    ask(fixed)
    with pytest.raises(UsageError, match="plan mine holds 120 in prefill, which is none of the sizes"):
        ask(fixed, budgets="16")
    with pytest.raises(UsageError, match="plan mine evicts in prefill, the methods in prefill and decode"):
        ask(fixed, phases="both")
    named = written(model, tmp_path, "streaming", scaling="fixed")
    with pytest.raises(UsageError, match=r"cannot be called streaming\.json: the name is taken by a method"):
        ask(named)
    partly = Plan.model_validate(tiny.plan_for(model, [[15, 15], None, [15, 15], None], scaling="fixed").model_dump())
    save_plan(partly, tmp_path / "partly.json")
    request = read_request([tmp_path / "partly.json"], "streaming", "15")
    with pytest.raises(IncompatibleError, match=r"plan partly leaves layers \[1, 3\] their full cache"):
        request.prepare(model)
