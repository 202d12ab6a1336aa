"""A kind of question that a second fit never saw: which one, on what it is asked, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import COMPARED, ProbeOptions
from kvsearch.calibration.probe import measure
from kvsearch.calibration.probe.context_pass import BUDGETS, ContextPass, QuestionBuilder
from kvsearch.calibration.probe.contexts import ContextSplit, kind_to_leave_out
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation, prompts_of
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.report.ranking import RankingView
from kvsearch.runtime.attention import running
from tests import tiny
from tests.calibrations import calibrate_probe

SMALL = ProbeOptions(entries=200, form="linear", features=("value_norm", "keydiff"))
UNKNOWN = "not known"


def of_kinds(data: CalibrationData, *kinds: str | None) -> CalibrationData:
    """The data with kinds of contexts, in turn."""
    named = (replace(one, kind=kinds[number % len(kinds)]) for number, one in enumerate(data.contexts))
    return replace(data, contexts=tuple(named))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return tiny.calibration_data(90, 100, 95, 90, 105, 90)


@pytest.fixture(scope="module")
def profile(model: LoadedModel, data: CalibrationData) -> Profile:
    return calibrate_probe(model, of_kinds(data, *["codes"] * 4, *["chains"] * 2), SMALL)


def prompt(number: int, *kinds: str | None) -> CalibrationPrompt:
    after = (Continuation(torch.zeros(1, 4, dtype=torch.long), 2, kind=kind) for kind in kinds)
    return CalibrationPrompt(torch.zeros(1, 9, dtype=torch.long), number, number, tuple(after))


def test_the_profile_has_what_a_kind_of_question_loses(profile: Profile) -> None:
    layers, heads = profile.metadata.shape
    settings = profile.metadata.provenance.settings
    assert (settings["kinds"], settings["left_out_questions"]) == (2, 2)
    assert profile.arrays["kind_recall"].shape == (2 + len(COMPARED), len(BUDGETS), layers, heads)
    assert profile.arrays["kind_text_loss"].shape == (1, 2 + len(COMPARED), len(BUDGETS))
    # the one context that is reported on is of that kind: the whole fit and the built-in rankings are asked the same
    np.testing.assert_allclose(profile.arrays["kind_text_loss"][:, 1:], profile.arrays["text_loss"], atol=1e-6)
    view = RankingView(profile)
    found = view.left_out
    assert found is not None and found.losses.rankings == ("without the kind", "probe", *COMPARED)
    assert found.kind == settings["left_out"] in ("codes", "chains")
    assert sum(found.words == line for line in view.remarks()) == 1


def test_whether_it_carries_over_is_said(profile: Profile) -> None:
    for texts, unseen, carries in ((5, 0.3, True), (5, 0.4, None), (5, 0.5, False), (4, 0.3, None), (4, 0.5, None)):
        loss = np.full((texts, 2 + len(COMPARED), len(BUDGETS)), 0.4, np.float32)
        loss[:, 0] = unseen
        loss[:, 1] = 0.1
        found = RankingView(Profile(profile.metadata, {**profile.arrays, "kind_text_loss": loss})).left_out
        assert found is not None and found.losses.is_better is carries
        assert f"asked 2 questions of that kind, replies move at 5%: {unseen:.3f}, under snapkv 0.400" in found.words
        assert f"over {texts} texts" in found.words
        assert found.words.startswith("warning: ") == (carries is False)
        assert found.words.endswith(UNKNOWN) == (carries is None)


def test_the_second_fit_sees_nothing_of_the_kind(
    model: LoadedModel, data: CalibrationData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole fit is the same without kinds, and the second one is that of the other questions alone."""
    fits = []

    def seen(*given: object) -> object:
        fits.append(real(*given))
        return fits[-1]

    real = measure.fit_candidates
    monkeypatch.setattr(measure, "fit_candidates", seen)
    data = replace(data, contexts=data.contexts[:3])
    answers = SMALL.model_copy(update={"targets": ("answers",)})
    plain = calibrate_probe(model, data, answers)
    pairs = [(one, *one.questions) for one in data.contexts]
    mixed = tuple(
        replace(one, kind="codes", questions=(a, b.model_copy(update={"kind": "chains"}))) for one, a, b in pairs
    )
    both = calibrate_probe(model, replace(data, contexts=mixed), answers)
    assert both.metadata.provenance.settings["left_out"] == "codes"
    for name in ("linear", "recall", "text_loss"):
        np.testing.assert_array_equal(plain.arrays[name], both.arrays[name])
    others = replace(data, contexts=tuple(replace(one, questions=(b,)) for one, _, b in pairs))
    calibrate_probe(model, others, answers)
    _, _, without, alone = fits
    for one, two in zip(without.fits, alone.fits, strict=True):
        assert all(torch.equal(a.linear, b.linear) for a, b in zip(one, two, strict=True))


def test_importance_of_and_without_a_kind(model: LoadedModel, data: CalibrationData) -> None:
    one = data.contexts[0]
    code = one.questions[0].model_copy(update={"kind": "codes"})
    mixed, alone = (replace(one, questions=questions) for questions in ((code, one.questions[1]), (code,)))
    prompts = prompts_of(model, replace(data, contexts=(mixed, alone)))
    builder = QuestionBuilder.of(model, prompts, data.prompt, ("answers", "reconstruction"))
    with torch.no_grad(), running(model.model):
        whole, first = (ContextPass.of(model, each, each, SMALL, builder) for each in prompts)
        assert torch.equal(whole.importance_by_kind["codes"], first.importance_by_kind["codes"])
        others = whole.largest_without("codes")
        assert others is not None and not torch.equal(others, whole.largest)
        assert torch.equal(torch.maximum(others, whole.importance_by_kind["codes"]), whole.largest)


def test_which_kind_is_left_out() -> None:
    """One that is reported on, was fitted on if there is one, and leaves contexts to fit and to choose on."""
    a, b, both = prompt(0, "a"), prompt(1, "b"), prompt(2, "a", "b")
    assert kind_to_leave_out(ContextSplit([a, b], [b], [a])) == "a"
    assert kind_to_leave_out(ContextSplit([a, b], [a], [a])) is None
    assert kind_to_leave_out(ContextSplit([both], [both], [a])) == "a"
    assert kind_to_leave_out(ContextSplit([a, a], [a], [a])) is None
    assert kind_to_leave_out(ContextSplit([a, prompt(3, None)], [prompt(4, None)], [a])) is None
    assert kind_to_leave_out(ContextSplit([a, b], [b], [prompt(5, "c", "c"), a])) == "a"
    assert kind_to_leave_out(ContextSplit([b, a], [both], [prompt(6, "a", "b", "b")])) == "b"
    assert kind_to_leave_out(ContextSplit([b], [b], [prompt(7, "c")])) == "c"


@pytest.mark.parametrize(
    ("kinds", "why"),
    [((None,), "no kinds of questions are named"), (("codes",), "all questions are of one kind")],
)
def test_one_kind_is_said_once(model: LoadedModel, data: CalibrationData, kinds: tuple[str | None], why: str) -> None:
    found = calibrate_probe(model, of_kinds(replace(data, contexts=data.contexts[:3]), *kinds), SMALL)
    assert "kind_text_loss" not in found.arrays
    said = [line for line in RankingView(found).remarks() if UNKNOWN in line]
    assert said == [f"{why}: whether the ranking carries over to other kinds is not known"]
