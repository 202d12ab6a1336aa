"""The scores of a selection worked by hand, how contexts are divided, and whole selections on tiny models."""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.commands.reporter import NullReporter, make_stage_store
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.items import Progress
from kvsearch.evaluation.compare import Evaluation, Split, prepare_plans
from kvsearch.evaluation.reply_store import ReplyStore, read_replies
from kvsearch.evaluation.statistics import contrast_scores, summarize
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Plan, Profile, Size
from kvsearch.report.selections import describe_decision, make_selection_result, make_tables
from kvsearch.runs.identity import LEDGER
from kvsearch.selection import plan_race, race
from kvsearch.selection.plan_race import SCREENED_TOKENS, choose_screening_questions
from kvsearch.selection.records import REPORTED_STRATEGIES, Rule
from kvsearch.selection.scores import Scores, measure_gap_closed
from kvsearch.selection.selection_job import SelectionJob, prepare_selection
from kvsearch.selection.signal_candidates import find_signal_candidates
from kvsearch.tasks.base import Sampling
from kvsearch.tasks.encode import encode_tasks
from kvsearch.tasks.metrics.likelihood import read_loss
from tests import tiny
from tests.evaluation.results import rendered
from tests.evaluation.test_statistics import samples
from tests.examples import at_most
from tests.selection.test_race import made
from tests.signals.profiles import make_signals, signal_metadata

SIZE = Size(budget=12)
HOW = {"samples": 16, "seed": 3, "batch": 8}


@given(st.integers(0, 2**32))
@at_most(20)
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
    lead = contrast_scores(drawn, {"a": 1.0, "b": -1.0})
    assert (scores.contributions("a") - scores.contributions("b")).sum() == pytest.approx(lead.mean)
    resampled = scores.resample_means(["a", "b"], seed=0)
    assert (resampled[0] - resampled[1]).mean() == pytest.approx(lead.mean, abs=0.1)


def test_a_share_worked_by_hand() -> None:
    scores = made(winner=[0.5, 0.7], base=[0.4, 0.4], full=[0.8, 1.0])
    share = measure_gap_closed(scores, "winner", "base")
    assert share.mean == pytest.approx(0.4)  # 0.2 of 0.5
    # the resamples are of the first context twice, of both, of the second twice: 0.1 / 0.4, 0.4, 0.3 / 0.6
    assert (share.low, share.high) == pytest.approx((0.25, 0.5))
    worse = measure_gap_closed(made(winner=[0.3, 0.3], base=[0.4, 0.4], full=[0.6, 0.6]), "winner", "base")
    assert worse.mean == pytest.approx(-0.5)


def test_a_gap_in_doubt_has_no_bounds() -> None:
    doubtful = made(winner=[0.6, 0.6, 0.6], base=[0.5, 0.5, 0.5], full=[0.2, 0.9, 0.9])
    share = measure_gap_closed(doubtful, "winner", "base")
    assert math.isnan(share.high)
    assert math.isfinite(share.low)
    losing = measure_gap_closed(made(winner=[0.4] * 3, base=[0.5] * 3, full=[0.2, 0.9, 0.9]), "winner", "base")
    assert math.isnan(losing.low)
    level = measure_gap_closed(made(winner=[0.5] * 3, base=[0.5] * 3, full=[0.2, 0.9, 0.9]), "winner", "base")
    assert (level.low, level.high) == (0.0, 0.0)


def questions_of(*numbers: int, length: int = 44, name: str = "one", each: int = 1) -> tiny.Listed:
    """A task of contexts of their own."""
    rows = tuple(tiny.listed(*[(length, each)] * (max(numbers) + 1)).rows[number] for number in numbers)
    return tiny.Listed(name, rows)


@pytest.fixture(scope="module")
def profile(model: LoadedModel) -> Profile:
    return make_signals(signal_metadata(model.fingerprint, budgets=(8, 16, 32), length=60))


def answered_by(model: LoadedModel, plan: Plan, task: tiny.Listed) -> tiny.Listed:
    """The task with the replies under a plan as the right answers: nothing can beat that plan."""
    result = prepare_plans(model, {"plan": plan}, Split([task], **HOW)).run()
    replies = {(one.key, one.question): one.reply for one in result.samples if one.method == "plan"}
    rows = []
    for row in task.rows:
        answered = (replace(query, answers=(replies[row.key, at],)) for at, query in enumerate(row.queries))
        rows.append(replace(row, queries=tuple(answered)))
    return replace(task, rows=tuple(rows))


def prepare(
    model: LoadedModel, profile: Profile, size: Size, choice: Split, reported: Split, **options: Any
) -> SelectionJob:
    """A selection among the strategies of a profile."""
    plans = find_signal_candidates(model, profile, size, **options)
    return prepare_selection(model, plans, size, choice, reported, Rule())


EXPLORED = ("cosine", "error"), ("uniform", "entropy", "curves")


