"""A ranking calibrated end to end on a tiny model, and its parts."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import TARGETS, ProbeOptions
from kvsearch.calibration.probe.context_pass import (
    CHUNK,
    JUDGED_SHARES,
    REPORTED_RIVALS,
    ContextPass,
    QuestionBuilder,
    compute_recall,
)
from kvsearch.calibration.prompts import CalibrationPrompt, encode_prompts
from kvsearch.core.errors import UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile, save_profile
from kvsearch.policies.fitted import GOLDEN_RATIO, is_last, parse_policy
from kvsearch.policies.probe import Coefficients, Weights
from kvsearch.policies.registry import list_rivals
from kvsearch.report.profile import TextLosses, list_ranking_remarks
from kvsearch.runtime.attention import run_attention
from tests import tiny
from tests.calibrations import calibrate_probe

RIVALS = list_rivals()

SMALL = ProbeOptions(entries=200, form="linear", answer_tokens=8)


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return tiny.calibration_data(120, 110, 100, 130, 90, 120)


def test_what_memory_does_not_hold_is_read_again_and_says_the_same(
    model: LoadedModel, data: CalibrationData, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.calibration.probe.contexts.find_default_memory", lambda _: 0)
    again = calibrate_probe(model, data, SMALL)
    assert again.arrays.keys() == profile.arrays.keys()
    for name, array in profile.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)


@pytest.fixture(scope="module")
def profile(model: LoadedModel, data: CalibrationData) -> Profile:
    return calibrate_probe(model, data, SMALL)


def test_a_fit_is_reported_beside_the_rankings_that_recall_most(profile: Profile) -> None:
    recall = profile.arrays["recall"]
    assert recall.shape[:2] == (1 + len(RIVALS), len(JUDGED_SHARES))
    assert ((recall > 0) & (recall <= 1 + 1e-6)).all()
    assert profile.metadata.provenance.settings["contexts"] == (4, 1, 1)
    judged = profile.metadata.provenance.settings["judged"]
    assert profile.arrays["text_loss"].shape == (1, len(judged), len(JUDGED_SHARES))
    recalled = dict(zip(RIVALS, recall[1:].mean((1, 2, 3)), strict=True))
    assert judged == (
        "probe",
        *sorted(sorted(RIVALS, key=recalled.__getitem__)[-REPORTED_RIVALS:], key=RIVALS.index),
    )
    fit, *others = profile.arrays["text_loss"][0, :, 1]
    is_doubtful = all(other < fit for other in others)
    assert len(profile.arrays["middle_loss"]) == (1 + len(RIVALS) if is_doubtful else len(judged))
    assert next(list_ranking_remarks(profile)) == "fitted on 4 contexts, chosen on 1, reported on 1"


@pytest.mark.nightly
def test_all_are_compared_where_that_is_asked_for(model: LoadedModel, data: CalibrationData, profile: Profile) -> None:
    """Those that lose least are reported, and what is fitted is the same."""
    found = calibrate_probe(model, data, SMALL.model_copy(update={"compare": "all"}))
    judged = found.metadata.provenance.settings["judged"]
    middle = dict(zip(("probe", *RIVALS), found.arrays["middle_loss"].tolist(), strict=True))
    assert set(judged[1:]) == set(sorted(RIVALS, key=middle.__getitem__)[:REPORTED_RIVALS])
    np.testing.assert_allclose(found.arrays["text_loss"][0, :, 1], [middle[name] for name in judged], rtol=1e-5)
    assert is_last(found.arrays) == is_last(profile.arrays)
    for name in {*profile.arrays} - {"text_loss", "middle_loss"}:
        np.testing.assert_array_equal(found.arrays[name], profile.arrays[name])


def with_losses(profile: Profile, texts: int, fit: float, other: float = 1) -> Profile:
    """The profile with these losses on so many texts: of the fit, and of the first of the others, which have 1."""
    values = np.ones((texts, 1 + REPORTED_RIVALS, len(JUDGED_SHARES)), np.float32)
    values[:, 0] = fit
    values[:, 1] = other
    middle = np.append(values[..., 1].mean(0), np.ones(len(RIVALS) - REPORTED_RIVALS))
    return Profile(profile.metadata, {**profile.arrays, "text_loss": values, "middle_loss": middle})


@pytest.mark.parametrize(
    ("texts", "fit", "other", "is_better"),
    [(5, 0.5, 1, True), (4, 0.5, 1, None), (6, 0.5, 0.2, False), (5, 0.5, 0.5, None)],
)
def test_headlines_hold_at_every_size_beyond_chance(
    profile: Profile, texts: int, fit: float, other: float, is_better: bool | None
) -> None:
    """One is said where the fit is better, or worse, than the best other ranking at all sizes."""
    made = with_losses(profile, texts, fit, other)
    losses = TextLosses(made)
    assert losses.is_better is is_better
    headlines = [line for line in list_ranking_remarks(made) if "ranks better than" in line]
    assert len(headlines) == (is_better is not None)
    assert all(losses.words in line and f"over {texts} texts" in line for line in headlines)
    for size in range(len(JUDGED_SHARES)):
        values = made.arrays["text_loss"].copy()
        values[..., size] = 1
        assert TextLosses(Profile(made.metadata, {**made.arrays, "text_loss": values})).is_better is None


def test_a_fit_that_loses_says_so(profile: Profile, tmp_path: Path) -> None:
    last = with_losses(profile, texts=1, fit=2)
    assert is_last(last.arrays)
    assert "every other ranking is better" in list(list_ranking_remarks(last))[-1]
    save_profile(last, tmp_path / "profile.safetensors")
    with pytest.raises(UsageError, match="every built-in ranking is better than this fit: fit on more"):
        parse_policy(f"probe={tmp_path}")


def test_a_fit_for_another_version_of_the_policy_is_refused(profile: Profile, tmp_path: Path) -> None:
    content = profile.metadata.model_dump()
    assert content["provenance"]["settings"]["policy_version"] == 1
    content["provenance"]["settings"]["policy_version"] = 2
    metadata = type(profile.metadata).model_validate(content)
    save_profile(Profile(metadata, dict(profile.arrays)), tmp_path / "profile.safetensors")
    with pytest.raises(UsageError, match="has weights for version 2 of policy probe, and this is version 1: fit it ag"):
        parse_policy(f"probe={tmp_path}")


def test_recall_is_a_share_of_the_oracle() -> None:
    """Of 10 entries, 5% and 10% are one entry, 20% are two."""
    values = [8.0, 4.0, 2.0, 1.0] + [0.0] * 6
    importance = torch.tensor(values)
    for order in permutations(range(4)):
        first, second = (values[place] for place in order[:2])
        found = compute_recall(importance, [torch.tensor([*order, *range(4, 10)])])
        assert found.tolist() == [pytest.approx([first / 8, first / 8, (first + second) / 12])]
    assert compute_recall(torch.zeros(10), [torch.arange(10)]).tolist() == [[1, 1, 1]]


def test_heads_errors_are_those_of_masked_attention(model: LoadedModel, data: CalibrationData) -> None:
    """Nothing is lost where all stays; a head's error is how far W_O of its softmax over what is left moves."""
    prompts = encode_prompts(model, data)[:1]
    builder = QuestionBuilder(model, prompts, data.prompt, ("answers",))
    with torch.no_grad(), run_attention(model.model):
        one = ContextPass(model, prompts[0], SMALL, builder)
        every = torch.ones(4, 2, one.prompt.length, dtype=torch.bool)
        some = every.clone()
        some[:, :, 5:60:2] = False
        errors = one.measure_head_errors("answers", [every, some])
        assert float(errors[:, 0].max()) == 0
        with one.importance_pass.following(one.questions["answers"][0].tokens):
            layer = list(one.importance_pass.continuations())[1]
            group = layer.query.shape[1] // 2
            rows = layer.query.shape[2]
            logits = layer.query[0] @ layer.keys[0].repeat_interleave(group, 0).transpose(1, 2) * layer.logits.scaling
            later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(logits.shape[-1] - rows + 1)
            hidden = torch.cat([~some[1], torch.zeros(2, rows, dtype=torch.bool)], 1).repeat_interleave(group, 0)
            values = layer.values[0].repeat_interleave(group, 0)
            outputs = [
                logits.masked_fill(later | gone, float("-inf")).softmax(-1) @ values
                for gone in (torch.tensor(False), hidden[:, None])
            ]
            moved = torch.einsum("qkd,qdm->qkm", outputs[1] - outputs[0], layer.output_weight)
        unmoved = one.measure_losses([every])
        wanted = moved.unflatten(0, (2, group)).sum(1).square().sum(-1).mean(-1)
    torch.testing.assert_close(errors[0, 1, 1], wanted, rtol=1e-3, atol=1e-6)
    assert float(unmoved.max()) == pytest.approx(0, abs=1e-5)


