"""Validation of signals: verdicts on made-up differences, controls of equal size, what is kept and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.evaluation.compare import Split
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PhaseNames, Profile, Size, canonical_json, save_profile
from kvsearch.report.scores import list_verdict_lines
from kvsearch.results.validation import VALIDATION_FILE, ValidationResult, find_harmful
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.runtime.program import PhaseProgram
from kvsearch.selection.from_signals import Strategy
from kvsearch.selection.plan_race import PlanRace
from kvsearch.selection.signal_controls import find_uses, permute_distinct, prepare_signal_race
from kvsearch.selection.verdicts import (
    BudgetVerdicts,
    Gains,
    JudgedSignal,
    RandomControls,
    SignalKind,
    SignalVerdict,
    compute_prediction_reach,
    judge_gains,
)
from kvsearch.signals.table import SignalTable
from tests import tiny
from tests.plan.builders import model as toy
from tests.signals.profiles import make_signals, signal_metadata

SIZE = Size(budget=16)
HOW = {"samples": 3, "seed": 4, "batch": 4}


TASKS = [tiny.Lottery("one", tiny.listed((60, 1), (48, 2), (70, 1)).rows)]


def profile_of(model: LoadedModel, **arrays: Any) -> Profile:
    return make_signals(signal_metadata(model.fingerprint, budgets=(16, 32)), **arrays)


def prepared(
    model: LoadedModel, signals: Sequence[str], phases: Sequence[str] = ("prefill",), **changes: Any
) -> PlanRace:
    profile = changes.pop("profile", None) or profile_of(model)
    uses = find_uses(SignalTable(profile), signals, phases)
    split = Split(TASKS, **{**HOW, **changes.pop("asked", {})})
    asked = {"size": SIZE, "split": split, "permutations": 5, **changes}
    return prepare_signal_race(model, profile, uses=uses, **asked)


def gain(low: float, high: float) -> Difference:
    return Difference((low + high) / 2, low, high, 3, 2, 1)


ABOVE, LEVEL, BELOW, EQUAL = gain(0.1, 0.3), gain(-0.1, 0.2), gain(-0.3, -0.1), Difference(0, 0, 0, 0, 6, 0)

MANY = 20  # contexts
SOME = RandomControls(5, 1, 4)  # random controls, one of which scores as high as forward


def gains(inverse: Difference, uniform: Difference, random: Difference, reach: float = 0.0) -> Gains:
    return Gains(inverse=inverse, uniform=uniform, random=random, reach=reach)


@pytest.mark.parametrize(
    ("draws", "verdict"),
    [
        (RandomControls(18, 0, 18), "unproven"),  # too few to rank: the reach counts
        (RandomControls(19, 0, 19), "useful"),
        (RandomControls(19, 1, 18), "unproven"),
        (RandomControls(39, 1, 38), "useful"),
        (RandomControls(19, 0, 19, exact=True), "useful"),
        (RandomControls(18, 0, 18, exact=True), "unproven"),
    ],
)
def test_the_rank_among_enough_random_plans_decides(draws: RandomControls, verdict: str) -> None:
    """One in twenty strategies that are drawn alike is the best of twenty, or one of the best two of forty."""
    for uniform, random, less in ((ABOVE, LEVEL, "unproven"), (LEVEL, ABOVE, "useless")):
        found = judge_gains("budgets", gains(ABOVE, uniform, random, 9.0), MANY, draws)[0]
        assert found == ("useful" if verdict == "useful" else less)
    mirrored = RandomControls(draws.tried, draws.as_low, draws.as_high, draws.exact)
    worse = judge_gains("budgets", gains(BELOW, LEVEL, BELOW, 9.0), MANY, mirrored)[0]
    assert worse == ("harmful" if verdict == "useful" else "useless")


@pytest.mark.nightly
@pytest.mark.parametrize(("spread", "count"), [(0.02, 5), (0.1, 20)])
def test_signals_that_say_nothing_are_rarely_useful(spread: float, count: int) -> None:
    """Forward, inverse, uniform and random strategies drawn alike: 40 questions, scores that differ by `spread`."""
    rng, verdicts = np.random.default_rng(0), list[str]()

    def above(one: np.ndarray, other: np.ndarray) -> Difference:
        found = one - other
        half = 1.96 * found.std(ddof=1) / 40**0.5
        return Difference(found.mean(), found.mean() - half, found.mean() + half, 20, 0, 20)

    for _ in range(1000):
        questions = rng.normal(0, 0.3, 40) + rng.normal(0, spread, (3 + count, 1)) + rng.normal(0, 0.1, (3 + count, 40))
        forward, inverse, uniform, *random = questions
        reach = compute_prediction_reach([one.mean() for one in random])
        made = gains(above(forward, inverse), above(forward, uniform), above(forward, np.mean(random, axis=0)), reach)
        means = [one.mean() for one in random]
        draws = RandomControls(
            count, sum(mean >= forward.mean() for mean in means), sum(mean <= forward.mean() for mean in means)
        )
        verdicts.append(judge_gains("route", made, 40, draws)[0])
    assert verdicts.count("useful") <= 0.06 * 1000
    assert verdicts.count("useful") > 0  # the rule is no wall


def test_how_far_one_more_random_strategy_may_be() -> None:
    """Scores 1 to 5: mean 3, s = 1.5811, t(4) = 2.7764: 2.7764 * 1.5811 * sqrt(1.2) = 4.8089."""
    assert compute_prediction_reach([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(4.8089, abs=1e-4)
    assert compute_prediction_reach([0.3, 0.3, 0.3]) == 0.0


def test_a_constant_signal_does_no_harm() -> None:
    """Whatever the one strategy scores is not the signal's doing."""
    found = gains(EQUAL, EQUAL, BELOW)
    assert judge_gains("route", found, MANY, SOME, constant=True)[0] == "useless"
    assert judge_gains("route", found, MANY, SOME)[0] == "harmful"


