"""A race: its evidence worked by hand, what it says where nobody leads and where somebody does, and its rounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.selection.race import (
    FINALISTS,
    STAKES,
    Race,
    adjust_for_several,
    bound_lead,
    bound_mean,
    compute_log_wealths,
    estimate_lead,
    find_hopeless,
    make_bets,
    mix_bettors,
    plan_rounds,
    plan_screenings,
)
from kvsearch.selection.records import MIN_CONTEXTS_FOR_PROOF, Rule, compute_shared_level
from kvsearch.selection.scores import Scores
from tests.examples import at_most


def made(tasks: Sequence[str] | None = None, **rows: Sequence[float]) -> Scores:
    contexts = len(next(iter(rows.values())))
    sums = {name: np.array(row, dtype=float) for name, row in rows.items()}
    return Scores(tuple(tasks or ("t",) * contexts), np.ones(contexts), sums)


def test_wealth_worked_by_hand() -> None:
    wealths = compute_log_wealths(np.array([1.0, -0.5]))
    assert wealths.shape == STAKES.shape
    np.testing.assert_allclose(np.exp(wealths), (1 + STAKES) * (1 - STAKES / 2))
    assert math.exp(mix_bettors(wealths)) == pytest.approx(np.mean((1 + STAKES) * (1 - STAKES / 2)))
    assert mix_bettors(compute_log_wealths(np.zeros(5))) == pytest.approx(0.0)


def test_evidence_of_several_worked_by_hand() -> None:
    # alone 40; with the poorest, 1, the mean is 20.5; with both others (40 + 1 + 19) / 3 = 20
    evidence = np.exp(adjust_for_several(np.log([40.0, 19.0, 1.0])))
    np.testing.assert_allclose(evidence, [20.0, 10.0, 1.0])
    assert np.exp(adjust_for_several(np.log([7.0]))) == pytest.approx([7.0])


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=6))
@at_most(50)
def test_evidence_is_between_bonferroni_and_none(values: list[float]) -> None:
    wealths = np.array(values)
    evidence = adjust_for_several(wealths)
    assert (evidence <= wealths + 1e-9).all()
    assert (evidence >= wealths - math.log(len(values)) - 1e-9).all()


@pytest.mark.parametrize("loses", [0.0, 0.05, 0.2])
def test_wealth_hardly_ever_grows_without_a_lead(loses: float) -> None:
    """Leads of mean zero, also where gains are small and a whole context is lost now and then."""
    rng = np.random.default_rng(0)
    gain = loses / (1 - loses)
    draws = rng.random((600, 200)) < loses
    leads = np.where(draws, -1.0, gain) if loses else rng.choice([-0.4, 0.4], (600, 200))
    wealth = np.stack([np.cumsum(np.log1p(stake * leads), axis=1) for stake in STAKES], axis=-1)
    ever = mix_bettors(wealth).max(axis=1) >= math.log(20)
    assert ever.mean() <= 0.05


def test_tasks_have_the_same_stake() -> None:
    scores = made(tasks=["a", "b", "b", "b"], x=[1.0, 1.0, 0.0, 1.0], y=[0.0, 0.0, 0.0, 0.5])
    np.testing.assert_allclose(make_bets(scores, "x", "y"), [1.0, 1 / 3, 0.0, 1 / 6])


def test_a_bound_worked_by_hand() -> None:
    scores = made(x=[0.5, 0.3, 0.7, 0.5], y=[0.4, 0.4, 0.4, 0.4])
    leads = np.array([0.1, -0.1, 0.3, 0.1])
    # Student's quantile of three degrees of freedom at .95 is 2.353
    assert bound_lead(scores, "x", "y", 0.95) == pytest.approx(0.1 - 2.3534 * leads.std(ddof=1) / 2, abs=1e-4)
    assert bound_lead(made(x=[1.0], y=[0.0]), "x", "y", 0.95) == -math.inf


def test_hopeless_worked_by_hand() -> None:
    """Losses of four contexts: six candidates, the last two far behind; the five best of each kind stay."""
    near = [1.0, 1.1, 0.9, 1.0]
    losses: dict[str, list[float]] = {f"c{number}": near for number in range(5)}
    losses |= {"c5": [2.0, 2.2, 1.9, 2.1], "c6": [1.2, 1.2, 1.1, 1.3], "c7": [0.9, 5.0, 0.8, 5.1]}
    losses |= {"b0": [9.0, 9.1, 9.2, 9.0]}
    scores = made(**{name: [-loss for loss in row] for name, row in losses.items()})
    candidates = [name for name in losses if name.startswith("c")]
    # c5 is 1.05 behind, Student's quantile of three degrees at .95 is 2.353: 1.05 - 2.353 * 0.0577 / 2 is above 0.25;
    # c6 is 0.2 behind, which is too little, and c7 too uncertain; b0 is the best of its kind
    assert bound_lead(scores, "c0", "c5", 0.95) == pytest.approx(1.05 - 2.353 * 0.05774 / 2, abs=1e-3)
    assert find_hopeless(scores, candidates, ["b0"]) == ["c5"]
    assert find_hopeless(made(**{name: [-row[0]] for name, row in losses.items()}), candidates, ["b0"]) == []


def test_variances_of_many_methods_worked_by_hand() -> None:
    """Three contexts: each method alone is in doubt, as two degrees of freedom have a quantile of 2.920."""
    losses = {"c0": [1.0, 1.0, 1.0]} | {f"c{number}": [1.4, 1.8, 2.2] for number in range(1, 6)}
    scores = made(**{name: [-loss for loss in row] for name, row in losses.items()})
    # .8 behind, with a variance of .16 / 3: the same for all, so that four degrees of freedom say so, 2.132
    error = math.sqrt(0.16 / 3)
    assert estimate_lead(scores, "c0", "c1") == (pytest.approx(0.8), pytest.approx(error**2), 2)
    assert bound_lead(scores, "c0", "c1", 0.95) == pytest.approx(0.8 - 2.920 * error, abs=1e-3)  # .126
    assert bound_mean(0.8, error**2, 4, 0.95) == pytest.approx(0.8 - 2.132 * error, abs=1e-3)  # .308
    assert len(find_hopeless(scores, list(losses), [])) == len(losses) - FINALISTS
    # one whose differences vary more stays: (.16 + 1.96) / 2 / 3 is its variance
    losses["c5"] = [0.4, 1.8, 3.2]
    scores = made(**{name: [-loss for loss in row] for name, row in losses.items()})
    assert "c5" not in find_hopeless(scores, list(losses), [])


@pytest.mark.nightly
def test_the_best_is_hardly_ever_hopeless() -> None:
    """Losses of 40 methods, the first of which loses least: as the contexts have it, or all but for chance."""
    rng = np.random.default_rng(0)
    names = [f"m{number}" for number in range(40)]
    for contexts, gap, most in ((3, 0.0, 0.1), (3, 0.25, 0.05), (6, 0.0, 0.1), (6, 0.25, 0.01)):
        dropped = 0
        for _ in range(200):
            hard = rng.gamma(2.0, 0.5, contexts)
            losses = hard * rng.gamma(2.0, 0.5, (40, contexts)) + gap * np.arange(40).clip(max=1)[:, None]
            rows = {name: -row for name, row in zip(names, losses, strict=True)}
            dropped += "m0" in find_hopeless(made(**rows), [], names)
        assert dropped / 200 <= most


@pytest.mark.parametrize(
    ("counts", "ends"),
    [
        ([4] * 6, [[1] * 6, [2] * 6]),
        ([42], [[3], [6], [12]]),
        ([3], [[3]]),
        ([2, 30], [[1, 2], [1, 5], [1, 11]]),
    ],
)
def test_screenings_take_some_contexts_of_every_task(counts: list[int], ends: list[list[int]]) -> None:
    assert plan_screenings(counts) == ends
    assert all(screened <= first for screened, first in zip(ends[0], plan_rounds(counts)[0], strict=True))


def test_rounds_grow_by_half() -> None:
    assert [asked for (asked,) in plan_rounds([42])] == [8, 12, 18, 27, 40, 42]
    assert plan_rounds([5]) == [[5]]
    assert plan_rounds([15] * 13)[:3] == [[1] * 13, [2] * 13, [3] * 13]
    assert plan_rounds([2, 30])[-1] == [2, 30]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
@at_most(50)
def test_every_round_asks_every_task(counts: list[int]) -> None:
    rounds = [[0] * len(counts), *plan_rounds(counts)]
    assert rounds[-1] == counts
    for before, after in pairwise(rounds):
        assert all(new > old for old, new in zip(before, after, strict=True))
    assert sum(rounds[1]) >= min(MIN_CONTEXTS_FOR_PROOF, sum(counts))


def run_race(
    rows: dict[str, np.ndarray],
    candidates: list[str],
    rule: Rule | None = None,
    losses: Scores | None = None,
    reading_twice: Collection[str] = (),
) -> tuple[Race, int]:
    """Return a finished race of scores by context, and how many contexts it asked."""
    race = Race(candidates, [name for name in rows if name not in candidates], rule or Rule(), losses, reading_twice)
    contexts = len(next(iter(rows.values())))
    begin = 0
    for (end,) in plan_rounds([contexts]):
        asked = made(**{name: rows[name][begin:end] for name in (*race.candidates, *race.baselines)})
        race.eliminate(asked, is_last=end == contexts, available=contexts)
        begin = end
        if race.winner is not None:
            break
    return race, begin


def test_a_lead_beyond_doubt_ends_the_race() -> None:
    rows = {"a": np.ones(60), "b": np.zeros(60), "c": np.full(60, 0.5), "d": np.full(60, 0.4)}
    race, asked = run_race(rows, ["a", "b"])
    assert (race.winner, race.verdict, race.best) == ("a", "beats", "c")
    assert asked < 30
    assert race.evidence("a") >= math.log(20)
    assert "b" not in race.candidates
    assert "d" not in race.baselines


def test_few_contexts_are_likely_at_most() -> None:
    rows = {"a": np.ones(7), "b": np.zeros(7)}
    race, _ = run_race(rows, ["a"])
    assert (race.winner, race.verdict) == ("a", "likely")
    race, _ = run_race(rows, ["a"], Rule(sure=0.95))
    assert (race.winner, race.verdict) == ("b", "baseline")


def test_what_is_likely() -> None:
    leads = np.tile([0.3, -0.1, 0.2, 0.0], 5)
    rows = {"a": 0.5 + leads, "b": np.full(20, 0.5)}
    assert run_race(rows, ["a"])[0].verdict == "likely"
    assert run_race({"a": rows["b"], "b": rows["a"]}, ["a"])[0].verdict == "baseline"
    assert run_race({"a": rows["b"], "b": rows["b"]}, ["a"])[0].winner == "b"  # nobody leads
    alternating = {"a": 0.5 + np.tile([0.3, -0.25], 10), "b": np.full(20, 0.5)}
    assert run_race(alternating, ["a"])[0].verdict == "baseline"
    assert run_race(alternating, ["a"], Rule(sure=0.5))[0].verdict == "likely"


def test_losses_say_who_is_foremost_and_scores_who_leaves() -> None:
    """Two candidates score alike, as do two baselines; a third of each loses least and scores far less."""
    even = np.tile([1.0, 0.0], 30)
    rows = {"a": even, "b": even, "c": 0.2 * even, "d": even, "e": even, "f": 0.2 * even}
    lost = {"a": 0.6, "b": 0.5, "c": 0.1, "d": 0.8, "e": 0.7, "f": 0.2}
    noise = np.tile([0.1, -0.1], 12)
    losses = made(**{name: -loss + noise * (name < "d") for name, loss in lost.items()})
    race, asked = run_race(rows, ["a", "b", "c"], losses=losses)
    assert (race.winner, race.verdict, race.best) == ("b", "likely", "e")
    # 0.2 less on average, differences of 0.3 and 0.1 in turn: 24 of them have a deviation of 0.1 * sqrt(24 / 23)
    assert race.loss_bound == pytest.approx(0.2 - 1.3195 * 0.1 / math.sqrt(23), abs=1e-4)
    assert race.bound == 0.0
    assert asked == 27  # of 60: no proof is in reach where scores do not differ
    close = replace(losses, sums={**losses.sums, "e": losses.sums["b"] + np.tile([0.3, -0.3], 12)})
    race, asked = run_race(rows, ["a", "b", "c"], losses=close)
    assert (race.winner, race.verdict, asked) == ("e", "baseline", 60)  # losses do not tell them apart: all are asked
    leading = {**rows, "b": np.tile([1.0, 0.2], 30)}  # .1 more, a deviation of .1
    race, asked = run_race(leading, ["a", "b", "c"], losses=close)
    assert (race.winner, race.verdict, race.best, asked) == ("b", "likely", "e", 27)  # scores do
    for apart, count in ((0.05, 27), (0.2, 60)):  # bounds of .014 and .057 on either side
        best = losses.sums["e"]
        same = replace(losses, sums={**losses.sums, "a": best - 1, "b": best + np.tile([apart, -apart], 12)})
        race, asked = run_race(rows, ["a", "b", "c"], losses=same)
        assert (race.winner, race.verdict, asked) == ("e", "baseline", count)
        race, _ = run_race(rows, ["a", "b", "c"], losses=same, reading_twice="e")
        assert (race.winner, race.verdict) == (("b", "cheaper") if apart == 0.05 else ("e", "baseline"))
        for rule, dear in ((Rule(0.95), "e"), (Rule(), "be")):  # only what beats; no cheaper itself
            race, _ = run_race(rows, ["a", "b", "c"], rule, same, dear)
            assert (race.winner, race.verdict) == ("e", "baseline")
    # .02 less with a bound of -.014: no worse than "e", which may lose .05 more
    better = replace(losses, sums={**losses.sums, "a": best - 1, "b": best + 0.02 + np.tile([0.12, -0.12], 12)})
    for dear, ending in (("", ("e", "baseline", 60)), ("e", ("b", "cheaper", 27))):
        race, asked = run_race(rows, ["a", "b", "c"], losses=better, reading_twice=dear)
        assert (race.winner, race.verdict, asked) == ending
    worse = replace(losses, sums={**losses.sums, "b": losses.sums["e"] - 0.01, "a": losses.sums["e"] - 0.02})
    race, _ = run_race(rows, ["a", "b", "c"], losses=worse)
    assert (race.winner, race.verdict) == ("e", "baseline")


def simulated(rng: np.random.Generator, quality: Sequence[float], contexts: int, loses: float = 0.0) -> np.ndarray:
    """Scores [methods, contexts] on contexts that are hard for all or for some; candidates lose some of them whole."""
    level = np.array(quality)[:, None] + rng.normal(0, 1, contexts) + rng.normal(0, 0.7, (len(quality), contexts))
    right = rng.binomial(4, 1 / (1 + np.exp(-level))) / 4
    right[: len(quality) // 2][rng.random((len(quality) // 2, contexts)) < loses] = 0
    return right


def rate(candidates: Sequence[float], baselines: Sequence[float], contexts: int, loses: float = 0.0) -> float:
    """Return how often a candidate is said to beat the baselines."""
    rng = np.random.default_rng(contexts)
    names = [f"c{number}" for number in range(len(candidates))]
    known = [f"b{number}" for number in range(len(baselines))]
    beaten = 0
    for _ in range(60):
        rows = simulated(rng, [*candidates, *baselines], contexts, loses)
        race, _ = run_race(dict(zip([*names, *known], rows, strict=True)), names)
        beaten += race.verdict == "beats"
    return beaten / 60


@pytest.mark.parametrize(
    ("candidates", "baselines", "loses"),
    [([0.0] * 6, [0.0] * 3, 0.0), ([0.3] * 6, [0.3, 0.0, 0.0], 0.0), ([0.3] * 6, [0.0] * 3, 0.1)],
)
def test_candidates_that_are_no_better_are_hardly_ever_said_to_beat(
    candidates: list[float], baselines: list[float], loses: float
) -> None:
    assert rate(candidates, baselines, 40, loses) <= 0.06


def test_candidates_that_are_better_beat() -> None:
    assert rate([2.5, *[0.0] * 5], [0.0] * 3, 60) > 0.9


@pytest.mark.parametrize("values", [{"sure": 0.4}, {"sure": 1.0}, {"sure": math.nan}, {"level": 0.0}])
def test_rules_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        Rule(**values)
    assert "\n" not in str(caught.value)


def test_levels_are_shared_by_holms_rule() -> None:
    ended: Any = [Mock(verdict=verdict) for verdict in ("beats", "likely", "beats", "beats")]
    levels = [compute_shared_level(0.06, 3, ended[:count]) for count in range(len(ended) + 1)]
    assert levels == pytest.approx([0.02, 0.03, 0.03, 0.06, 0.06])
