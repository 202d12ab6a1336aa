"""What every target owes: what it says is lost is lost, what it does not say is there."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.exporters import BUILT_IN_TARGETS, create_exporter
from kvsearch.exporters.base import SINGLE_FILE, ExportedFiles, ExportInputs, PlanExporter, PrefillBudgets
from kvsearch.models.architecture import Architecture
from kvsearch.plan import ModelFingerprint, Plan
from kvsearch.plan.arithmetic import add_carry
from kvsearch.plan.rounding import largest_remainder
from kvsearch.testing import ExporterContract
from kvsearch.testing.exporter_contract import HEADS, PROMPT_LENGTH, budget_rows, plan_policies, plan_rows
from tests.examples import at_most
from tests.exporters.simulations import OPTIONS, SIMULATIONS, options_of
from tests.plan.builders import make_plan, phase_dict

WHOLE = ("folder", "custom-generate", "model")  # targets that hold whole plans
TOLD_SHARES = ("attention-matching", "spectralkv")  # of a total that is told elsewhere
PLAN_TARGETS = [name for name in BUILT_IN_TARGETS if isinstance(create_exporter(name), PlanExporter)]


def architecture(layers: int, heads: int) -> Architecture:
    return Architecture("llama", layers, 3 * heads, heads, 8, 24 * heads, tuple(range(layers)), 4096)


def plan_of(
    budgets: list[list[int] | None], policy: str = "knorm", params: dict[str, Any] | None = None, **changes: Any
) -> Plan:
    phase = phase_dict(budgets, {"name": policy, "params": params or {}})
    return make_plan(budgets, **{"prefill": phase, "length": PROMPT_LENGTH, "floor": 1, **changes})


def exported(name: str, plan: Plan, length: int | None = None) -> Any:
    exporter = create_exporter(name)
    return exporter, exporter.export(plan, ExportInputs(length, architecture(plan.model.layers, plan.model.kv_heads)))


def of_shares(files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
    """As many entries as the heads could hold, by shares of heads (Attention Matching) or of layers (SpectralKV)."""
    shares = json.loads(files[SINGLE_FILE])
    heads = [f"L{layer}H{head}" for layer in range(model.layers) for head in range(model.kv_heads)]
    by_layer = np.repeat(shares.get("weights", ()), model.kv_heads) / model.kv_heads
    by_head = by_layer if len(by_layer) else np.array([shares[head] for head in heads])
    total = length * len(heads)
    return largest_remainder(by_head * total, total).reshape(model.layers, model.kv_heads)


def of_plan(files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
    name = next(name for name in files if Path(name).match("plan*.json"))
    return PrefillBudgets(Plan.model_validate(json.loads(files[name])), length).entries


def arrays_of(files: Mapping[str, bytes], part: str) -> Any:
    """The arrays of the one file with this part in its name."""
    (data,) = (data for name, data in files.items() if part in name)
    return np.load(io.BytesIO(data))


def of_profile(files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
    """What Tangram's retention profile says of a prompt."""
    return np.rint(arrays_of(files, "profile")["ratio_per_head"][0].astype(np.float64) * length).astype(np.int64)


# what targets make of their files, where the package does not compare it with the plan
READERS = {
    "attention-matching": of_shares, "spectralkv": of_shares, "folder": of_plan, "model": of_plan,
    "custom-generate": of_plan, "tangram": of_profile,
}  # fmt: skip


def contract_of(target: str) -> type[ExporterContract]:
    """The contract of a target, by what its tool holds."""

    def held(self: ExporterContract, exported: ExportedFiles, model: ModelFingerprint, length: int) -> Ints:
        return SIMULATIONS[target](exported, model, length)

    return type(f"Test_{target}", (ExporterContract,), {"target": target, "held": held})


globals().update({f"Test_{target}": contract_of(target) for target in SIMULATIONS})


def test_commands_have_the_options_of_the_tools() -> None:
    for name in PLAN_TARGETS:
        plan = plan_of([[40, 20]], "snapkv", {"window": 8})
        _, found = exported(name, plan)
        if not name.startswith(WHOLE):
            assert options_of(found.usage) <= OPTIONS.get(name, set()), name


def test_uneven_heads_of_headkv_hold_the_plan() -> None:
    """Also where the mean is no whole number, and where a head holds the window alone."""
    for budgets in ([[40, 8], [24, 24], [32, 16]], [[40, 8], [25, 24], [32, 16]], [[8, 8]], [[9, 8], [8, 8]]):
        plan = plan_of([list(row) for row in budgets], "pyramidkv", scaling="fixed")
        _, found = exported("headkv", plan)
        held = SIMULATIONS["headkv"](found, plan.model, PROMPT_LENGTH)
        assert (held.tolist() == budgets) == (not found.losses)
        assert held.tolist() == budgets or budgets == [[9, 8], [8, 8]]


def test_less_than_the_window_of_headkv_is_a_loss() -> None:
    _, found = exported("headkv", plan_of([[4, 24]], "snapkv", {"window": 8}, scaling="fixed"))
    assert found.describe() == [
        "a head holds a window of 8 and a rounded share of a whole mean, and more are held than planned: 4 of 28 "
        "entries (14.3%)"
    ]


