"""From what several policies keep to a plan: each layer has the policy that keeps most, the total is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.plan import Plan, Profile, ProfileMetadata, Size
from kvsearch.plan.origin import ContextRecord, ContextSet, hash_context
from kvsearch.plan.profile_arrays import EVICTED_RATIO, KEPT
from kvsearch.selection.joint import make_joint_plan, read_policy_curves
from tests.examples import at_most
from tests.plan.builders import metadata_dict, model_dict

LENGTH = 100
SNAPKV = {"name": "snapkv", "params": {"window": 2, "sinks": 0}}
KEYDIFF = {"name": "keydiff", "params": {"window": 2, "sinks": 0}}


def curve(at_once: float, points: int = 101) -> Floats:
    """What a head keeps that finds nearly all it has in its first tenth, or of `at_once` only so much."""
    return np.interp(np.linspace(0, 1, points), [0, 0.1, 1], [0, at_once, 1])


def curves(*found: tuple[float, ...], mass: tuple[float, ...] | None = None, points: int = 101) -> Floats:
    """[P, L, 2, K + 1] of policies that find so much in each layer, which has a mass."""
    rows = np.array([[[curve(one, points)] * 2 for one in layers] for layers in found])
    return rows * np.array(mass or (1.0,) * rows.shape[1])[:, None, None]


def profile(kept: Floats, *policies: dict[str, Any], text: str = "a context", **changes: Any) -> Profile:
    """A profile of several policies, or of one with the array of older ones."""
    layers = kept.shape[1]
    contexts = ContextRecord(fitted=ContextSet.of([hash_context(text)]))
    metadata = metadata_dict(
        model=model_dict(layers=layers, kv_heads=2), layers=list(range(layers)), length=LENGTH, floor=1,
        policy=policies[0], **({"policies": policies} if len(policies) > 1 else {}),
    )  # fmt: skip
    metadata["provenance"] |= {"settings": {"minimum": 0.01, "normalization": "layer"}} | changes
    metadata["provenance"]["contexts"] = contexts.model_dump()
    even = np.repeat(np.arange(1, 100, dtype=np.float32) / 100, layers * 2).reshape(99, layers, 2)
    arrays = {EVICTED_RATIO: np.minimum(even, 0.99)}
    arrays |= {KEPT: kept.astype(np.float32)} if len(policies) > 1 else {"mass": kept[0].astype(np.float32)}
    return Profile(ProfileMetadata.model_validate(metadata), arrays)


TWO = curves((0.9, 0.2, 0.3), (0.2, 0.9, 0.3))


def names(plan: Plan) -> list[str]:
    return [layer.policy.name for layer in plan.prefill.layers if layer is not None]


def test_every_layer_takes_the_policy_that_keeps_most() -> None:
    found = make_joint_plan(read_policy_curves(profile(TWO, SNAPKV, KEYDIFF)), Size(ratio=0.9))
    assert names(found.plan)[:2] == ["snapkv", "keydiff"]
    assert found.plan.total == 60 == sum(map(sum, filter(None, found.plan.budgets("prefill"))))
    assert found.plan.floor == 2
    assert found.plan.scaling == "proportional"
    assert set(found.alone) == {"snapkv", "keydiff"}
    assert max(found.alone.values()) < found.kept
    assert found.words.startswith("layers: snapkv in ")


def test_what_a_plan_keeps_is_read_from_the_curves() -> None:
    curves = read_policy_curves(profile(TWO, SNAPKV, KEYDIFF))
    found = make_joint_plan(curves, Size(ratio=0.9))
    mass = curves.kept[0, ..., -1].sum()
    assert curves.measure_kept(found.plan) / mass == pytest.approx(found.kept, rel=1e-6)
    rows = np.array([layer for layer in found.plan.budgets("prefill") if layer is not None])
    read = sum(
        TWO[policy, layer, head, rows[layer, head]] for layer, policy in enumerate(found.policies) for head in range(2)
    )
    assert found.kept == pytest.approx(read / 6, rel=1e-6)
    alone = make_joint_plan(curves.select(["keydiff"]), Size(ratio=0.9))
    assert set(names(alone.plan)) == {"keydiff"}
    assert alone.kept == pytest.approx(found.alone["keydiff"])
    assert curves.measure_kept(alone.plan) / mass == pytest.approx(found.alone["keydiff"], rel=1e-6)
    with pytest.raises(UsageError, match="'snapvk' was not measured; did you mean 'snapkv'"):
        curves.select(["snapvk"])


def test_a_mixture_with_even_budgets() -> None:
    measured = read_policy_curves(profile(curves((0.9, 0.2, 0.3), mass=(3, 1, 2)), SNAPKV))
    whole, half, even = (make_joint_plan(measured, Size(ratio=0.95), even=share) for share in (0.0, 0.5, 1.0))
    first, second, third = (np.array(one.plan.budgets("prefill")) for one in (whole, half, even))
    assert first.sum() == second.sum() == third.sum() == 30
    assert set(third.ravel().tolist()) == {5}
    assert np.abs(second - (first + third) / 2).max() < 1
    assert whole.kept > half.kept > even.kept


@given(
    st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 3), st.floats(0.02, 0.9), st.sampled_from([50, 100, 9000])
)
@at_most(25)
def test_totals_are_exact_within_the_bounds_and_keep_no_less_than_a_single_policy(
    seed: int, count: int, layers: int, share: float, length: int
) -> None:
    rng = np.random.default_rng(seed)
    kept = np.sort(rng.random((count, layers, 2, 41)), axis=-1)
    kept[..., 0], kept[..., -1] = 0, 1
    policies = [{"name": "snapkv", "params": {"window": 2, "kernel": 2 * at + 1}} for at in range(count)]
    size = Size(ratio=1 - share, length=length)
    made = read_policy_curves(profile(kept, *policies))
    if size.total(length, 2 * layers) < max(2, length // 100) * 2 * layers:
        with pytest.raises(UsageError, match="always kept"):
            make_joint_plan(made, size)
        return
    found = make_joint_plan(made, size)
    rows = [layer for layer in (found.plan.prefill.layers if found.plan.prefill else ()) if layer is not None]
    assert sum(sum(row.budget) for row in rows) == size.total(length, 2 * layers)
    assert all(min(row.budget) >= max(2, -(-length // 100)) == found.plan.floor for row in rows)
    assert max(max(row.budget) for row in rows) <= length
    assert max(found.alone.values()) - 1e-9 <= found.kept


def test_a_profile_without_curves_is_refused() -> None:
    whole = profile(TWO[:1], SNAPKV)
    table = Profile(whole.metadata.model_copy(update={"method": "cake"}), {EVICTED_RATIO: whole.arrays[EVICTED_RATIO]})
    with pytest.raises(UsageError, match="a profile of method cake does not say what policies keep"):
        read_policy_curves(table)