bounds = st.tuples(st.integers(-2, 2), st.integers(-2, 2)).map(lambda ends: gain(min(ends) / 4, max(ends) / 4))


@st.composite
def drawn(draw: st.DrawFn) -> RandomControls:
    count = draw(st.integers(1, 40))
    high = draw(st.integers(0, count))
    return RandomControls(count, high, draw(st.integers(count - high, count)), draw(st.booleans()))


@given(bounds, bounds, bounds, st.sampled_from(["route", "budgets"]), st.sampled_from([0.0, 0.3]), drawn())
def test_verdicts_exclude_each_other(
    inverse: Difference, uniform: Difference, random: Difference, kind: SignalKind, reach: float, draws: RandomControls
) -> None:
    found = gains(inverse, uniform, random, reach)
    verdict, why = judge_gains(kind, found, MANY, draws)
    beyond = [draws.judge_gain(gain, reach) for gain in (uniform, random)]
    assert beyond[0] in (0, (uniform.low > 0) - (uniform.high < 0))
    harms = min(beyond) < 0 or uniform.high < 0
    assert (verdict == "harmful") == harms
    assert (verdict == "useful") == (not harms and inverse.low > 0 and max(beyond) > 0)
    assert (verdict == "unproven") == (not harms and inverse.low > 0 and uniform.low > 0 and max(beyond) <= 0)
    assert why
    assert "\n" not in why


def test_signals_by_name_or_those_of_the_paper_that_were_measured() -> None:
    """Budgets by the loss under the pattern that is used; by the worst one, as the paper has it, where asked for."""
    table = SignalTable(make_signals())
    kinds = [("cosine", "route"), ("ppl", "route"), ("entropy", "budgets"), ("ppl-chosen", "budgets")]
    assert find_uses(table) == [(*kind, phases) for kind in kinds for phases in ("prefill", "decode", "both")]
    for typed, found in (
        (["cosine"], [("cosine", "route")]),
        (["ppl"], [("ppl", "route"), ("ppl", "budgets")]),
        (["budgets:ppl", "ppl"], [("ppl", "budgets"), ("ppl", "route")]),
        (["nll-chosen"], [("nll-chosen", "budgets")]),
    ):
        assert find_uses(table, typed, ["both"]) == [(*one, "both") for one in found]
    few = SignalTable(make_signals(signal_metadata(phases=("decode",)), nll=None, full_nll=None))
    assert find_uses(few) == [("cosine", "route", "decode"), ("entropy", "budgets", "decode")]


