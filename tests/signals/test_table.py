"""Reading signals by name: worked examples of every measure, means over samples and tokens, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.signals.table import ENTROPY, SENSITIVITIES, SignalTable, is_constant
from tests.examples import at_most
from tests.plan.builders import make_profile
from tests.signals.profiles import make_signals, signal_metadata

ONE_PHASE = {"phases": ("prefill",), "patterns": {"snapkv": {"window": 4}, "tova": {}}}


def table(**arrays: Any) -> SignalTable:
    """Two layers, two patterns, one phase, one budget; arrays [samples, layers, patterns] where they are by pattern."""
    described = signal_metadata(**ONE_PHASE, budgets=(32,))
    model = described.model.model_copy(update={"layers": 2})
    metadata = described.model_copy(update={"model": model, "layers": (0, 1)})
    for name in ("cosine", "relative_error", "nll"):
        if arrays.get(name) is not None:
            arrays[name] = np.asarray(arrays[name], dtype=np.float64)[:, None, None]
    tokens = np.asarray(arrays.pop("sample_tokens", [1, 1]), dtype=np.int32)
    return SignalTable(make_signals(metadata, samples=2, sample_tokens=tokens, **arrays))


LOSSES = {
    "nll": [[[1.0, 2.0], [1.0, 0.5]], [[3.0, 2.0], [2.0, 2.0]]],
    "full_nll": np.array([1.0, 2.0]),
    "sample_tokens": [1, 3],
}


def test_cosine_and_error_are_means_over_the_samples() -> None:
    values = [[[1.0, 0.5], [0.25, 0.75]], [[0.5, 0.5], [0.75, 0.25]]]
    found = table(cosine=values, relative_error=values)
    mean = np.array([[0.75, 0.5], [0.5, 0.5]])
    assert np.array_equal(found.measured("cosine", "prefill", 32), mean)
    assert np.array_equal(found.read_preference("cosine", "prefill", 32), mean)
    assert np.array_equal(found.measured("error", "prefill", 32), mean)
    assert np.array_equal(found.read_preference("error", "prefill", 32), -mean)


def test_losses_are_means_over_all_tokens() -> None:
    """The second sample has three of the four tokens: full 1.75 nats, layer 0 under snapkv 2.5, layer 1 under tova
    1.625, which is better than the full cache."""
    found = table(**LOSSES)
    assert found.perplexity == pytest.approx(math.exp(1.75))
    assert found.measured("nll", "prefill", 32) == pytest.approx(np.array([[0.75, 0.25], [0.0, -0.125]]))
    ppl = np.array([[math.exp(2.5), math.exp(2)], [math.exp(1.75), math.exp(1.625)]]) - math.exp(1.75)
    assert found.measured("ppl", "prefill", 32) == pytest.approx(ppl)
    assert found.read_preference("ppl", "prefill", 32) == pytest.approx(-ppl)
    assert found.read_preference("nll", "prefill", 32).argmax(axis=1).tolist() == [1, 1]


def test_sensitivity_of_the_worst_the_chosen_and_the_mean_pattern() -> None:
    found = table(**LOSSES, cosine=[[[1.0, 0.5], [0.25, 0.75]]] * 2)
    assert found.read_sensitivity("nll", "prefill", 32, [0, 0]) == pytest.approx([0.75, 0.0])
    assert found.read_sensitivity("nll-chosen", "prefill", 32, [1, 1]) == pytest.approx([0.25, -0.125])
    assert found.read_sensitivity("nll-mean", "prefill", 32, [0, 0]) == pytest.approx([0.5, -0.0625])
    assert found.read_sensitivity("ppl", "prefill", 32, [0, 0]) == pytest.approx(
        [math.exp(2.5) - math.exp(1.75), 0.0]
    )  # Eq. 5
    assert found.read_sensitivity("cosine", "prefill", 32, [0, 0]) == pytest.approx([0.5, 0.75])  # 1 - cosine
    assert found.read_sensitivity("cosine-chosen", "prefill", 32, [0, 1]) == pytest.approx([0.0, 0.25])
    assert found.read_sensitivity("cosine-mean", "prefill", 32, [0, 0]) == pytest.approx([0.25, 0.5])


def test_phases_and_budgets_do_not_mix() -> None:
    metadata = signal_metadata(budgets=(16, 64))
    shape = (2, 2, 2, 4, 3)  # samples, budgets, phases, layers, patterns
    values = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    entropy = np.arange(8, dtype=np.float64).reshape(2, 4)
    found = SignalTable(make_signals(metadata, samples=2, cosine=values, mean_entropy=entropy))
    for at, phase in enumerate(("prefill", "decode")):
        for number, budget in enumerate((16, 64)):
            assert np.array_equal(found.measured("cosine", phase, budget), values[:, number, at].mean(0))
        assert np.array_equal(found.read_sensitivity("entropy", phase, 16, [0] * 4), entropy[at])


def test_the_nearest_budget_as_ratios_go() -> None:
    """32 is as far from 16 as from 64: the smaller one of the two."""
    found = SignalTable(make_signals(signal_metadata(budgets=(16, 64, 256))))
    nearest = {1: 16, 31: 16, 32: 16, 32.1: 64, 128: 64, 9999: 256}
    assert {budget: found.find_nearest(budget) for budget in nearest} == nearest


def losing(*gains: list[float]) -> SignalTable:
    """One sample of one token: what perplexity, 1 under the full cache, gains in each layer under each pattern."""
    names = ("snapkv", "streaming", "tova", "h2o", "keydiff", "knorm")[: len(gains[0])]
    patterns = {name: {"window": 4} if name == "snapkv" else {} for name in names}
    described = signal_metadata(phases=("prefill",), patterns=patterns, budgets=(32,))
    model = described.model.model_copy(update={"layers": len(gains)})
    metadata = described.model_copy(update={"model": model, "layers": tuple(range(len(gains)))})
    losses = np.log1p(np.array(gains))[None, None, None]
    one = np.ones(1, dtype=np.int32)
    return SignalTable(make_signals(metadata, samples=1, nll=losses, full_nll=np.zeros(1), sample_tokens=one))


def test_a_pattern_that_explodes_is_named() -> None:
    """15 of the 50 that layers lose by the worst pattern are by one that is a thousand times as bad as the others."""
    (found,) = losing([0.015, 15, 0.01, 0.015], [8, 27, 30, 35.0], [0.0, 0.0, 0.0, 0.0]).find_explosions("prefill", 40)
    assert (found.pattern, found.phase, found.budget, found.layer) == ("streaming", "prefill", 32, 0)
    assert (found.gain, found.others) == pytest.approx((15, 0.015))
    assert (found.share, found.without) == pytest.approx((0.3, 0.015 / 35.015))
    assert found.words.startswith(
        "streaming explodes in prefill layer 0 at 32 entries per kv head: perplexity gains 15"
    )
    assert "30% of the budget, 0% without it" in found.words


def test_two_patterns_that_explode_in_one_layer_do_not_hide_each_other() -> None:
    """Without either of them the other would still take the budget; a third that is odd, too, moves next to nothing."""
    found = losing([15.0, 14.0, 1e-3, 1e-3, 1e-3, 0.2], [8.0] * 6).find_explosions("prefill", 32)
    assert [(one.pattern, one.layer) for one in found] == [("snapkv", 0), ("streaming", 0)]
    assert [one.gain for one in found] == pytest.approx([15, 14])
    assert found[1].share == pytest.approx(14 / 22)
    assert [one.without for one in found] == pytest.approx([1e-3 / 8.001] * 2, rel=1e-3)


@pytest.mark.parametrize(
    "gains",
    [
        [[0.1, 0.9, 0.1, 0.2], [8, 27, 30, 35.0]],  # nine times as bad
        [[0.001, 1.0, 0.001, 0.001], [8, 27, 30, 35.0]],  # a thousand times as bad, and 3% of the budget
        [[0.1, 15.0, 15.0, 15.0], [8, 27, 30, 35.0]],  # most are as bad
        [[2e-5, -1e-5, -3e-5, -1e-5], [-2e-5, 1e-5, -1e-5, -2e-5]],  # chance, which has either sign
    ],
)
def test_patterns_that_are_not_far_from_the_others_are_not_named(gains: list[list[float]]) -> None:
    assert losing(*gains).find_explosions("prefill", 32) == []


@given(st.integers(0, 1000), st.sampled_from(sorted(set(SENSITIVITIES) - {ENTROPY})))
@at_most(25)
def test_more_harm_is_more_sensitive(seed: int, name: str) -> None:
    plain = make_signals(seed=seed)
    worse = {
        array: plain.arrays[array] - np.array([0, 0.1, 0, 0])[:, None] * (1 if array == "cosine" else -1)
        for array in ("cosine", "relative_error", "nll")
    }
    before = SignalTable(plain).read_sensitivity(name, "decode", 32, [2, 1, 0, 2])
    after = SignalTable(make_signals(seed=seed, **worse)).read_sensitivity(name, "decode", 32, [2, 1, 0, 2])
    assert after[1] > before[1]
    assert after[[0, 2, 3]] == pytest.approx(before[[0, 2, 3]], abs=1e-6)


def test_profiles_of_other_methods_have_no_signals() -> None:
    with pytest.raises(UsageError, match="a profile of lukv has no signals: give the directory of one by"):
        SignalTable(make_profile())


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda t: t.measured("cosin", "prefill", 32), r"unknown signal 'cosin'; did you mean 'cosine'\?"),
        (lambda t: t.read_sensitivity("ppl-chose", "prefill", 32, []), r"unknown budget signal .* mean 'ppl-chosen'\?"),
        (lambda t: t.measured("cosine", "decode", 32), r"the decode phase were not measured \(only prefill\)"),
        (
            lambda t: t.measured("ppl", "prefill", 32),
            r"no 'ppl' signal \(it has entropy, cosine, .*: calibrate with",
        ),
    ],
)
def test_what_is_not_there(read: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read(SignalTable(make_signals(signal_metadata(phases=("prefill",)), nll=None, full_nll=None)))


def test_signals_that_say_nothing() -> None:
    """The spread counts as a share of the size."""
    assert all(is_constant(np.array(values)) for values in ([0.0, 0.0], [3.0], [1.0, 1.0 + 1e-12], [1e12, 1e12 + 1]))
    assert not any(is_constant(np.array(values)) for values in ([1e-6, 2e-6], [1.0, 1.0 + 1e-6], [-1.0, 1.0]))