@pytest.mark.parametrize("name", [*WHOLE, "tangram"])
@at_most(15)
@given(plan_rows, plan_policies, st.booleans())
def test_entries_that_a_file_does_not_name_are_counted(
    name: str, budgets: list[list[int] | None], policy: tuple[str, dict[str, Any]], fixed: bool
) -> None:
    plan = plan_of(budgets, *policy, scaling="fixed" if fixed else "proportional")
    _, found = exported(name, plan)
    planned = PrefillBudgets(plan).entries
    held = READERS[name](found.files, plan.model, PROMPT_LENGTH)
    counted = [entries for entries in found.losses.values() if entries is not None]
    assert name in WHOLE or found.total == planned.sum()
    assert all(0 <= entries <= found.total for entries in counted)
    assert np.array_equal(planned, held)
    assert len(found.describe()) == len(found.losses)


@pytest.mark.parametrize("name", TOLD_SHARES)
@at_most(20)
@given(st.lists(budget_rows, min_size=1, max_size=5))
def test_shares_of_a_total_come_back(name: str, budgets: list[list[int] | None]) -> None:
    plan = plan_of(budgets)
    _, found = exported(name, plan)
    planned = PrefillBudgets(plan).entries
    if name == "spectralkv":
        planned = np.repeat(planned.sum(1, keepdims=True) / HEADS, HEADS, axis=1)
    held = READERS[name](found.files, plan.model, 10**6)
    np.testing.assert_allclose(held / held.sum(), planned / planned.sum(), atol=2e-6)


def test_what_else_is_lost_is_named() -> None:
    plan = add_carry(plan_of([[80, 40], [20, 20]], "snapkv", {"sinks": 4, "protect": 8}, scaling="fixed"), "match")
    _, found = exported("kvpress-layers", plan)
    assert found.describe() == [
        "budgets of single heads: all heads of a layer keep the same number: 20 of 160 entries (12.5%)",
        "the press pools by the mean, the policy by max",
        "the press protects all 32 queries that it looks at, the policy 8",
        "the press does not protect the first 4 entries",
        "budgets become shares of the prompt: right at 400 tokens only",
        "entries carry nothing of what leaves: log weights, and values fitted with them, are left out: 160 of 160 "
        "entries (100.0%)",
    ]


def test_streaming_heads_come_back_from_gates() -> None:
    plan = plan_of([[400, 68], [68, 400]], "duo_attention", {"sinks": 4, "window": 64}, scaling="fixed")
    exporter, found = exported("duo", plan)
    assert not found.losses
    assert found.files["full_attention_heads.tsv"] == b"1\t0.085\n0.085\t1\n"
    assert exporter.read(found.files, plan.model, 1000).tolist() == [[1000, 68], [68, 1000]]


@at_most(20)
@given(st.lists(budget_rows, min_size=1, max_size=4), st.integers(1, 60))
def test_heads_that_keep_as_many_are_told_apart(budgets: list[list[int] | None], recent: int) -> None:
    plan = plan_of(budgets, "streaming", {"sinks": 2})
    exporter, found = exported("duo", plan)
    held = exporter.read(found.files, plan.model, PROMPT_LENGTH)
    whole = (held == PROMPT_LENGTH).sum()
    streaming = held.min()
    assert abs(held.sum() - found.total) <= (PROMPT_LENGTH - streaming) / 2 or whole in (0, held.size)


def test_heads_that_keep_as_much_share_pages() -> None:
    """Which heads share a page, by the rules of the engine's loader, on four heads with P = 2."""
    _, found = exported("tangram", plan_of([[100, 20], [40, 80]], "keydiff"))
    assert list(found.files) == ["keydiff/toy/pg2_r0.15.npz", "keydiff/toy/profile.npz"]
    pages = arrays_of(found.files, "pg2")
    assert pages["cluster_of"].tolist() == [[0, 1], [1, 0]]
    assert pages["column_of"].tolist() == [[0, 0], [1, 1]]
    assert pages["cluster_members"].tolist() == [[[0, 0], [1, 1]], [[0, 1], [1, 0]]]
    assert {pages[name].dtype for name in ("cluster_of", "column_of", "cluster_members")} == {np.dtype(np.int32)}
    assert found.describe()[0].endswith("240 of 240 entries (100.0%)")


@at_most(20)
@given(plan_rows)
def test_clusters_hold_every_head_once(budgets: list[list[int] | None]) -> None:
    _, found = exported("tangram", plan_of(budgets))
    pages = arrays_of(found.files, "pg")
    members = pages["cluster_members"]
    assert members.shape == (len(budgets), HEADS, 2)
    layers, heads = np.moveaxis(members, -1, 0)
    places = np.stack([pages["cluster_of"][layers, heads], pages["column_of"][layers, heads]])
    assert (places == np.indices(layers.shape)).all()
    assert (np.diff(members[:, :, 0], axis=1) >= 0).all()  # heads of one layer are neighbours
    shares = pages["rank_score"][layers, heads]
    assert (shares[:-1].min(1) >= shares[1:].max(1)).all()


def test_the_window_of_vllm_is_that_of_most_layers() -> None:
    plan = plan_of([[400, 400], [32, 32], [32, 32], [40, 40]], "streaming")
    _, found = exported("vllm-windows", plan)
    kinds = json.loads(found.files[SINGLE_FILE])
    assert kinds["layer_types"] == ["full_attention", *["sliding_attention"] * 3]
    assert kinds["sliding_window"] == 32
    assert "budgets are windows of whole layers: 16 of 1,008 entries (1.6%)" in found.describe()


def test_what_a_target_needs_and_has_no_word_for() -> None:
    with pytest.raises(UsageError, match="give --model"):
        create_exporter("headkv").export(plan_of([[8, 8]]), ExportInputs())  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="give --length"):
        exported("kvpress-layers", plan_of([[8, 8]], scaling="fixed", length=None))
    with pytest.raises(IncompatibleError, match="no press that ranks as h2o"):
        exported("kvpress-layers", plan_of([[8, 8]], "h2o"))
