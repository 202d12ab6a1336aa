"""PolyKV's strategies: the paper's arithmetic, exact totals, candidates that are respected, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.plan import PHASES, Profile, Size
from kvsearch.plan.build import PhaseChoice
from kvsearch.selection.from_signals import Strategy, choose_by_signals, make_strategy_plan
from kvsearch.signals.table import ROUTES, SENSITIVITIES, SignalTable
from tests.examples import at_most
from tests.plan.builders import PROVENANCE, model
from tests.signals.profiles import make_signals, signal_metadata

FLOORS = {"snapkv": 4, "streaming": 3, "tova": 1}
ONE_HEAD = signal_metadata(model(layers=4, kv_heads=1))


def by_layer(*layers: list[float], phases: int = 2, budgets: int = 1, samples: int = 3) -> np.ndarray:
    """The same [L, R] values in all samples, budgets and phases."""
    table = np.array(layers, dtype=np.float32)
    return np.broadcast_to(table, (samples, budgets, phases, *table.shape))


def entropies(*values: float) -> np.ndarray:
    return np.broadcast_to(np.array(values, dtype=np.float32), (2, len(values)))


def prefill(profile: Profile, strategy: Strategy, size: Size, inverse: bool = False) -> PhaseChoice:
    return choose_by_signals(SignalTable(profile), strategy, size, inverse)["prefill"]


def names(chosen: PhaseChoice) -> list[str]:
    return [pattern.name for pattern in chosen.policies]


COSINES = by_layer([0.9, 0.5, 0.7], [0.1, 0.2, 0.3], [0.8, 0.8, 0.2], [0.6, 0.9, 0.9])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy(), ["snapkv", "tova", "snapkv", "streaming"]),
        (Strategy(exclude=("snapkv",)), ["tova", "tova", "streaming", "streaming"]),
        (Strategy(None, policy="tova"), ["tova"] * 4),
        (Strategy("error"), ["tova", "streaming", "snapkv", "snapkv"]),
    ],
)
def test_every_layer_takes_its_best_pattern_and_of_equal_ones_the_first(
    strategy: Strategy, expected: list[str]
) -> None:
    errors = by_layer([0.9, 0.5, 0.3], [0.3, 0.2, 0.3], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    profile = make_signals(cosine=COSINES, relative_error=errors)
    assert names(prefill(profile, strategy, Size(budget=20))) == expected


def test_each_phase_has_its_own_patterns_and_all_have_the_budgets_of_prefill() -> None:
    cosine = COSINES.copy()
    cosine[:, :, 1] = cosine[:, :, 1, ::-1]
    entropy = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=np.float32)
    strategy = Strategy(budgets="entropy", phases="both", least=4)
    table = SignalTable(make_signals(ONE_HEAD, cosine=cosine, mean_entropy=entropy))
    chosen = choose_by_signals(table, strategy, Size(budget=10))
    assert names(chosen["decode"]) == names(chosen["prefill"])[::-1]
    assert [chosen[phase].budgets.ravel().tolist() for phase in PHASES["both"]] == [[6, 9, 11, 14]] * 2
    alone = choose_by_signals(table, replace(strategy, phases="decode"), Size(budget=10))
    assert alone["decode"].budgets.ravel().tolist() == [14, 11, 9, 6]


def test_what_is_used_in_prefill_shares_out_both_phases() -> None:
    """nll of the chosen pattern: layer 0 loses under its prefill pattern, layer 3 under its decode pattern."""
    cosine, nll = by_layer(*[[0.9, 0.1, 0]] * 4).copy(), np.ones((3, 1, 2, 4, 3))
    cosine[:, :, 1] = np.array([0.1, 0.9, 0])
    nll[..., 0, 0], nll[..., 3, 1] = 2, 2
    profile = make_signals(ONE_HEAD, cosine=cosine, nll=nll, full_nll=np.ones(3))
    chosen = choose_by_signals(SignalTable(profile), Strategy(budgets="nll-chosen", phases="both"), Size(budget=10))
    assert [names(part)[0] for part in chosen.values()] == ["snapkv", "streaming"]
    for part in chosen.values():
        assert part.budgets.ravel().tolist() == [28, 4, 4, 4]


@pytest.mark.parametrize(("inverse", "expected"), [(False, [6, 9, 11, 14]), (True, [14, 11, 9, 6])])
def test_the_papers_budgets(inverse: bool, expected: list[int]) -> None:
    profile = make_signals(ONE_HEAD, mean_entropy=entropies(1, 2, 3, 4))
    strategy = Strategy(budgets="entropy", least=4)
    assert prefill(profile, strategy, Size(budget=10), inverse).budgets.tolist() == [[entries] for entries in expected]
    # as a share of prompts of 100 tokens, and the heads of a layer alike
    two = make_signals(mean_entropy=entropies(1, 2, 3, 4))
    budgets = prefill(two, strategy, Size(ratio=0.9, length=100), inverse).budgets
    assert budgets.tolist() == [[entries] * 2 for entries in expected]


def test_no_layer_gets_more_than_the_length_that_the_plan_states() -> None:
    """That of the calibration's prompts, 200, unless another one is given."""
    profile = make_signals(ONE_HEAD, mean_entropy=entropies(0, 0, 0, 1))
    strategy = Strategy(None, budgets="entropy", policy="tova")
    assert prefill(profile, strategy, Size(budget=100)).budgets.ravel().tolist() == [67, 67, 66, 200]
    assert prefill(profile, strategy, Size(budget=100, length=150)).budgets.max() == 150
    assert prefill(profile, strategy, Size(budget=100, length=1000)).budgets.max() == 400 - 3 * 10