def prepared_of(model: LoadedModel, profile: Profile, favourite: str, contexts: int = 10) -> SelectionJob:
    tasks = [questions_of(*range(contexts), each=2), questions_of(*range(contexts, contexts + 4), each=2)]
    plan = find_signal_candidates(model, profile, SIZE, "prefill", *EXPLORED).plans[favourite]
    asked = (Split([answered_by(model, plan, task)], **HOW) for task in tasks)
    return prepare(model, profile, SIZE, *asked, routes=EXPLORED[0], allocators=EXPLORED[1])


def test_a_candidate_that_is_better_is_written_and_reported(model: LoadedModel, profile: Profile) -> None:
    won = prepared_of(model, profile, "error + entropy").run()
    chosen = won.chosen
    assert (chosen.winner, chosen.written) == ("error + entropy", "error + entropy")
    assert won.plan.provenance.method == "polykv"
    told = won.plan.provenance.settings
    assert (told["strategy"], told["route"], told["budget_signal"]) == ("error + entropy", "error", "entropy")
    assert (told["fallback"], told["phases"], told["budget"], told["candidates"]) == (False, "prefill", 12, 6)
    assert told["selection_questions"] == chosen.asked.questions == 2 * chosen.asked.contexts
    assert chosen.verdict == told["verdict"] != "baseline"
    check_plan(won.plan, "the plan")
    assert (chosen.method("error + entropy").chance <= 0.05) == (chosen.verdict == "beats")  # type: ignore[operator]
    # only what was chosen before is reported
    finalists = {method.name for method in won.chosen.list_foremost("candidate", REPORTED_STRATEGIES)}
    assert "error + entropy" in finalists
    assert set(won.report.scores) == {"full", "snapkv", won.chosen.best, *finalists}
    assert (won.report.asked.contexts, won.report.asked.questions) == (4, 8)
    assert won.report.scores["error + entropy"].mean == 1.0
    assert won.report.gain.mean == pytest.approx(1.0 - won.report.scores[won.chosen.best].mean)
    counts = [method.contexts for method in won.chosen.methods]  # methods are asked until they leave
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == won.chosen.asked.contexts


def test_a_baseline_that_is_as_good_is_written_instead(model: LoadedModel, profile: Profile) -> None:
    seen: dict[str, float] = {}

    def keep(name: str, evaluation: Evaluation) -> AbstractContextManager[tuple[ReplyStore | None, Progress | None]]:
        seen[name] = evaluation.cost(name).work.tokens
        return nullcontext((None, None))

    prepared = prepared_of(model, profile, "tova")
    lost = prepared.run(keep)
    choose, report = prepared.costs  # what is asked costs at most what is said
    assert sum(tokens for name, tokens in seen.items() if "round" in name) <= choose.work.tokens
    assert seen["prefill/report"] <= report.work.tokens
    assert (lost.chosen.winner, lost.chosen.written, lost.report.gain, lost.report.share) == (None, "tova", None, None)
    told = lost.plan.provenance.settings
    assert (told["fallback"], told["baseline"], told["best_baseline"]) == (True, "tova", "tova")
    assert {layer.policy.name for layer in lost.plan.phase("prefill").layers if layer} == {"tova"}
    assert lost.report.lead.mean < 0
    assert lost.chosen.verdict == "baseline"


def test_without_candidates_the_best_baseline_is_written(model: LoadedModel, profile: Profile) -> None:
    explored = {"routes": ("none",), "allocators": ("uniform",)}
    tasks = [questions_of(*range(6)), questions_of(*range(6, 9))]
    plan = find_signal_candidates(model, profile, SIZE, **explored).plans["streaming"]
    asked, reported = ([answered_by(model, plan, task)] for task in tasks)
    found = prepare(model, profile, SIZE, Split(asked, **HOW), Split(reported, **HOW), **explored).run()
    assert (found.chosen.winner, found.chosen.written, found.chosen.count("candidate")) == (None, "streaming", 0)
    assert json.loads(json.dumps(make_selection_result(found).as_json(), allow_nan=False))["chosen"]["winner"] is None
    assert "every strategy is a baseline" in rendered(make_tables(make_selection_result(found)))