@pytest.mark.parametrize(
    ("signals", "phases", "problem"),
    [
        (["cosin"], None, "unknown signal 'cosin'; did you mean 'cosine'"),
        (["ppl"], None, r"no 'ppl' signal for route \(it has cosine, error\): calibrate with it"),
        (None, ["both"], r"decode phase were not measured \(only prefill\): calibrate with it"),
    ],
)
def test_what_cannot_be_judged(signals: list[str] | None, phases: list[str] | None, problem: str) -> None:
    table = SignalTable(make_signals(signal_metadata(phases=("prefill",)), nll=None, full_nll=None))
    with pytest.raises(UsageError, match=problem):
        find_uses(table, signals, phases)


def phase_of(made: PlanRace, name: str, phase: str = "prefill") -> PhaseProgram:
    label = made.prepared.names[name]
    program = next(one.program for one in made.prepared.methods if one.label == label)
    return getattr(program, phase)


def patterns(made: PlanRace, name: str, phase: str = "prefill") -> list[str]:
    return [policy.name for _, policy in sorted(phase_of(made, name, phase).policies.items())]


def budgets(made: PlanRace, name: str, phase: str = "prefill") -> list[int]:
    """Of every layer, the entries of all heads."""
    return [int(row) for row in np.sum(phase_of(made, name, phase).table(200), axis=1)]


def test_controls_of_a_route(model: LoadedModel) -> None:
    profile = profile_of(model)
    made = prepared(model, ["cosine"], ["both"], profile=profile)
    (names,) = made.candidate_set.signals.values()
    table, known = SignalTable(profile), list(SignalTable(profile).patterns)
    drawn = []
    for phase in table.axes.phases:
        wanted = table.read_preference("cosine", phase, 16)
        assert patterns(made, names.forward, phase) == [known[index] for index in wanted.argmax(axis=1)]
        assert patterns(made, names.inverse, phase) == [known[index] for index in wanted.argmin(axis=1)]
        assert patterns(made, names.uniform, phase) == [profile.metadata.policy.name] * 4
        drawn += [patterns(made, name, phase) for name in names.random]
        for name in (names.forward, names.inverse, names.uniform, *names.random):
            assert budgets(made, name, phase) == [32] * 4
    assert {name for each in drawn for name in each} == set(known)
    assert len({tuple(each) for each in drawn}) > 5  # the phases are drawn by themselves


def test_controls_of_budgets(model: LoadedModel) -> None:
    entropy = np.broadcast_to(np.array([0.1, 0.2, 0.3, 0.9], np.float32), (2, 4))
    made = prepared(model, ["entropy"], ["both"], profile=profile_of(model, mean_entropy=entropy))
    (names,) = made.candidate_set.signals.values()
    for name in names.random:
        assert budgets(made, name, "prefill") == budgets(made, name, "decode")  # or they would hold more than forward
    for phase in ("prefill", "decode"):
        forward = budgets(made, names.forward, phase)
        assert sum(forward) == 4 * 32
        assert forward == sorted(forward)
        assert budgets(made, names.inverse, phase) == forward[::-1]
        assert budgets(made, names.uniform, phase) == [32] * 4
        drawn = [budgets(made, name, phase) for name in names.random]
        assert all(sorted(each) == forward for each in drawn)
        assert len({tuple(each) for each in (forward, *drawn)}) == 6  # all different, and none is forward
        for name in (names.forward, names.inverse, names.uniform, *names.random):
            assert set(patterns(made, name, phase)) == {"snapkv"}


@given(st.lists(st.integers(0, 3), max_size=6))
def test_distinct_orders(items: list[int]) -> None:
    assert list(permute_distinct(items)) == sorted(set(permutations(items)))


