"""LU-KV calibration end to end on tiny random models."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from kvsearch.budgets.convex import sum_prefixes
from kvsearch.budgets.lukv import MarginalSolver, solve_grid
from kvsearch.calibration.analysis import compute_lost_mass
from kvsearch.calibration.data import CalibrationData, Context, Pair
from kvsearch.calibration.importance import ImportancePass, measure_output_errors
from kvsearch.calibration.lukv import (
    KEPT_POINTS,
    LukvCalibration,
    MeasuredQuestion,
    _solve_mean_table,
    measure_importance,
)
from kvsearch.calibration.options import LukvOptions, Normalization
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


def length_of(data: CalibrationData, index: int = 0) -> int:
    return len(data.contexts[index].text.split()) + 1  # <bos>


def assert_rows_average_to_their_ratio(table: np.ndarray, length: int, floor: int) -> None:
    heads = table.shape[1] * table.shape[2]
    reachable = np.minimum(GRID, 1 - floor / length)
    assert np.abs(table.mean((1, 2), dtype=np.float64) - reachable).max() <= 0.5 / (heads * length) + 1e-6


def test_what_a_profile_holds(profile: Profile, data: CalibrationData) -> None:
    layers, heads, questions = 4, 2, 4
    shapes = {name: array.shape for name, array in profile.arrays.items()}
    assert shapes == {
        "evicted_ratio": (99, layers, heads),
        "question_ratio": (questions, 9, layers, heads),
        "question_context": (questions,),
        "recall": (layers, heads, 101),
        "oracle_recall": (layers, heads, 101),
        "mass": (layers, heads, 101),
    }
    assert profile.arrays["question_context"].tolist() == [0, 0, 1, 1]
    metadata = profile.metadata
    assert (metadata.method, metadata.policy.name, metadata.policy.params) == ("lukv", "snapkv", POLICY.parameters())
    assert (metadata.length, metadata.questions, metadata.floor) == (length_of(data), questions, PROTECTED)
    assert metadata.layers == (0, 1, 2, 3)
    assert metadata.provenance.data_sha256 == data.sha256
    assert metadata.provenance.settings["normalization"] == "error"
    assert "seed" not in metadata.provenance.settings


CHOICES = [
    *product(get_args(Normalization), ["sum"], [True]),
    ("error", "sum", False),
    ("layer", "max", False),
]


@pytest.mark.parametrize(("normalization", "group", "gap"), CHOICES)
def test_every_choice_makes_a_valid_profile(
    model: LoadedModel, data: CalibrationData, normalization: Any, group: Any, gap: bool
) -> None:
    options = LukvOptions(normalization=normalization, group=group, gap=gap, answers="given")
    made = calibrate_lukv(model, data, POLICY, options)
    assert_rows_average_to_their_ratio(made.arrays["evicted_ratio"], made.metadata.length, PROTECTED)
    settings = made.metadata.provenance.settings
    assert (settings["normalization"], settings["group"], settings["gap"]) == (normalization, group, gap)
    assert model.model.config._attn_implementation == "sdpa"


def test_errors_of_query_heads_add_up() -> None:
    with pytest.raises(ValidationError, match="group"):
        LukvOptions(group="max")


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


def test_the_ablation_of_the_gap_leaves_protected_entries_in_front(model: LoadedModel, data: CalibrationData) -> None:
    options = LukvOptions(normalization="none", gap=False, minimum=0.0, answers="given")
    one = data.limit_questions(1)
    (item,) = measured(model, one, options)
    fixed, ranked = item.importance[..., :PROTECTED], item.importance[..., PROTECTED:]
    assumed = np.concatenate([fixed, -np.sort(-ranked, axis=-1)], -1)
    expected = solve_grid(MarginalSolver(assumed, PROTECTED))
    assert np.array_equal(calibrate_lukv(model, one, POLICY, options).arrays["evicted_ratio"], expected)
    everything = solve_grid(MarginalSolver(-np.sort(-item.importance, axis=-1), PROTECTED))
    assert not np.array_equal(everything, expected)


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


def test_importance_comes_in_the_order_of_the_ranking(model: LoadedModel, data: CalibrationData) -> None:
    """Protected entries first, in the order of protection; nothing is lost or counted twice."""
    pair, ids = data.contexts[0].questions[0], tiny.ids_of(data.contexts[0].text)
    tokens = torch.cat([tiny.ids_of(pair.question)[:, 1:], tiny.ids_of(pair.answer)[:, 1:]], 1)
    with running(model.model, NAME):
        passed = ImportancePass(model.model, [POLICY], ids)
        plain, ranks = passed.ask(tokens)[0], passed.ranks()
    ranked = torch.from_numpy(measured(model, data, LAYER)[0].importance)
    last = ids.shape[1] - 1
    order = [last, 0, 1, last - 1, last - 2, last - 3]  # newest, sinks, window
    assert torch.equal(ranked[..., :PROTECTED], plain[..., order])
    assert torch.equal(ranked.gather(-1, ranks.long()), plain)


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
    assert own.settings()["answers"] == "own"
    given = calibrate_lukv(model, data, POLICY, GIVEN)
    assert given.metadata.provenance.settings["answers"] == "given"
    assert given.to_bytes() != profile.to_bytes()


def test_an_own_reply_fills_the_positions_that_are_left(data: CalibrationData) -> None:
    model = tiny.loaded(max_position_embeddings=length_of(data) + 3 + 9)
    [prompt] = add_own_replies(model, [encode_prompts(model, data.limit_questions(1))], 128)
    (after,) = prompt.continuations
    assert (after.answer, after.tokens.shape[1]) == (3, 3 + 9)


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


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3", "qwen3_5"))]
)
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


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3", (0, 1, 2, 3)),
        pytest.param("gemma2", (1, 3), marks=pytest.mark.nightly),
        pytest.param("gemma3", (1, 3), marks=pytest.mark.nightly),
    ],
)
def test_other_families(family: str, layers: tuple[int, ...], data: CalibrationData) -> None:
    made = calibrate_lukv(tiny.loaded(family), data.limit_questions(2), POLICY, OWN)
    assert made.metadata.layers == layers
    assert made.arrays["evicted_ratio"].shape == (99, len(layers), 2)


def refusal(model: LoadedModel, data: CalibrationData, policy: Policy = POLICY, options: Any = None) -> str:
    """The message of a refusal that comes before the model has read anything."""
    calls: list[int] = []
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UsageError) as caught:
            calibrate_lukv(model, data, policy, options)
    finally:
        handle.remove()
    assert not calls
    assert model.model.config._attn_implementation == "sdpa"
    return str(caught.value)


def test_a_context_too_short_for_the_protected_entries(model: LoadedModel) -> None:
    data = tiny.calibration_data(110, 70)  # the second one is the problem
    policy = create_policy("snapkv", {"sinks": 4})
    message = refusal(model, data, policy)
    assert f"{length_of(data, 1)} tokens is too short for snapkv: 36 entries are always kept" in message
    assert "give at least 144 tokens" in message


def test_an_answer_without_a_token(model: LoadedModel, data: CalibrationData) -> None:
    blank = Context(data.contexts[0].text, (Pair.model_construct(question="? vote", answer=" "),))
    broken = CalibrationData("x", " {question}", (*data.contexts, blank), data.sha256)
    assert "the answer ' ' is empty" in refusal(model, broken)


@in_turn(
    where=["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj", "lm_head"],
    normalization=["error", "layer"],
)
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
    assert kept[..., 0].tolist() == np.zeros((3, 4, 2)).tolist()
    assert kept[:, :, :, -1] == pytest.approx(np.broadcast_to(kept[0, :, :, -1], (3, 4, 2)), rel=1e-5)
    assert kept[0, :, :, ::4] == pytest.approx(several.arrays["mass"], rel=1e-4, abs=1e-6)
    assert {name for name in several.arrays if name != "kept"} == set(profile.arrays)
    assert all((several.arrays[name] == array).all() for name, array in profile.arrays.items())


def test_rivals_protect_what_the_policy_does() -> None:
    options = LukvOptions(params={"window": 8}, rivals=("keydiff", "expected_attention", "h2o", "cake"))
    assert {(policy.sink_count, policy.recent_count) for policy in options.policies()} == {(4, 8)}


def test_rivals_are_measured_as_they_would_be_alone(model: LoadedModel, data: CalibrationData) -> None:
    rival = create_policy("keydiff", {"sinks": 2, "window": 4})
    several = calibrate_lukv(model, data, POLICY, LAYER, compared_policies=[rival])
    alone = calibrate_lukv(model, data, rival, LAYER)
    assert several.arrays["kept"][1, :, :, ::4] == pytest.approx(alone.arrays["mass"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("rivals", "problem"),
    [
        (("snapkv",), "snapkv is measured already"),
        (("keydiff", "keydiff"), "keydiff is measured already"),
        (("full",), "evicts nothing"),
        (("kediff",), "did you mean 'keydiff'"),
        (("tova",), "tova cannot keep the 4 first and 32 last entries that snapkv always keeps"),
    ],
)
def test_rivals_are_other_policies(rivals: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        LukvOptions(rivals=rivals).policies()
