"""A query bank calibrated end to end on a tiny model, alone and with a probe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvsearch.calibration.options import ProbeOptions, QueryBankOptions
from kvsearch.calibration.probe.bank import draw_asked_places
from kvsearch.calibration.probe.context_pass import ContextPass, Noting, QuestionBuilder, Questions
from kvsearch.calibration.probe.contexts import fit_rankings
from kvsearch.calibration.prompts import encode_prompts
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import find_attention_modules
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile, save_profile
from kvsearch.plan.methods import create_method
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.policies.registry import list_rivals
from kvsearch.report.profile import list_ranking_remarks
from kvsearch.runtime.attention import run_attention
from tests import tiny
from tests.calibrations import calibrate_query_bank

RIVALS = list_rivals()

DATA = tiny.calibration_data(100, 110, 104)
SMALL = QueryBankOptions(bank=7, answers="given")


def test_a_bank_and_how_good_it_is(model: LoadedModel, tmp_path: Path) -> None:
    profile = calibrate_query_bank(model, DATA, SMALL)
    assert profile.arrays["recall"].shape[0] == 1 + len(RIVALS)
    assert str(next(iter(list_ranking_remarks(profile)))) == "fitted on 1 context, chosen on 1, reported on 1"
    assert profile.metadata.provenance.settings["chosen_by"] in ("farthest", "k-means")
    save_profile(profile, tmp_path / "profile.safetensors")
    name, params = parse_policy(f"query_bank={tmp_path}")
    create_policy(name, params).check_model(model.fingerprint)
    with pytest.raises(UsageError, match="has no weights of policy probe: it is a profile of 'query_bank'"):
        parse_policy(f"probe={tmp_path}")


def draw_all(questions: Questions, context: int) -> torch.Tensor:
    return draw_asked_places(questions, context, count=999, seed=0)


def test_queries_are_those_of_the_tokens_at_position_0(model: LoadedModel) -> None:
    """The first layer's queries do not depend on what came before, so they are those of the token at the start."""
    (prompt, *_) = encode_prompts(model, DATA)
    builder = QuestionBuilder(model, [prompt], DATA.prompt, ("answers",))
    ids = torch.cat([after.tokens for after in prompt.continuations], 1)
    with torch.no_grad(), run_attention(model.model):
        found = ContextPass(model, prompt, SMALL, builder, Noting(draw_queries=draw_all)).queries[0]
    module, heads = find_attention_modules(model.model)[0], model.fingerprint.kv_heads
    layer = model.model.model.layers[0]
    with torch.no_grad():
        states = layer.input_layernorm(model.model.model.embed_tokens(ids))
        wanted = module.q_proj(states)[0].unflatten(-1, (heads, -1, found.shape[-1])).permute(1, 2, 0, 3)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)


def test_what_cannot_be_stored() -> None:
    with pytest.raises(IncompatibleError, match="policy query_bank turns queries back to position 0"):
        calibrate_query_bank(tiny.loaded("cohere"), DATA, SMALL)


FITS = {
    "probe": ProbeOptions(entries=100, form="linear", features=("value_norm", "spread"), answer_tokens=2),
    "query_bank": QueryBankOptions(bank=3, answer_tokens=2),
}
TEXTS = tiny.calibration_data(80, 82, 84, 86, 88, questions=1)


def fitted(model: LoadedModel, *names: str) -> list[Profile]:
    calibrations = [
        create_method(name).create_calibration(model, TEXTS, FITS[name].policies(), FITS[name]) for name in names
    ]
    return fit_rankings(calibrations, calibrations[0].prepare())


@pytest.mark.nightly
def test_rankings_that_share_their_passes_are_those_that_have_their_own(model: LoadedModel) -> None:
    together = fitted(model, "probe", "query_bank")
    for name, profile in zip(FITS, together, strict=True):
        (alone,) = fitted(model, name)
        assert alone.metadata == profile.metadata
        for array in alone.arrays:
            np.testing.assert_allclose(profile.arrays[array], alone.arrays[array], rtol=1e-5, atol=2e-5, err_msg=array)
