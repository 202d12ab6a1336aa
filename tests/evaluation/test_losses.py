"""Layer attention output losses of plans: against the models' own modules, the real cache, and LAVa's bound."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvsearch.budgets.dynamic import create_allocation
from kvsearch.core.errors import IncompatibleError
from kvsearch.evaluation.losses import QueryLosses, make_layer_rules, measure_losses, measure_query_losses
from kvsearch.evaluation.samples import LayerLoss
from kvsearch.models.architecture import describe, find_attention_modules
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import PROTOCOLS, QUESTION_AGNOSTIC
from kvsearch.policies.random import RandomEviction
from kvsearch.report.evaluation import average_over_tasks, make_losses_table
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.eviction import collect_needs
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.stock import CACHE
from tests import tiny
from tests.combinations import in_turn
from tests.evaluation.results import rendered
from tests.families import build, prompts
from tests.runtime.helpers import columns, feed, one_by_one, running
from tests.runtime.policies import SMALL

LENGTH, COUNT = 40, 7  # tokens of a context, and of what follows
SNAPKV = "snapkv{'window': 4, 'kernel': 3, 'sinks': 1}"
LAVA = "lava{'window': 3, 'kernel': 3}"
METHODS = ["random", "snapkv", "lava", "adakv", "h2o, decode", "snapkv, decode", "cake, decode"]
MERGING = ["cam", "d2o", "d2o, prompt only", "cam, decode only"]


def program(model: Any, method: str, budget: int = 11) -> Program:
    """A program of `budget` entries per head in every layer."""

    def of(name: str, allocation: str = "static", phases: str = "prefill") -> Program:
        made = Program.uniform(model, SMALL[name], lambda _: budget).prefill
        prefill, decode = made if "prefill" in phases else None, made if "decode" in phases else None
        return Program(prefill, decode, create_allocation(allocation))

    both = "prefill and decode"
    if method == "random":
        return Program.uniform(model, RandomEviction(3), lambda _: budget)
    return {
        "snapkv": lambda: of(SNAPKV),
        "lava": lambda: of(LAVA, "lava"),
        "adakv": lambda: of(SNAPKV, "adakv"),
        "h2o, decode": lambda: of("h2o", phases=both),
        "snapkv, decode": lambda: of(SNAPKV, phases=both),
        "cake, decode": lambda: of("cake{'window': 3, 'kernel': 3}", "cake", both),
        "tova, decode only": lambda: of("tova", phases="decode"),
        "cam": lambda: of("cam{'sinks': 1, 'merge_next': 2}", phases=both),
        "cam, decode only": lambda: of("cam{'base': 'h2o', 'expectation': True}", phases="decode"),
        "cam, prompt only": lambda: of("cam{'sinks': 1, 'merge_next': 2}"),
        "d2o": lambda: of("d2o{'sinks': 1}", phases=both),
        "d2o, prompt only": lambda: of("d2o{'sinks': 1}"),
    }[method]()


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A context and what follows it."""
    ids, _ = prompts(1, LENGTH + COUNT, seed=seed)
    return ids[:, :LENGTH], ids[:, LENGTH:]


@torch.no_grad()
def losses_of(model: Any, plan: Program, context: Tensor, following: Tensor) -> dict[int, QueryLosses]:
    """Losses of single queries by layer."""
    with running(model, NAME):
        rules = make_layer_rules(model, plan, context)
        needs = {layer: collect_needs(*here) for layer, here in rules.items()}
        passed = DensePass(model, needs, lambda prompt: prompt, context)
        with passed.following(following):
            return {layer.index: measure_query_losses(layer, rules[layer.index]) for layer in passed.continuations()}