@pytest.mark.nightly
def test_the_hopeless_do_not_reply(
    model: LoadedModel, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a random model methods hardly differ, so any lead is made to count."""
    for name, value in (("HOPELESS_LEVEL", 0.5), ("MOST_LOST", 0.0), ("FINALISTS", 2)):
        monkeypatch.setattr(race, name, value)
    monkeypatch.setattr(plan_race, "FINALISTS", 2)
    job = prepared_of(model, profile, "error + entropy")
    store = make_stage_store(tmp_path, job.race.config, NullReporter())
    chosen = job.race.decide(store)
    assert chosen.screening is not None
    left_out = {method.name for method in chosen.screening.dropped}
    plans = job.race.candidate_set
    assert chosen.screening.best not in left_out
    assert {method.name for method in chosen.methods} == plans.plans.keys() - left_out
    dropped = chosen.screening.count("baseline")
    assert f"the best of {len(plans.baselines)} baselines ({dropped} dropped by loss)" in describe_decision(chosen)
    kept = {path.parent.name: read_replies(path) for path in tmp_path.rglob(LEDGER)}
    methods = {stage: {reply.method for reply in replies.values()} for stage, replies in kept.items()}
    screenings = sorted(stage for stage in methods if stage.startswith("screen"))
    assert len(screenings) > 1
    assert methods["screen-1"] == {"full", *plans.plans}
    for before, after in pairwise(screenings):
        assert methods[after] <= methods[before]
    last = screenings[-1]
    assert methods["round-1"] == {"full", *plans.plans} - left_out <= methods[last] < methods["screen-1"]
    # those reply that lose least on the contexts of all screenings
    losses: dict[str, list[float]] = {}
    for stage in screenings:
        for reply in kept[stage].values():
            losses.setdefault(reply.method, []).append(read_loss(reply.reply))
    weighed = {name: fmean(losses[name]) for name in methods[last] & plans.baselines.keys()}
    assert set(sorted(weighed, key=weighed.__getitem__)[:2]) == plans.baselines.keys() - left_out
    # who is killed while methods are screened goes on to the same
    ledger = tmp_path / "prefill" / "screen-1" / LEDGER
    ledger.write_bytes(ledger.read_bytes()[:-200])
    assert len(read_replies(ledger)) < len(kept["screen-1"])
    assert job.race.decide(store) == chosen
    assert read_replies(ledger) == kept["screen-1"]


def test_a_candidate_that_is_out_after_the_first_round_stays_a_candidate(
    model: LoadedModel, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was bet on it."""
    monkeypatch.setattr(plan_race, "FINALISTS", 99)  # nothing is screened
    race = prepared_of(model, profile, "error + entropy", contexts=4).race
    name = next(iter(race.candidate_set.candidates))
    monkeypatch.setattr(plan_race, "find_behind_on_kinds", lambda *_: {name: "it is out"})
    method = race.decide().method(name)
    assert (method.kind, method.chance) == ("candidate", 1.0)


def test_questions_without_a_right_reply_are_not_screened(model: LoadedModel) -> None:
    asked = encode_tasks(model, [questions_of(0, each=2)], 8)
    ((forced,),) = choose_screening_questions(asked, 0) or ()
    for question, whole in zip(forced.prompts[0].questions, asked[0].prompts[0].questions, strict=True):
        assert question.right.tolist() == whole.right[:SCREENED_TOKENS].tolist()
    assert choose_screening_questions([forced], 0) is None  # nothing would be cheaper
    (row,) = questions_of(0).rows
    open_ended = replace(row, queries=tuple(replace(query, answers=()) for query in row.queries))
    lottery = tiny.Lottery("open", (open_ended,))
    assert choose_screening_questions([*asked, *encode_tasks(model, [lottery], 8)], 0) is None
    drawn = encode_tasks(model, [questions_of(0, each=2)], 8, sampling=Sampling(1.0, replies=3))
    ((once,),) = choose_screening_questions(drawn, 0) or ()
    assert len(once.prompts[0].questions) == 2
    assert once.sampling is None


def test_what_is_chosen_by_cannot_be_reported(model: LoadedModel, profile: Profile) -> None:
    task = questions_of(*range(4))
    rows = [
        replace(row, queries=tuple(replace(q, question=f"{q.question} .") for q in row.queries)) for row in task.rows
    ]
    with pytest.raises(UsageError, match="its context is in the selection and in the report split"):
        prepare(model, profile, SIZE, Split([task], **HOW), Split([replace(task, rows=tuple(rows))], **HOW))


def test_a_selection_needs_something_to_evict(model: LoadedModel, profile: Profile) -> None:
    questions = (Split([questions_of(*range(4))], **HOW), Split([questions_of(*range(4, 8))], **HOW))
    late: dict[str, Any] = {"phases": "decode", "routes": ("cosine",), "allocators": ("uniform",)}
    with pytest.raises(UsageError, match=r"^59 entries per kv head: nothing would be evicted from any prompt, the"):
        prepare(model, profile, Size(budget=59), *questions, **late)
    both = Split([questions_of(*range(4)), questions_of(*range(4), length=80, name="two")], **HOW)
    one = prepare(model, profile, Size(budget=59), both, questions[1], **late).race
    assert "4 of 8 prompts are so short" in one.candidate_set.notes[-1]


def test_a_profile_of_another_model(model: LoadedModel) -> None:
    other = make_signals()
    with pytest.raises(IncompatibleError, match="this profile was made for another model"):
        prepare(model, other, SIZE, Split([questions_of(1, 2)], **HOW), Split([questions_of(3)], **HOW))