def test_few_orders_are_all_tried(model: LoadedModel) -> None:
    """One layer gets more than the three others, so there are three other orders, and not five."""
    entropy = np.broadcast_to(np.array([0.0, 0.0, 1.0, 0.0], np.float32), (2, 4))
    profile = profile_of(model, mean_entropy=entropy)
    made = prepared(model, ["entropy"], profile=profile)
    (names,) = made.candidate_set.signals.values()
    assert names.exact
    assert len(names.random) == 3
    forward, drawn = budgets(made, names.forward), [budgets(made, name) for name in names.random]
    assert {tuple(each) for each in (forward, *drawn)} == set(permutations(forward))
    (one,) = made.judge_signals().signals
    assert (one.exact, one.gains.reach, len(one.random)) == (True, 0.0, 3)
    assert one.gains.inverse.mean == pytest.approx(one.forward.mean - one.inverse.mean)
    assert one.gains.uniform.mean == pytest.approx(one.forward.mean - one.uniform.mean)
    assert one.gains.random.mean == pytest.approx(one.forward.mean - np.mean([each.mean for each in one.random]))
    assert one.verdict == "unproven"
    assert one.reason == "too few contexts to tell: 3 different ones, at least 6 are needed"
    text = " ".join(list_verdict_lines(BudgetVerdicts(budget=16, full=one.forward, signals=(one,))))
    assert re.search(r"\d of 3 other orders of these budgets score lower", text)


def test_more_random_controls_begin_with_the_fewer(model: LoadedModel) -> None:
    few, many = (prepared(model, ["entropy"], permutations=count) for count in (5, 9))
    (less,), (more,) = few.candidate_set.signals.values(), many.candidate_set.signals.values()
    assert more.random[:5] == less.random
    assert [budgets(many, name) for name in more.random[:5]] == [budgets(few, name) for name in less.random]
    assert few.config(few.prepared).difference(many.config(many.prepared)) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": Size(budget=3)}, "3 entries per kv head is below the 4 that snapkv always keeps"),
        ({"asked": {"samples": 1}}, "task one has one context"),
        (
            {"size": Size(budget=71)},
            "^71 entries per kv head: nothing would be evicted from any prompt, .* smaller",
        ),
    ],
)
def test_what_is_refused(model: LoadedModel, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        prepared(model, ["cosine"], **changes)


def test_a_constant_signal(model: LoadedModel) -> None:
    profile = profile_of(model, mean_entropy=np.full((2, 4), 0.5, np.float32))
    (one,) = prepared(model, ["entropy"], profile=profile).judge_signals().signals
    assert (one.verdict, one.reason) == ("useless", "constant: forward and inverse are the same strategy")
    assert one.forward == one.inverse == one.uniform


def verdicts_at(budget: float, *verdicts: tuple[str, SignalKind, PhaseNames, SignalVerdict]) -> BudgetVerdicts:
    score, made = Estimate(0.5, 0.4, 0.6), gains(ABOVE, BELOW, LEVEL)
    signals = tuple(
        JudgedSignal(
            signal=signal, kind=kind, phases=phases, forward=score, inverse=score, uniform=score, random=(score, score),
            gains=made, verdict=verdict, reason="of that",
        )
        for signal, kind, phases, verdict in verdicts
    )  # fmt: skip
    return BudgetVerdicts(budget=budget, full=score, signals=signals)


def test_harmful_signals_of_a_strategy(tmp_path: Path) -> None:
    cosine, entropy = ("cosine", "route", "prefill"), ("entropy", "budgets", "both")
    asked = {"contexts": 3, "questions": 4, "metric": "exact", "rows_sha256": "a" * 64}
    result = ValidationResult(
        model=toy(), profile_sha256="b" * 64, tasks={"one": asked}, split="select", seed=0, protocol="question-aware",
        budgets=(
            verdicts_at(32, (*cosine, "useful")),
            verdicts_at(128, (*cosine, "harmful"), (*entropy, "harmful")),
        ),
    )  # fmt: skip
    (tmp_path / VALIDATION_FILE).parent.mkdir()
    (tmp_path / VALIDATION_FILE).write_bytes(canonical_json(result.as_json()))
    harm = "cosine as a route in prefill was judged harmful at 128 entries per kv head: of that"
    assert [find_harmful(tmp_path, Strategy(), budget) for budget in (128, 65, 63)] == [harm, harm, None]  # by ratio
    assert find_harmful(tmp_path, Strategy(phases="both"), 128) is None  # not validated
    harm = "entropy for budgets in both phases was judged harmful at 128 entries per kv head: of that"
    assert find_harmful(tmp_path, Strategy(None, "entropy", "both"), 128) == harm
    save_profile(make_signals(), tmp_path / "profile.safetensors")  # not the one that was validated
    assert find_harmful(tmp_path, Strategy(), 128) is None