@torch.no_grad()
def brute_force(model: Any, kept: dict[int, Tensor], context: Tensor, following: Tensor) -> dict[int, Tensor]:
    """|y - yhat|_1 [K] by layer from the model's own eager modules, with -inf on what is not `kept` [Hkv, T]."""
    calls: dict[int, dict[str, Any]] = {}

    def note(module: Any, _: Any, given: dict[str, Any]) -> None:
        calls[module.layer_idx] = given

    modules, found = find_attention_modules(model), {}
    with running(model, "eager"):
        cache = DynamicCache(config=model.config)
        model(context, past_key_values=cache)
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules.values()]
        model(following, past_key_values=copy.deepcopy(cache))
        for hook in hooks:
            hook.remove()
        for layer, shown in kept.items():
            hidden = (~shown).repeat_interleave(model.config.num_attention_heads // len(shown), 0)[:, None]
            causal = torch.full((COUNT, LENGTH + COUNT), float("-inf")).triu(LENGTH + 1)
            evicted = causal.expand(len(hidden), -1, -1).clone()
            evicted[:, :, :LENGTH].masked_fill_(hidden, float("-inf"))
            outputs = [
                modules[layer](
                    **{**calls[layer], "attention_mask": mask, CACHE: copy.deepcopy(cache)},
                )[0]
                for mask in (causal[None, None], evicted[None])
            ]
            found[layer] = (outputs[0] - outputs[1])[0].abs().sum(-1)
    return found


@torch.no_grad()
def held(model: Any, plan: Program, context: Tensor) -> dict[int, Tensor]:
    """What the real cache holds of the context, [Hkv, T] bool by layer."""
    cache = PlanCache(model, plan)
    with running(model, NAME):
        model(context, past_key_values=cache)
    kept = columns(cache, torch.ones_like(context), describe(model).kv_heads, context.shape[1])
    return {layer: shown[0] for layer, shown in kept.items()}


@in_turn(method=["random", "snapkv", "lava", "adakv"], family=["llama", "gemma2", "gemma3", "phi3"])
def test_losses_are_those_of_masked_eager_attention(method: str, family: str) -> None:
    model = build(family)
    context, following = tokens()
    plan = program(model, method)
    expected = brute_force(model, held(model, plan, context), context, following)
    found = losses_of(model, plan, context, following)
    assert list(found) == list(expected) == list(describe(model).full_layers)
    for layer, losses in found.items():
        torch.testing.assert_close(losses["loss"], expected[layer], atol=1e-4, rtol=1e-4)
        assert losses["loss"].min() > 1e-3


@torch.no_grad()
def outputs_of(model: Any, cache: Any, context: Tensor, following: Tensor, layer: int) -> Tensor:
    """What one layer puts out for tokens that come one by one, [K, d_model]."""
    noted: list[Tensor] = []
    projection: Any = find_attention_modules(model)[layer].o_proj
    hook = projection.register_forward_hook(lambda _, __, output: noted.append(output[0]))
    with running(model, NAME):
        feed(model, cache, [(context, torch.ones_like(context)), *one_by_one(following)])
    hook.remove()
    return torch.cat(noted[1:])


@in_turn(method=[*METHODS, *MERGING, "tova, decode only"], family=["llama", "gemma2", "gemma3", "qwen3"])
def test_losses_are_those_of_the_real_cache_in_the_first_layer(method: str, family: str) -> None:
    """What the first governed layer reads is the same under every plan."""
    model = build(family)
    layer = describe(model).full_layers[0]
    plan = program(model, method)
    context, following = tokens(1)
    full = outputs_of(model, DynamicCache(config=model.config), context, following, layer)
    planned = outputs_of(model, PlanCache(model, plan), context, following, layer)
    expected = (full - planned).abs().sum(-1)
    losses = losses_of(model, plan, context, following)[layer]
    torch.testing.assert_close(losses["loss"], expected, atol=2e-4, rtol=1e-4)
    assert losses["loss"][1:].min() > 1e-3
    assert ("bound" not in losses) == (method in MERGING)


@in_turn(method=METHODS, family=["llama", "gemma2", "gemma3"])
def test_the_bound_holds_for_every_layer_and_query(method: str, family: str) -> None:
    model = build(family)
    for seed, budget in [(0, 3), (1, 11)]:
        for losses in losses_of(model, program(model, method, budget), *tokens(seed)).values():
            assert (losses["loss"] <= losses["bound_by_head"] * (1 + 1e-4)).all()
            assert (losses["bound_by_head"] <= losses["bound"] * (1 + 1e-5)).all()
            assert (losses["evicted_mass"] >= 0).all()
            assert (losses["evicted_mass"] <= 1 + 1e-6).all()
            assert losses["evicted_mass"].max() > 0


@pytest.mark.parametrize("method", [*METHODS, "tova, decode only", "cam, prompt only"])
def test_budgets_above_the_length_lose_nothing(method: str) -> None:
    model = build("llama")
    budget = 10**4 if method == "cake, decode" else LENGTH + COUNT  # layers share it, some get less
    for losses in losses_of(model, program(model, method, budget), *tokens()).values():
        for values in losses.values():
            assert values.tolist() == [0.0] * COUNT


TASK = tiny.listed((60, 3), (48, 1), name="one")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded("gemma3")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_means_over_the_tokens_that_follow(protocol: Any, model: LoadedModel) -> None:
    plan = program(model.model, "snapkv")
    expected: dict[int, list[Tensor]] = {}
    for example in TASK.rows:
        context = tiny.ids_of(example.context)
        for query in example.queries:
            question, answer = tiny.ids_of(query.question)[:, 1:], tiny.ids_of(query.answers[0])[:, 1:]
            answer = answer[:, : query.max_new_tokens]
            if protocol == QUESTION_AGNOSTIC:
                parts = context, torch.cat([question, answer], 1)
            else:
                parts = torch.cat([context, question], 1), answer
            for layer, losses in losses_of(model.model, plan, *parts).items():
                expected.setdefault(layer, []).append(losses["loss"])
    rows = measure_losses(model, {"snapkv": plan}, [TASK], 2, protocol=protocol)
    assert [row.layer for row in rows] == list(expected)
    for row in rows:
        losses = torch.cat(expected[row.layer])
        assert row.queries == len(losses)
        assert row.loss == pytest.approx(losses.mean().item(), rel=1e-4)


def test_a_model_that_computes_nan() -> None:
    model = tiny.loaded()
    with torch.no_grad():
        model.model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    plan = {"random": program(model.model, "random")}
    with pytest.raises(IncompatibleError, match=r"task one, example 0, question 0, method random: .* layer 2 is NaN"):
        measure_losses(model, plan, [TASK], 1, answers="given")
    with pytest.raises(IncompatibleError, match=r"task one, example 0: the model emits NaN"):
        measure_losses(model, plan, [TASK], 1)


ROWS = [
    LayerLoss("one", "mine", 0, 10, 2.0, 0.25, 8.0, 4.0),
    LayerLoss("one", "merged", 0, 10, 1.0, 0.25, None, None),
    LayerLoss("one", "mine", 3, 10, 120.0, 0.5, 480.0, 360.0),
    LayerLoss("two", "mine", 0, 30, 4.0, 0.75, 16.0, 8.0),
]


def test_every_task_weighs_the_same_in_the_table() -> None:
    assert [(row.layer, row.method) for row in average_over_tasks(ROWS)] == [(0, "mine"), (0, "merged"), (3, "mine")]
    assert average_over_tasks(ROWS)[0] == LayerLoss("one, two", "mine", 0, 40, 3.0, 0.5, 12.0, 6.0)
    assert average_over_tasks(ROWS)[1:] == ROWS[1:3]
    text = rendered([make_losses_table("tiny", QUESTION_AGNOSTIC, ROWS)])
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "mine", "3", "12", "6", "0.250", "0.5000"] in lines
    assert ["0", "merged", "1", "-", "-", "-", "0.2500"] in lines
