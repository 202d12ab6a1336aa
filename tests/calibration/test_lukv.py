"""LU-KV calibration end to end on tiny random models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.budgets.convex import sum_prefixes
from kvsearch.calibration.analysis import compute_lost_mass
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.importance import ImportancePass, measure_output_errors
from kvsearch.calibration.lukv import (
    KEPT_POINTS,
    LukvCalibration,
    MeasuredQuestion,
    _solve_mean_table,
    measure_importance,
)
from kvsearch.calibration.options import LukvOptions
from kvsearch.calibration.prompts import CalibrationPrompt, add_own_replies, encode_prompts
from kvsearch.calibration.tables import RatioTables
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime.attention import NAME
from tests import tiny
from tests.calibrations import calibrate_lukv
from tests.combinations import in_turn
from tests.runtime.helpers import assert_close, running

POLICY: Policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
PROTECTED = 6
GRID = np.arange(1, 100) / 100
LAYER = LukvOptions(normalization="layer", answers="given")
GIVEN = LukvOptions(answers="given")
OWN = LukvOptions(answer_tokens=32)


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return tiny.calibration_data(110, 110)


@pytest.fixture(scope="module")
def profile(model: LoadedModel, data: CalibrationData) -> Profile:
    return calibrate_lukv(model, data, POLICY, OWN)


def measured(model: LoadedModel, data: CalibrationData, options: LukvOptions) -> list[MeasuredQuestion]:
    prompts = LukvCalibration(model, data, [POLICY], options).prepare()
    with running(model.model, NAME):
        return list(measure_importance(model, prompts, POLICY, options))


def assert_rows_average_to_their_ratio(table: np.ndarray, length: int, floor: int) -> None:
    heads = table.shape[1] * table.shape[2]
    reachable = np.minimum(GRID, 1 - floor / length)
    assert np.abs(table.mean((1, 2), dtype=np.float64) - reachable).max() <= 0.5 / (heads * length) + 1e-6


@pytest.mark.parametrize(
    ("normalization", "group", "gap"), [("none", "sum", True), ("error", "sum", False), ("layer", "max", False)]
)
def test_every_choice_makes_a_valid_profile(
    model: LoadedModel, data: CalibrationData, normalization: Any, group: Any, gap: bool
) -> None:
    options = LukvOptions(normalization=normalization, group=group, gap=gap, answers="given")
    made = calibrate_lukv(model, data.limit_questions(1), POLICY, options)
    assert_rows_average_to_their_ratio(made.arrays["evicted_ratio"], made.metadata.length, PROTECTED)
    settings = made.metadata.provenance.settings
    assert (settings["normalization"], settings["group"], settings["gap"]) == (normalization, group, gap)
    assert model.model.config._attn_implementation == "sdpa"


def question(head: int, entries: int, length: int) -> MeasuredQuestion:
    """A question that looks at the first entries of one head, of two heads in each of two layers."""
    importance = np.zeros((4, length), dtype=np.float32)
    importance[head, :entries] = 1 / entries
    return MeasuredQuestion(0, importance.reshape(2, 2, length), np.ones(2), np.zeros((0, 2, 2, KEPT_POINTS)))


def test_questions_that_need_different_heads_both_keep_theirs() -> None:
    """The one needs 12 of 100 entries, the other a tenth; layer 1, which nobody looks at, keeps the floor of 1."""
    questions = [question(0, 12, 100), question(1, 5, 50)]
    tables = RatioTables(create_policy("knorm"), 0.01)
    table = _solve_mean_table(questions, tables, GIVEN, [0, 1])
    assert_rows_average_to_their_ratio(table, 100, 1)
    budgets = (1 - table) * 100
    np.testing.assert_allclose(budgets[93], [[12, 10], [1, 1]], atol=1e-4)
    alone = (1 - _solve_mean_table(questions, tables, GIVEN, [1])) * 50  # the second one by itself, as long as it is
    np.testing.assert_allclose(alone[95], [[1, 5], [1, 1]], atol=1e-4)


def test_normalised_mass(model: LoadedModel, data: CalibrationData, profile: Profile) -> None:
    """ "error" gives every question the same mass, "layer" every layer; "none" leaves importance as it is."""
    assert profile.arrays["mass"][..., -1].sum() == pytest.approx(1.0)
    mass = calibrate_lukv(model, data, POLICY, LAYER).arrays["mass"]
    assert mass[..., -1].sum(-1) == pytest.approx(1.0)
    none = LukvOptions(normalization="none", answers="given")
    plain = [item.importance for item in measured(model, data, none)]
    mass = calibrate_lukv(model, data, POLICY, none).arrays["mass"]
    np.testing.assert_allclose(mass[..., -1], np.mean(plain, axis=0).sum(-1), rtol=1e-5)


def test_an_entry_is_worth_the_error_that_it_takes_away(model: LoadedModel, data: CalibrationData) -> None:
    """What is kept is worth the most that was taken away on the way there; an entry that adds to it, nothing."""
    (prompt,) = encode_prompts(model, data.limit_questions(1))
    (item,) = measured(model, data.limit_questions(1), GIVEN)
    with running(model.model, NAME):
        passed = ImportancePass(model.model, [POLICY], prompt.ids)
        ranks = passed.ranks()
        [errors] = next(
            measure_output_errors(passed, prompt.continuations, ranks < PROTECTED, [ranks.argsort(-1)])
        ).numpy()
    assert (np.diff(errors) > 0).any()
    may_go = errors[..., PROTECTED:]
    taken = np.maximum.accumulate(may_go[..., :1] - may_go, axis=-1)
    assert (item.importance[..., :PROTECTED] == 0).all()
    np.testing.assert_allclose(
        sum_prefixes(item.importance)[..., PROTECTED:], taken, rtol=1e-4, atol=1e-6 * errors.max()
    )
    assert item.importance.min() >= 0
    assert item.scale == pytest.approx(may_go[..., 0].sum())


def test_a_model_whose_answers_ignore_the_context(data: CalibrationData) -> None:
    """There are no errors, so there is nothing to tell heads apart and nothing to lose."""
    model = tiny.loaded()
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
    made = calibrate_lukv(model, data, POLICY, OWN)
    assert_rows_average_to_their_ratio(made.arrays["evicted_ratio"], made.metadata.length, PROTECTED)
    assert made.arrays["mass"].max() == 0.0
    assert made.arrays["recall"].min() == 1.0
    assert compute_lost_mass(made, np.full((4, 2), 0.5)).sum() == 0.0


def test_own_replies_are_what_importance_is_for(model: LoadedModel, data: CalibrationData, profile: Profile) -> None:
    """The default: full-attention decoding, here token by token, up to `answer_tokens`."""
    context, pair = data.contexts[0], data.contexts[0].questions[0]
    ids, asked = tiny.ids_of(context.text), tiny.ids_of(pair.question)[:, 1:]
    with torch.no_grad():
        said = torch.cat([ids, asked], 1)
        for _ in range(5):
            said = torch.cat([said, model.model(said).logits[:, -1:].argmax(-1)], 1)
    tokens = said[:, ids.shape[1] :]
    assert tokens.shape[1] == asked.shape[1] + 5
    own = LukvOptions(normalization="none", answer_tokens=5)
    with running(model.model, NAME):
        passed = ImportancePass(model.model, [POLICY], ids)
        expected = passed.ask(tokens)[0].gather(-1, torch.argsort(passed.ranks(), dim=-1))
    np.testing.assert_allclose(measured(model, data, own)[0].importance, expected.numpy(), rtol=1e-5, atol=1e-7)
    given = calibrate_lukv(model, data, POLICY, GIVEN)
    assert given.metadata.provenance.settings["answers"] == "given"
    assert given.to_bytes() != profile.to_bytes()


def test_an_empty_own_reply_is_replaced_by_the_given_answer(data: CalibrationData) -> None:
    model = tiny.loaded()
    model.tokenizer.eos_token = "."
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
        model.model.generation_config.eos_token_id = 0  # of equal logits the first is taken
    prompts = encode_prompts(model, data)
    kept = list(add_own_replies(model, [prompts], 128))
    assert [[one.tokens.tolist() for one in prompt.continuations] for prompt in kept] == [
        [one.tokens.tolist() for one in prompt.continuations] for prompt in prompts
    ]


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
def test_replies_go_on_from_a_pass_as_they_do_from_a_reading_of_their_own(family: str, data: CalibrationData) -> None:
    """Contexts of different lengths, several questions of each."""
    model = tiny.loaded(family)
    prompts = encode_prompts(model, data)
    passes: list[int] = []

    def read(prompt: CalibrationPrompt) -> ImportancePass:
        passes.append(prompt.context)
        return ImportancePass(model.model, [POLICY], prompt.ids)

    alone = add_own_replies(model, [prompts], 20)
    continued = add_own_replies(model, [prompts], 20, read=read)
    for one, other in zip(alone, continued, strict=True):
        assert [after.tokens.tolist() for after in one.continuations] == [
            after.tokens.tolist() for after in other.continuations
        ]
    assert passes == [0, 1]


def test_questions_are_rows_of_one_pass_with_the_same_errors(model: LoadedModel, data: CalibrationData) -> None:
    (prompt,) = encode_prompts(model, data.limit_questions(1))
    short, long = (replace(prompt.continuations[0], tokens=prompt.ids[:, 5 : 5 + count]) for count in (6, 11))
    with running(model.model, NAME):
        passed = ImportancePass(model.model, [POLICY], prompt.ids)
        ranks = passed.ranks()
        rest = (ranks < PROTECTED, [ranks.argsort(-1), ranks.argsort(-1).flip(-1)])
        together = list(measure_output_errors(passed, [short, long], *rest))
        for after, errors in zip((short, long), together, strict=True):
            assert_close(errors, next(measure_output_errors(passed, [after], *rest)))


def test_sliding_layers_are_left_alone(data: CalibrationData) -> None:
    made = calibrate_lukv(tiny.loaded("gemma2"), data.limit_questions(2), POLICY, OWN)
    assert made.metadata.layers == (1, 3)
    assert made.arrays["evicted_ratio"].shape == (99, 2, 2)


@in_turn(where=["model.layers.1.mlp.down_proj", "lm_head"], normalization=["error", "layer"])
def test_a_model_that_computes_nan(where: str, normalization: Any, data: CalibrationData) -> None:
    model = tiny.loaded()
    with torch.no_grad():
        model.model.get_submodule(where).weight[0] = float("nan")
    with pytest.raises(IncompatibleError, match="tiny: the model computes NaN on calibration context 0"):
        calibrate_lukv(model, data, POLICY, LukvOptions(normalization=normalization))
    assert model.model.config._attn_implementation == "sdpa"


def test_rivals_rank_the_same_importance_in_the_same_pass(
    model: LoadedModel, data: CalibrationData, profile: Profile
) -> None:
    rivals = [create_policy("keydiff", {"sinks": 2, "window": 4}), create_policy("knorm", {"sinks": 2, "window": 4})]
    several = calibrate_lukv(model, data, POLICY, OWN, compared_policies=rivals)
    assert several.metadata.policies == (POLICY.spec, *(rival.spec for rival in rivals))
    kept = several.arrays["kept"]
    assert kept.shape == (3, 4, 2, KEPT_POINTS)
    assert kept[:, :, :, -1] == pytest.approx(np.broadcast_to(kept[0, :, :, -1], (3, 4, 2)), rel=1e-5)
    assert kept[0, :, :, ::4] == pytest.approx(several.arrays["mass"], rel=1e-4, abs=1e-6)
    assert {name for name in several.arrays if name != "kept"} == set(profile.arrays)
    assert all((several.arrays[name] == array).all() for name, array in profile.arrays.items())


@pytest.mark.parametrize(
    ("rivals", "problem"),
    [
        (("keydiff", "keydiff"), "keydiff is measured already"),
        (("full",), "evicts nothing"),
        (("kediff",), "did you mean 'keydiff'"),
        (("tova",), "tova cannot keep the 4 first and 32 last entries that snapkv always keeps"),
    ],
)
def test_rivals_are_other_policies(rivals: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        LukvOptions(rivals=rivals).policies()