def test_contexts_without_questions_are_asked_for_themselves(model: LoadedModel, data: CalibrationData) -> None:
    """Of none with questions nothing but reconstruction is asked; what has some keeps them."""
    bare = replace(data, contexts=tuple(replace(one, questions=()) for one in data.contexts[:3]))
    found = calibrate_probe(model, bare, SMALL)
    assert found.metadata.provenance.settings["targets"] == ("reconstruction",)
    assert found.metadata.provenance.contexts.fitted.ids
    assert np.isfinite(found.arrays["text_loss"]).all()
    told = [line for line in list_ranking_remarks(found) if "no questions" in line]
    assert told == ["the contexts have no questions, and are asked for themselves alone (reconstruction)"]
    mixed = replace(data, contexts=(*bare.contexts[:1], *data.contexts[1:3]))
    found = calibrate_probe(model, mixed, SMALL)
    assert found.metadata.provenance.settings["targets"] == ("answers", "reconstruction")
    assert "1 of the 3 contexts have no questions" in "".join(list_ranking_remarks(found))
    with pytest.raises(UsageError, match="1 of 3 contexts have no questions, and only --targets reconstruction"):
        calibrate_probe(model, mixed, SMALL.model_copy(update={"targets": ("answers",)}))


def test_advice_for_long_contexts_without_questions_works(model: LoadedModel, data: CalibrationData) -> None:
    bare = CalibrationPrompt(torch.ones(1, describe(model.model).max_positions or 0, dtype=torch.long), 0, 0, ())
    with pytest.raises(UsageError, match=r"give --max-length \d+$") as refused:
        QuestionBuilder(model, [bare], data.prompt, TARGETS)
    shorter = replace(bare, ids=bare.ids[:, : int(str(refused.value).split()[-1])])
    assert QuestionBuilder(model, [shorter], data.prompt, TARGETS).chunk == CHUNK


