"""Candidates and baselines of a selection: what is made, that all hold the same, and that nothing is there twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.errors import UsageError
from kvsearch.evaluation.names import METHODS
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan, Profile, Size
from kvsearch.selection.candidates import CandidateSet, content_hash
from kvsearch.selection.from_signals import Strategy, make_strategy_plan
from kvsearch.selection.signal_candidates import find_measured, find_signal_candidates
from kvsearch.signals.table import SignalTable
from tests.combinations import in_turn
from tests.signals.profiles import PATTERNS, make_signals, signal_metadata

LAYERS, HEADS, LENGTH = 4, 2, 60
BUDGETS = (8, 16, 32)
SIZE = Size(budget=12)
CURVES = ("curves", "curves-joint")


def profile_of(
    model: LoadedModel, patterns: dict[str, dict[str, Any]] | None = None, arrays: dict[str, Any] | None = None,
    **changes: Any,
) -> Profile:  # fmt: skip
    known = {"budgets": BUDGETS, "length": LENGTH, **changes}
    return make_signals(signal_metadata(model.fingerprint, patterns, **known), **(arrays or {}))


def losing(losses: Any, samples: int = 2) -> dict[str, Any]:
    """Arrays that say what the model loses in prefill, [N, L, R]; in decode nothing."""
    prefill = np.asarray(losses, dtype=float)
    both = np.stack([prefill, np.zeros_like(prefill)], axis=1)
    full = np.linspace(1, 2, samples)
    return {"nll": full[:, None, None, None, None] + both, "full_nll": full, "samples": samples}


def found_in(
    model: LoadedModel, profile: Profile, routes: Any = None, allocators: Any = None, **options: Any
) -> CandidateSet:
    size = options.pop("size", SIZE)
    return find_signal_candidates(model, profile, size, routes=routes, allocators=allocators, **options)


def kept(plan: Plan, phase: Any = "prefill") -> list[int]:
    """Entries per head of every layer, where all heads of a layer have the same."""
    return [sum(budget or ()) // HEADS for budget in plan.budgets(phase)]


def patterns(plan: Plan, phase: Any = "prefill") -> list[str]:
    return [layer.policy.name for layer in plan.phase(phase).layers if layer is not None]


def test_everything_that_was_measured(model: LoadedModel) -> None:
    profile = profile_of(model)
    routes, allocators = find_measured(SignalTable(profile), SIZE)
    assert routes == ["none", "cosine", "error", "ppl", "nll"]
    assert set(CURVES) < set(allocators)
    assert "ppl" not in allocators  # the worst of all patterns, whatever is used
    bare = profile_of(model, arrays={"nll": None, "full_nll": None, "entropy": None, "mean_entropy": None})
    routes, allocators = find_measured(SignalTable(bare), SIZE)
    assert routes == ["none", "cosine", "error"]
    assert allocators == ["uniform", "pyramid", "cosine-chosen", "error-chosen"]
    one = profile_of(model, budgets=(8,))  # curves take losses at several budgets
    assert not set(CURVES) & set(find_measured(SignalTable(one), SIZE)[1])


def test_all_hold_the_same_and_nothing_is_there_twice(model: LoadedModel) -> None:
    found = find_signal_candidates(model, profile_of(model), SIZE)
    assert len(found.candidates) > 30
    contents = [content_hash(plan) for plan in found.plans.values()]
    assert len(set(contents)) == len(contents)
    for name, plan in found.plans.items():
        assert plan.total == 12 * LAYERS * HEADS, name
        assert plan.decode is None
        check_plan(plan, name)
    # perplexity orders patterns as its logarithm does, so one of two routes is left
    assert {"cosine", "error", "ppl"} <= found.candidates.keys()
    assert "nll" not in found.candidates
    assert found.even == "snapkv"
    assert found.notes == ()


def test_the_baselines_are_patterns_and_methods(model: LoadedModel) -> None:
    """A ratio makes plans that scale."""
    found = found_in(model, profile_of(model), ["cosine"], ["uniform"], size=Size(ratio=0.8))
    assert {(one.scaling, one.length, one.total) for one in found.plans.values()} == {("proportional", LENGTH, 96)}
    # the method uniform is the pattern snapkv, with the window of the profile; pooled reads prompts again
    assert set(found.baselines) == {*PATTERNS, *METHODS} - {"uniform", "pooled"}
    assert {one.allocation.name for one in found.baselines.values()} == {"static", "adakv", "cake", "lava"}
    assert "snapkv" not in found.candidates
    assert dict(found.origins["lava"]) == {"baseline": "lava", "policy": "lava"}
    windows = {
        layer.policy.params["window"]
        for one in found.baselines.values()
        for layer in (one.prefill.layers if one.prefill else ())
        if layer is not None and "window" in layer.policy.params
    }
    assert windows == {4}
    found = found_in(model, profile_of(model, {"cake": {"window": 4}, "tova": {}}), ["cosine"], ["uniform"])
    forms = [found.baselines[name].allocation.name for name in ("cake", "cake, own budgets")]
    assert forms == ["static", "cake"]  # a method that is a pattern keeps both


def test_a_method_that_cannot_hold_so_little_is_left_out_with_a_note(model: LoadedModel) -> None:
    found = found_in(model, profile_of(model, {"streaming": {"sinks": 2}, "tova": {}}), ["cosine"], ["uniform"])
    assert {"streaming", "tova"} <= found.baselines.keys()
    assert "cake" not in found.baselines
    (note,) = [note for note in found.notes if note.startswith("baseline cake ")]
    assert note.endswith("below the 32 that cake always keeps: keep more, or calibrate with a smaller --set protect")


@in_turn(route=["cosine", "ppl", "error"], signal=["entropy", "nll-chosen", "error-mean"])
def test_plain_candidates_are_the_strategies_of_the_paper(model: LoadedModel, route: str, signal: str) -> None:
    profile = profile_of(model)
    found = found_in(model, profile, [route], ["uniform", signal])
    strategy = Strategy(route, signal)
    mine, theirs = found.candidates[strategy.name], make_strategy_plan(profile, strategy, SIZE)
    assert mine.prefill == theirs.prefill
    assert (mine.scaling, mine.floor, mine.length) == (theirs.scaling, theirs.floor, theirs.length)


def test_no_head_gets_more_than_the_length_of_the_plan(model: LoadedModel) -> None:
    """Budgets beyond that would be of no use, and a candidate would hold less than the baselines."""
    losses = np.zeros((3, LAYERS, 3))
    losses[:] = np.array([0.0, 0, 0, 1])[:, None]
    profile = profile_of(model, arrays=losing(losses))
    for length in (None, 90):
        size = Size(budget=40, length=length)
        found = find_signal_candidates(model, profile, size, routes=("none",), allocators=("nll", "pyramid", "curves"))
        tops = {name: max(kept(plan)) for name, plan in found.plans.items()}
        assert max(tops.values()) == tops["tova + nll"] == (length or LENGTH)
        assert {(plan.total, plan.length) for plan in found.plans.values()} == {(40 * LAYERS * HEADS, length or LENGTH)}


def test_pyramids_stand_on_what_each_pattern_keeps(model: LoadedModel) -> None:
    found = found_in(model, profile_of(model), ["none", "cosine"], ["pyramid"])
    # 8 free entries per head on average, none in the last layer: 16, 10.67, 5.33, 0 above a window of 4
    snapkv = next(name for name, one in found.baselines.items() if patterns(one) == ["pyramidkv"] * LAYERS)
    assert kept(found.candidates["snapkv + pyramid"]) == kept(found.baselines[snapkv])
    mixed = found.candidates["cosine + pyramid"]
    floors = {"snapkv": 4, "streaming": 3, "tova": 1}
    free = [budget - floors[name] for budget, name in zip(kept(mixed), patterns(mixed), strict=True)]
    assert free == sorted(free, reverse=True)


def test_loss_curves_of_the_patterns_that_are_used(model: LoadedModel) -> None:
    # layer 2 loses 4, 1 and 0.2 nats under streaming, the others nothing; under tova layer 0 loses
    losses = np.zeros((3, LAYERS, 3))
    losses[:, 2, 1] = [4, 1, 0.2]
    losses[:, 0, 2] = [4, 1, 0.2]
    found = found_in(model, profile_of(model, arrays=losing(losses)), ["none"], ["curves"])
    assert kept(found.candidates["streaming + curves"]) == [8, 8, 24, 8]
    assert kept(found.candidates["tova + curves"]) == [24, 8, 8, 8]


@pytest.mark.parametrize("phases", ["decode", "both"])
def test_other_phases_have_baselines_of_the_same_phases(model: LoadedModel, phases: str) -> None:
    found = found_in(model, profile_of(model), ["cosine", "none"], ["uniform", "nll-chosen", *CURVES], phases=phases)
    assert set(found.baselines) == {*PATTERNS, *METHODS} - {"uniform", "pooled"}
    assert len(set(kept(found.baselines["pyramid"], "decode"))) == LAYERS
    assert found.notes == ()
    assert "curves-joint" in found.candidates
    for name, plan in found.plans.items():
        assert plan.decode.total == 12 * LAYERS * HEADS
        assert (plan.prefill is None) == (phases == "decode")
        assert plan.prefill is None or plan.budgets("prefill") == plan.budgets("decode"), name


def test_joint_curves_take_the_best_pattern_of_each_phase_at_the_budgets_of_prefill(model: LoadedModel) -> None:
    losses = np.zeros((2, LAYERS, 3, 3))  # phases, layers, patterns, budgets of 8, 16 and 32
    losses[0, 1] = np.array([[5, 3, 4], [3, 2, 1], [1, 0.9, 0]]).T
    losses[1, 1] = np.array([[3, 2, 1], [3, 2, 1], [1, 2, 3]]).T
    losses[1, 3] = [[9, 9, 9], [0, 0, 0], [9, 9, 9]]  # would take much of the budget, if decode were asked
    nll = 1 + losses.transpose(3, 0, 1, 2)[None]
    profile = profile_of(model, arrays={"nll": nll, "full_nll": np.ones(1), "samples": 1})
    found = found_in(model, profile, ["cosine"], ["curves-joint"], phases="both")
    plan = found.candidates["curves-joint"]
    assert kept(plan) == kept(plan, "decode") == [8, 24, 8, 8]
    assert (patterns(plan)[1], patterns(plan, "decode")[1], patterns(plan, "decode")[3]) == (
        "tova",
        "snapkv",
        "streaming",
    )


def test_patterns_that_cannot_be_used_are_left_out_with_a_note(model: LoadedModel) -> None:
    large = {**PATTERNS, "pyramidkv": {"window": 13}}
    found = find_signal_candidates(model, profile_of(model, large), SIZE)
    assert found.notes[0] == "pyramidkv is left out: it always keeps 13 entries per kv head, above the mean of 12"
    assert all("pyramidkv" not in patterns(plan) for plan in found.candidates.values())
    with pytest.raises(UsageError, match=r"no pattern of the profile can be used \(snapkv: it always keeps 4 entries"):
        find_signal_candidates(model, profile_of(model, {"snapkv": {"window": 4}}), Size(budget=3))


@pytest.mark.filterwarnings("error")
def test_what_signals_cannot_tell_is_noted_once(model: LoadedModel) -> None:
    cosine, entropy = np.full((3, 3, 2, LAYERS, 3), 0.5, np.float32), np.full((2, LAYERS), 0.5, np.float32)
    profile = profile_of(model, arrays={"cosine": cosine, "mean_entropy": entropy})
    found = found_in(model, profile, ["cosine", "none"], ["uniform", "entropy", "cosine-chosen"])
    assert not found.candidates
    assert found.notes == (
        "cosine is the same for all patterns in every prefill layer: nothing seems to have been evicted at 16 entries "
        "per kv head, so snapkv is used everywhere",
        "entropy is the same in every prefill layer, so it cannot tell them apart: budgets are equal",
        "cosine-chosen is the same in every prefill layer, so it cannot tell them apart: budgets are equal",
    )
