"""The rule of a selection under simulation, its statistics worked by hand, and whole selections on tiny models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.progress import Progress
from kvsearch.evaluation.compare import Evaluation, Settings
from kvsearch.evaluation.plan_comparison import prepare_plans
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.statistics import contrast, summarize
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan, Profile, Size
from kvsearch.report.selections import selection_result, tables
from kvsearch.results.selection import DECODE_ONLY
from kvsearch.runs.estimates import Difference
from kvsearch.selection.acceptance import Rule, Scores, compute_chances, judge_leads, measure_gap_closed
from kvsearch.selection.selection import BUDGETS_ALONE, POLICIES_ALONE, Selection
from kvsearch.selection.selection_job import SelectionJob, prepare_selection
from kvsearch.selection.signal_candidates import Explored, explore, find_signal_candidates
from kvsearch.selection.splits import split_contexts
from kvsearch.tasks.encode import encode_tasks
from tests import tiny
from tests.evaluation.shown import rendered
from tests.evaluation.test_statistics import samples
from tests.examples import at_most
from tests.signals.profiles import make_signals, signal_metadata

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 4}, "streaming": {"sinks": 2}, "tova": {}}
SIZE = Size(budget=12)
HOW = Settings(samples=16, seed=3, batch=8)


# --- scores ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
@at_most(30)
def test_means_are_those_of_every_evaluation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [[int(n) for n in rng.integers(1, 4, rng.integers(1, 6))] for _ in range(2)]
    drawn = [
        sample
        for method in ("a", "b", "full")
        for task, shape in zip("tu", shapes, strict=True)
        for sample in samples([rng.random(n).tolist() for n in shape], method, task)
    ]
    scores, whole = Scores.of(drawn), summarize(drawn, "a")[-1]
    assert {name: scores.mean(name) for name in scores.sums} == pytest.approx(
        {name: found.mean for name, found in whole.scores.items()}
    )
    lead = contrast(drawn, {"a": 1.0, "b": -1.0})
    assert (scores.added("a") - scores.added("b")).sum() == pytest.approx(lead.mean)
    resampled = scores.resampled(["a", "b"], seed=0)
    assert (resampled[0] - resampled[1]).mean() == pytest.approx(lead.mean, abs=0.1)


def test_two_sets_of_contexts_make_one() -> None:
    one = Scores.of(samples([[1.0, 0.0], [1.0]], "a") + samples([[0.0, 0.0], [0.0]], "b"))
    two = Scores.of(samples([[0.0]], "a") + samples([[1.0]], "c"))
    both = one.beside(two)
    assert set(both.sums) == {"a"}
    assert both.mean("a") == 0.5
    assert one.ranked(["b", "a"]) == ["a", "b"]
    assert one.ranked(["b", "b"]) == ["b", "b"]


# --- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contexts", [1, 2, 4, 7])
def test_the_least_chance_is_that_all_coins_agree(contexts: int) -> None:
    assert compute_chances(np.full((1, contexts), 0.1))[0] == pytest.approx(0.5**contexts, abs=0.01)
    assert compute_chances(np.full((1, contexts), -0.1))[0] == 1.0
    assert compute_chances(np.zeros((2, contexts))).tolist() == [1.0, 1.0]


def test_chances_are_those_of_all_signs() -> None:
    leads = np.array(
        [[0.5, 0.2, 0.4, -0.1, 0.3, 0.2], [0.1, 0.1, 0.0, 0.1, 0.1, 0.1], [0.3, -0.3, 0.9, 0.1, 0.2, -0.6]]
    )
    scaled = leads / np.linalg.norm(leads, axis=1, keepdims=True)
    largest = np.array([(scaled @ np.array(signs)).max() for signs in product([-1, 1], repeat=6)])
    exact = (largest[:, None] >= scaled.sum(axis=1) - 1e-9).mean(axis=0)
    np.testing.assert_allclose(compute_chances(leads), exact, atol=0.015)
    alone = np.array([compute_chances(row[None])[0] for row in leads])
    assert (alone <= compute_chances(leads)).all()  # more finalists, more luck
    assert compute_chances(leads)[0] > 1.5 * alone[0]


# --- the rule --------------------------------------------------------------------------------------------------------


def simulated(rng: np.random.Generator, quality: Sequence[float], contexts: int, questions: int = 4) -> Scores:
    """Methods named by number on contexts that are hard for all or for some; replies are right or wrong."""
    level = np.array(quality)[:, None] + rng.normal(0, 1, contexts) + rng.normal(0, 0.7, (len(quality), contexts))
    right = rng.binomial(questions, 1 / (1 + np.exp(-level)))
    return Scores(("t",) * contexts, np.full(contexts, float(questions)), {str(n): row for n, row in enumerate(right)})


def outcome(
    rng: np.random.Generator, candidates: Sequence[float], baselines: Sequence[float], contexts: int, rule: Rule
) -> bool:
    """Whether any candidate is accepted; only the test of chance and the other baselines can prevent it."""
    quality = [*candidates, *baselines]
    names = [str(n) for n in range(len(quality))]
    first, second = (simulated(rng, quality, part) for part in (contexts // 2, contexts - contexts // 2))
    finalists = first.ranked(names[: len(candidates)])[: rule.top]
    kept = first.ranked(names[len(candidates) :])[: rule.kept]
    best = first.beside(second).ranked(kept)[0]
    leads = {name: second.mean(name) - second.mean(best) for name in finalists}
    differences = {name: Difference(lead, lead, lead, 0, 0, 0) for name, lead in leads.items()}
    return any(good for _, good in judge_leads(second, differences, best, kept, rule).values())


def rate(candidates: Sequence[float], baselines: Sequence[float], contexts: int, rule: Rule | None = None) -> float:
    rng = np.random.default_rng(contexts)
    return float(np.mean([outcome(rng, candidates, baselines, contexts, rule or Rule()) for _ in range(200)]))


EQUAL = [0.0] * 12
ONE_BETTER = [0.3, *EQUAL[1:]]


@pytest.mark.parametrize("contexts", [6, 16, 60])
@pytest.mark.parametrize(
    ("candidates", "baselines"),
    [([0.0] * 60, EQUAL), ([0.3] * 60, ONE_BETTER), ([0.3] * 5 + [0.0] * 55, ONE_BETTER), ([0.0], [0.0])],
)
def test_candidates_that_are_no_better_are_hardly_ever_accepted(
    candidates: list[float], baselines: list[float], contexts: int
) -> None:
    assert rate(candidates, baselines, contexts) <= 0.05


def test_a_margin_believes_the_best_of_several_on_its_word() -> None:
    assert rate([0.3] * 60, ONE_BETTER, 60, Rule(margin=0.0)) > 0.3
    assert rate([0.3] * 60, ONE_BETTER, 60, Rule(margin=0.2)) < 0.05


def test_candidates_that_are_better_are_accepted() -> None:
    assert rate([2.0, *[0.0] * 59], EQUAL, 60) > 0.9
    assert rate([2.0, *[0.0] * 59], EQUAL, 6) == 0  # three fresh contexts show nothing


def made(**rows: Sequence[float]) -> Scores:
    contexts = len(next(iter(rows.values())))
    sums = {name: np.array(row, dtype=float) for name, row in rows.items()}
    return Scores(("t",) * contexts, np.ones(contexts), sums)


def leads_of(scores: Scores, best: str, *names: str, low: float = 0.01) -> dict[str, Difference]:
    return {name: Difference(scores.mean(name) - scores.mean(best), low, 1.0, 0, 0, 0) for name in names}


def test_what_an_accepted_candidate_has_to_be() -> None:
    won, lost = [1.0] * 10, [0.0] * 10
    scores = made(a=won, b=lost, other=[1.0] * 9 + [0.0], tied=won)
    verdict = judge_leads(scores, leads_of(scores, "b", "a"), "b", ["b", "other"], Rule())["a"]
    assert verdict == (pytest.approx(2**-10, abs=2e-3), True)
    # the interval touches zero, another baseline is as good, the level is stricter
    assert not judge_leads(scores, leads_of(scores, "b", "a", low=0.0), "b", ["b"], Rule())["a"][1]
    assert not judge_leads(scores, leads_of(scores, "b", "a"), "b", ["b", "tied"], Rule())["a"][1]
    assert not judge_leads(scores, leads_of(scores, "b", "a"), "b", ["b"], Rule(level=1e-5))["a"][1]
    # a margin asks for the mean alone, still above every baseline
    few = made(a=[1.0, 0.6], b=[0.5, 0.5], tied=[1.0, 0.6])
    assert judge_leads(few, leads_of(few, "b", "a", low=-1.0), "b", ["b"], Rule(margin=0.29))["a"][1]
    assert not judge_leads(few, leads_of(few, "b", "a"), "b", ["b"], Rule(margin=0.3))["a"][1]
    assert not judge_leads(few, leads_of(few, "b", "a"), "b", ["b", "tied"], Rule(margin=0.0))["a"][1]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"top": 0}, "--top 0 lets no candidate through"),
        ({"margin": float("nan")}, "--margin nan is outside"),
        ({"share": 1.0}, "a first stage with 1 of the contexts"),
        ({"level": 0.0}, "a level of 0 is no probability"),
    ],
)
def test_rules_out_of_range(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        Rule(**values)
    assert "\n" not in str(caught.value)


# --- the share of the gap --------------------------------------------------------------------------------------------


def test_a_share_worked_by_hand() -> None:
    scores = made(winner=[0.5, 0.7], base=[0.4, 0.4], full=[0.8, 1.0])
    share = measure_gap_closed(scores, "winner", "base")
    assert share is not None
    assert share.mean == pytest.approx(0.4)  # 0.2 of 0.5
    # the resamples are of the first context twice, of both, of the second twice: 0.1 / 0.4, 0.4, 0.3 / 0.6
    assert (share.low, share.high) == pytest.approx((0.25, 0.5))
    worse = measure_gap_closed(made(winner=[0.3, 0.3], base=[0.4, 0.4], full=[0.6, 0.6]), "winner", "base")
    assert worse is not None
    assert worse.mean == pytest.approx(-0.5)


def test_a_gap_in_doubt_has_no_bounds() -> None:
    doubtful = made(winner=[0.6, 0.6, 0.6], base=[0.5, 0.5, 0.5], full=[0.2, 0.9, 0.9])
    share = measure_gap_closed(doubtful, "winner", "base")
    assert share is not None
    assert share.high is None
    assert share.low is not None
    losing = measure_gap_closed(made(winner=[0.4] * 3, base=[0.5] * 3, full=[0.2, 0.9, 0.9]), "winner", "base")
    assert losing is not None
    assert losing.low is None
    level = measure_gap_closed(made(winner=[0.5] * 3, base=[0.5] * 3, full=[0.2, 0.9, 0.9]), "winner", "base")
    assert level is not None
    assert (level.low, level.high) == (0.0, 0.0)


def test_the_interval_of_a_share_covers_it() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        scores = simulated(rng, [0.5, 0.0, 1.5], 60)
        share = measure_gap_closed(scores, "0", "1", "2")
        assert share is not None
        truth = 0.36  # of 200,000 contexts
        hits += (share.low or -np.inf) <= truth <= (share.high or np.inf)
    assert 88 <= hits <= 100


# --- stages ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


def questions_of(*numbers: int, length: int = 44, name: str = "one", each: int = 1) -> tiny.Listed:
    """A task of contexts of their own."""
    rows = tuple(tiny.listed(*[(length, each)] * (max(numbers) + 1)).rows[number] for number in numbers)
    return tiny.Listed(name, rows)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
def test_the_stages_have_nothing_in_common(model: LoadedModel, share: float) -> None:
    whole = encode_tasks(model, [questions_of(*range(8)), questions_of(*range(3), length=50, name="two")], 8)
    first, second = split_contexts(whole, share, seed=5)
    for task, early, late in zip(whole, first, second, strict=True):
        keys = [[prompt.key for prompt in part.prompts] for part in (task, early, late)]
        assert sorted(keys[1] + keys[2]) == sorted(keys[0])
        assert all(keys[1:])
        for part in (early, late):
            assert part.coverage.contexts == part.coverage.questions == len(part.prompts)
            assert [key for key in keys[0] if key in {p.key for p in part.prompts}] == [p.key for p in part.prompts]
        assert abs(len(keys[1]) - share * len(keys[0])) <= 1
    again, _ = split_contexts(whole, share, seed=5)
    assert [[p.key for p in task.prompts] for task in again] == [[p.key for p in task.prompts] for task in first]


def test_questions_about_one_context_are_divided_all_the_same(model: LoadedModel) -> None:
    (row,) = questions_of(0, each=3).rows
    rows = tuple(replace(row, key=str(n), queries=(query,)) for n, query in enumerate(row.queries))
    (first,), (second,) = split_contexts(encode_tasks(model, [tiny.Listed("one", rows)], 8), 0.5, 0)
    assert {p.key for p in (*first.prompts, *second.prompts)} == {"0", "1", "2"}
    with pytest.raises(UsageError, match="task one has too few contexts to select by: two stages need two or more"):
        split_contexts(encode_tasks(model, [tiny.Listed("one", rows[:1])], 8), 0.5, 0)


# --- whole selections ------------------------------------------------------------------------------------------------


def profile_of(model: LoadedModel, **options: Any) -> Profile:
    known = {"budgets": (8, 16, 32), "length": 60, **options}
    return make_signals(signal_metadata(model.fingerprint, PATTERNS, **known))


@pytest.fixture(scope="module")
def profile(model: LoadedModel) -> Profile:
    return profile_of(model)


def answered_by(model: LoadedModel, plan: Plan, task: tiny.Listed) -> tiny.Listed:
    """The task with the replies under a plan as the right answers: nothing can beat that plan."""
    result = prepare_plans(model, {"plan": plan}, [task], HOW).run()
    replies = {(one.key, one.question): one.reply for one in result.comparison.samples if one.method == "plan"}
    rows = tuple(
        replace(
            row,
            queries=tuple(
                replace(query, answers=(replies[row.key, number],)) for number, query in enumerate(row.queries)
            ),
        )
        for row in task.rows
    )
    return replace(task, rows=rows)


EXPLORED = {"routes": ["cosine", "error"], "allocators": ["uniform", "entropy", "curves"]}


def prepared_of(model: LoadedModel, profile: Profile, favourite: str | None, **options: Any) -> SelectionJob:
    tasks = [questions_of(*range(16), each=2), questions_of(*range(16, 26), each=2)]
    explored = explore(profile, SIZE, **EXPLORED)
    if favourite is not None:
        when = options.get("phases", ("prefill",))[0]
        plan = find_signal_candidates(model, profile, SIZE, when, explored).plans[favourite]
        tasks = [answered_by(model, plan, task) for task in tasks]
    return prepare_selection(model, profile, SIZE, tasks[:1], tasks[1:], HOW, explored=explored, **options)


@pytest.fixture(scope="module")
def won(model: LoadedModel, profile: Profile) -> Selection:
    return prepared_of(model, profile, "error + entropy", rule=Rule(top=3, kept=2)).run()


@pytest.fixture(scope="module")
def lost(model: LoadedModel, profile: Profile) -> Selection:
    return prepared_of(model, profile, "tova").run()


def test_a_candidate_that_is_better_is_written(won: Selection) -> None:
    chosen = won.chosen
    assert (chosen.winner, chosen.written) == ("error + entropy", "error + entropy")
    assert won.plan.provenance.method == "polykv"
    told = won.plan.provenance.settings
    assert (told["strategy"], told["route"], told["budget_signal"]) == ("error + entropy", "error", "entropy")
    assert (told["fallback"], told["phases"], told["budget"], told["candidates"]) == (False, "prefill", 12, 6)
    assert told["selection_questions"] == (16, 16)
    check_plan(won.plan, "the plan")
    assert 0 < chosen.method("error + entropy").chance <= chosen.level == 0.05  # type: ignore[operator]


def test_only_what_was_chosen_before_is_reported(won: Selection) -> None:
    finalists = {one.name for one in won.chosen.finalists}
    by_budgets, parts = won.report.by_budgets, won.report.parts
    assert by_budgets is not None
    assert parts is not None
    assert "error + entropy" in finalists
    assert set(won.report.scores) == {
        "full", "snapkv", won.chosen.best, *finalists, parts.control, by_budgets.equal, by_budgets.own, POLICIES_ALONE,
        BUDGETS_ALONE,
    }  # fmt: skip
    assert set(won.report.held) == set(won.report.scores)
    assert (won.report.asked.contexts, won.report.asked.questions) == (10, 20)
    assert won.report.scores["error + entropy"].mean == 1.0
    assert won.report.gain is not None
    lead = won.report.scores["error + entropy"].mean - won.report.scores[won.chosen.best].mean
    assert won.report.gain.mean == pytest.approx(lead)


def test_the_winner_is_taken_apart_on_the_report_split(won: Selection) -> None:
    """Its policies alone and its budgets alone, over the best single pattern; both ways add up to the same."""
    parts, scores = won.report.parts, {name: one.mean for name, one in won.report.scores.items()}
    assert parts is not None
    singles = {name: won.chosen.method(name).first.mean for name in PATTERNS}
    assert (parts.strategy, singles[parts.control]) == ("error + entropy", max(singles.values()))
    assert parts.both.mean == pytest.approx(scores["error + entropy"] - scores[parts.control])
    for part, alone in ((parts.policies, POLICIES_ALONE), (parts.budgets, BUDGETS_ALONE)):
        other = BUDGETS_ALONE if alone == POLICIES_ALONE else POLICIES_ALONE
        assert part.alone.mean == pytest.approx(scores[alone] - scores[parts.control])
        assert part.beside.mean == pytest.approx(scores["error + entropy"] - scores[other])
    assert parts.policies.alone.mean + parts.budgets.beside.mean == pytest.approx(parts.both.mean)
    assert parts.policies.alone.low <= parts.policies.alone.mean <= parts.policies.alone.high


def test_the_best_candidates_of_either_kind_of_budgets(won: Selection) -> None:
    found, scores = won.report.by_budgets, won.report.scores
    assert found is not None
    assert (found.equal in ("cosine", "error"), found.own) == (True, "error + entropy")
    assert found.gain is not None
    assert found.equal is not None
    assert found.gain.mean == pytest.approx(scores["error + entropy"].mean - scores[found.equal].mean)


def test_the_second_stage_has_those_that_the_first_let_through(won: Selection) -> None:
    standings = won.chosen.methods
    through = [one for one in standings if one.second is not None]
    for kind, count in (("candidate", 3), ("baseline", 2)):
        mine = [one for one in standings if one.kind == kind]
        best = sorted((one.first.mean for one in mine), reverse=True)[:count]
        assert sorted((one.first.mean for one in through if one.kind == kind), reverse=True) == best
        assert won.chosen.count(kind) == len(mine)  # type: ignore[arg-type]
    assert [one.accepted for one in standings if one.name == "error + entropy"] == [True]
    assert all(one.lead is None and one.chance is None for one in standings if one.second is None)


def test_a_baseline_that_is_as_good_is_written_instead(lost: Selection) -> None:
    assert (lost.chosen.winner, lost.chosen.written, lost.report.gain, lost.report.share) == (None, "tova", None, None)
    told = lost.plan.provenance.settings
    assert (told["fallback"], told["baseline"], told["best_baseline"]) == (True, "tova", "tova")
    assert {layer.policy.name for layer in lost.plan.phase("prefill").layers if layer} == {"tova"}
    assert lost.report.lead is not None
    assert lost.report.lead.mean < 0
    assert lost.chosen.leader == lost.chosen.finalists[0]


def test_without_candidates_the_best_baseline_is_written(model: LoadedModel, profile: Profile) -> None:
    explored = explore(profile, SIZE, routes=["none"], allocators=["uniform"])
    tasks = [questions_of(*range(6)), questions_of(*range(6, 9))]
    plan = find_signal_candidates(model, profile, SIZE, "prefill", explored).plans["streaming"]
    asked, reported = ([answered_by(model, plan, task)] for task in tasks)
    found = prepare_selection(model, profile, SIZE, asked, reported, HOW, explored=explored).run()
    assert (found.chosen.winner, found.chosen.written, found.chosen.count("candidate")) == (None, "streaming", 0)
    told = found.plan.provenance.settings
    assert (told["fallback"], told["candidates"], told["lead"]) == (True, 0, None)
    assert json.loads(json.dumps(selection_result(found).as_json(), allow_nan=False))["outcomes"][0]["winner"] is None
    assert "there is no candidate" in rendered(tables(selection_result(found)))


def test_replies_are_as_many_as_foretold(model: LoadedModel, profile: Profile) -> None:
    seen: dict[str, int] = {}

    def keep(name: str, evaluation: Evaluation) -> AbstractContextManager[tuple[ReplyStore | None, Progress | None]]:
        seen[name] = evaluation.replies
        return nullcontext((None, None))

    prepared = prepared_of(model, profile, None, rule=Rule(top=2))
    prepared.run(keep)
    assert list(seen) == ["prefill/first", "prefill/second", "prefill/report"]
    foretold = prepared.replies
    assert seen["prefill/first"] == foretold["first"] == (6 + 11 + 1) * 16
    assert seen["prefill/second"] == foretold["second"] == (2 + 3 + 1) * 16
    assert seen["prefill/report"] <= foretold["report"] == (2 + 7) * 20


@pytest.mark.nightly
def test_every_phase_setting_has_baselines_of_its_own(model: LoadedModel, profile: Profile) -> None:
    found = prepared_of(model, profile, "error + entropy", phases=("decode", "both")).run()
    assert [one.phases for one in found.results] == ["decode", "both"]
    assert {one.count("baseline") for one in found.results} == {11}
    assert {one.level for one in found.results} == {0.025}
    assert found.chosen.score == max(one.score for one in found.results)
    assert found.chosen.phases == "decode"
    assert (found.plan.prefill, found.plan.provenance.settings["phases_tried"]) == (None, ("decode", "both"))
    assert DECODE_ONLY in selection_result(found).notes


def test_what_is_chosen_by_cannot_be_reported(model: LoadedModel, profile: Profile) -> None:
    task = questions_of(*range(4))
    with pytest.raises(
        UsageError,
        match="is in the selection and in the report split",
    ):
        prepare_selection(model, profile, SIZE, [task], [task], HOW)
    rows = [
        replace(row, queries=tuple(replace(q, question=f"{q.question} .") for q in row.queries)) for row in task.rows
    ]
    with pytest.raises(UsageError, match="its context is in the selection and in the report split"):
        prepare_selection(model, profile, SIZE, [task], [replace(task, rows=tuple(rows))], HOW)
    with pytest.raises(UsageError, match="task one has too few contexts to select by"):
        prepare_selection(model, profile, SIZE, [questions_of(1)], [task], HOW)


def test_a_selection_needs_phases_and_something_to_evict(model: LoadedModel, profile: Profile) -> None:
    questions = ([questions_of(*range(4))], [questions_of(*range(4, 8))])
    even = Explored(("cosine",), ("uniform",))
    with pytest.raises(UsageError, match=r"^no phases to evict in: give at least one of prefill, decode, both$"):
        prepare_selection(model, profile, SIZE, *questions, HOW, phases=())
    late: dict[str, Any] = {"phases": ("decode",), "explored": even}
    with pytest.raises(UsageError, match=r"^59 entries per kv head: nothing would be evicted from any prompt, the"):
        prepare_selection(model, profile, Size(budget=59), *questions, HOW, **late)
    both = ([questions_of(*range(4)), questions_of(*range(4), length=80, name="two")], questions[1])
    (one,) = prepare_selection(model, profile, Size(budget=59), *both, HOW, **late).comparisons
    assert "4 of 8 prompts are so short" in one.candidate_set.notes[-1]
    (one,) = prepare_selection(model, profile, Size(budget=50), *questions, HOW).comparisons  # some give and take
    assert re.search(r"4 of 4 prompts .* that \d+ of \d+ strategies evict nothing", one.candidate_set.notes[-1])


def test_another_batch_goes_on_with_the_same_replies(model: LoadedModel, profile: Profile) -> None:
    questions = ([questions_of(*range(4))], [questions_of(*range(4, 8))])
    one, other, third = (
        prepare_selection(model, profile, SIZE, *questions, how)
        for how in (HOW, replace(HOW, batch=1, max_memory=10**9), replace(HOW, seed=4))
    )
    first, again, elsewhere = (each.config(each.comparisons[0].prepared.evaluation) for each in (one, other, third))
    assert first.difference(again) is None
    assert first.difference(elsewhere) == "seed is 4 there, 3 here"


def test_a_profile_of_another_model(model: LoadedModel) -> None:
    other = make_signals(signal_metadata(None, PATTERNS))
    with pytest.raises(IncompatibleError, match="this profile was made for another model"):
        prepare_selection(model, other, SIZE, [questions_of(1, 2)], [questions_of(3)], HOW)