def test_heads_that_nothing_looks_at_are_ranked_evenly_and_last(data: CalibrationData) -> None:
    """W_O drops one kv head: it gets an even spread, although that is no feature, below all of another head."""
    loaded = replace(tiny.loaded(), model=deepcopy(tiny.loaded().model))
    projection = loaded.model.model.layers[1].self_attn.o_proj.weight
    with torch.no_grad():
        projection[:, projection.shape[1] // 2 :] = 0
    some = replace(data, contexts=tuple(replace(one, questions=()) for one in data.contexts[:3]))
    found = calibrate_probe(loaded, some, SMALL.model_copy(update={"features": ("value_norm",)}))
    assert found.metadata.provenance.settings["unseen_heads"] == ("1.1",)
    assert found.metadata.provenance.settings["features"] == ("value_norm", "spread")
    told = [line for line in list_ranking_remarks(found) if line.startswith("nothing that was asked")]
    assert told == ["nothing that was asked looks at the context in 1 kv head (1.1 by layer): even ranking there"]
    arrays = Coefficients(*(torch.from_numpy(found.arrays[name].copy()) for name in Coefficients._fields))
    x = torch.stack([torch.randn(50), (torch.arange(50) * GOLDEN_RATIO).frac()], 1)
    score = Weights(("value_norm", "spread"), (0, 1, 2, 3), arrays).log_importance(x.expand(1, 2, 50, 2), 1)[0].exp()
    assert score[1].argsort().tolist() == x[:, 1].argsort().tolist()
    assert float(score[1].max()) < float(score[0].min())