STRATEGIES = st.builds(
    lambda route, policy, exclude, **rest: Strategy(
        route,
        policy=None if route else policy,
        exclude=tuple(exclude) if route else (),
        **rest,
    ),
    route=st.sampled_from([*ROUTES, None]),
    policy=st.sampled_from([None, "streaming", "tova"]),
    exclude=st.sets(st.sampled_from(["snapkv", "streaming", "tova"]), max_size=2),
    budgets=st.sampled_from(SENSITIVITIES),
    phases=st.sampled_from(sorted(PHASES)),
    least=st.none() | st.integers(0, 8),
)
TARGETS = st.builds(Size, budget=st.integers(8, 199)) | st.builds(Size, ratio=st.floats(0.05, 0.95))


@given(STRATEGIES, TARGETS, st.integers(0, 99))
@at_most(25)
def test_totals_are_exact_and_bounds_and_candidates_are_respected(strategy: Strategy, size: Size, seed: int) -> None:
    profile = make_signals(seed=seed)
    known = size.ratio is not None
    made = choose_by_signals(SignalTable(profile), strategy, size, inverse=seed % 2 == 1)
    for chosen in made.values():
        assert np.array_equal(chosen.budgets, next(iter(made.values())).budgets)
        assert chosen.budgets.sum() == size.total(200, 8)
        assert not set(names(chosen)) & set(strategy.exclude)
        assert np.ptp(chosen.budgets, axis=1).max() <= 1
        for name, budgets in zip(names(chosen), chosen.budgets, strict=True):
            assert budgets.min() >= max(FLOORS[name], strategy.least or 0)
            assert not known or budgets.max() <= 200
    plan = make_strategy_plan(profile, strategy, size)
    check_plan(plan, "the plan")
    assert plan == make_strategy_plan(profile, strategy, size)


def test_a_route_that_is_the_same_everywhere_is_warned_of() -> None:
    profile = make_signals(cosine=by_layer(*[[1.0] * 3] * 4))
    with pytest.warns(KvsearchWarning, match=r"cosine is .* nothing seems .* evicted at 32 .* so snapkv is used"):
        chosen = prefill(profile, Strategy(), Size(budget=20))
    assert names(chosen) == ["snapkv"] * 4


def test_a_plan_says_where_it_comes_from_and_leaves_layers_alone_that_were_not_measured() -> None:
    asked = {"route": "ppl", "budget_signal": "entropy", "phases": "both", "budgets": [32], "texts": "some.json"}
    provenance = {**PROVENANCE, "method": "polykv", "settings": asked}
    metadata = signal_metadata(provenance=provenance, budgets=(16, 64), layers=[1, 3])
    strategy = Strategy(budgets="ppl", exclude=("tova",))
    plan = make_strategy_plan(make_signals(metadata), strategy, Size(budget=70, length=210))
    assert (plan.scaling, plan.length, plan.total, plan.decode) == ("fixed", 210, 280, None)
    assert plan.planned_layers("prefill") == (1, 3)
    assert (plan.provenance.method, plan.provenance.seed) == ("polykv", 7)
    assert plan.provenance.settings == {
        "ratio": None, "budget": 70, "route": "cosine", "budget_signal": "ppl", "phases": "prefill", "policy": None,
        "exclude": ("tova",), "least": None, "signal_budget": 64, "budgets": (32,), "texts": "some.json",
    }  # fmt: skip
    alone = make_strategy_plan(make_signals(), Strategy(None), Size(budget=70)).provenance.settings
    assert (alone["route"], alone["policy"]) == (None, "snapkv")


def test_a_pattern_that_keeps_too_much_is_named_and_may_be_excluded() -> None:
    profile = make_signals(cosine=COSINES)
    with pytest.raises(
        UsageError, match=r"3 .* below the 4 that snapkv in prefill layer 0 .* calibrate without snapkv, or calibr"
    ):
        prefill(profile, Strategy(), Size(budget=3))
    assert (prefill(profile, Strategy(exclude=("snapkv",)), Size(budget=3)).budgets == 3).all()


def test_budgets_by_the_worst_pattern_warn_of_one_that_explodes() -> None:
    losses = np.full((3, 1, 2, 4, 3), 0.01)
    losses[:, :, 0, 1, 2] = 3.0  # tova, in prefill layer 1
    profile = make_signals(ONE_HEAD, nll=losses, full_nll=np.zeros(3))
    with pytest.warns(KvsearchWarning, match="tova explodes in prefill layer 1 at 32 entries per kv head"):
        make_strategy_plan(profile, Strategy(None, "ppl", least=4), Size(budget=32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_strategy_plan(profile, Strategy("ppl", "nll-mean", least=4), Size(budget=32))
