"""Perplexity under plans: against plain models, the -inf mask reference and decoding token by token."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.evaluation import perplexity
from kvsearch.evaluation.perplexity import measure_perplexity
from kvsearch.evaluation.samples import Footprint, WindowLoss
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import create_policy
from kvsearch.report.scores import perplexity_table
from kvsearch.report.screen import on_screen
from kvsearch.results.evaluation import PerplexityResult
from kvsearch.runs.estimates import Estimate
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from kvsearch.strategies.compared import equal_uniform
from kvsearch.tasks.windows import PerplexityText
from tests import tiny
from tests.examples import at_most
from tests.families import EACH_FAMILY
from tests.runtime.helpers import feed, one_by_one, random_eviction, reference, running

CONTEXT, CONTINUATION, LEAD = 40, 12, 1
WORDS = [word for seed in range(6) for word in tiny.document(60, seed).words[1:]][:220]  # a token each
TEXT = PerplexityText("story", " ".join(WORDS))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded()


def measure(model: LoadedModel, programs: Mapping[str, Program], text: PerplexityText = TEXT, **options: Any) -> Any:
    return measure_perplexity(model, programs, text, CONTEXT, CONTINUATION, **options)


def summary(result: list[WindowLoss], wanted: int | None = None) -> PerplexityResult:
    stated = {"model": "m", "text": "t", "context": 7, "continuation": 2, "stride": 9, "wanted": wanted, "seed": 0}
    return PerplexityResult.of(result, phases="prefill", **stated)


def losses(result: list[WindowLoss], method: str) -> Tensor:
    return torch.tensor([sample.losses for sample in result if sample.method == method])


def ids_of(model: LoadedModel, result: list[WindowLoss]) -> tuple[Tensor, Tensor]:
    """Contexts [N, LEAD + CONTEXT] and continuations [N, CONTINUATION] of all windows."""
    whole = model.tokenizer(TEXT.text)["input_ids"]
    starts = [sample.start for sample in result if sample.method == "full"]
    rows = torch.tensor([[whole[0], *whole[LEAD + at :][: CONTEXT + CONTINUATION]] for at in starts])
    return rows[:, : LEAD + CONTEXT], rows[:, LEAD + CONTEXT :]


def expected(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood of the last tokens [N, n] of inputs whose logits are [N, T, V]."""
    predicted = logits[:, -1 - tokens.shape[1] : -1].double().log_softmax(-1)
    return -predicted.gather(-1, tokens[..., None])[..., 0].float()


def budgets(model: Any, entries: int) -> Any:
    """So many entries per head at every length."""
    shape = describe(model)
    return lambda _: np.full((len(shape.full_layers), shape.kv_heads), entries, dtype=np.int64)


def third(model: Any) -> Program:
    policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})
    return Program.uniform(model, policy, lambda length: length // 3)


def tova(model: Any, prefill: bool = False) -> Program:
    phase = PhaseProgram(dict.fromkeys(describe(model).full_layers, create_policy("tova")), budgets(model, 9))
    return Program(phase if prefill else None, phase)


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_full_cache_predicts_what_the_plain_model_does(family: str) -> None:
    model = tiny.loaded(family)
    before = model.model.config._attn_implementation
    result = measure(model, {}, batch=3)
    assert model.model.config._attn_implementation == before
    contexts, following = ids_of(model, result)
    assert len(contexts) == 4
    with torch.no_grad():
        plain = expected(model.model(torch.cat([contexts, following], 1)).logits, following)
    torch.testing.assert_close(losses(result, "full"), plain, atol=1e-4, rtol=1e-4)
    (row,) = summary(result).methods
    assert row.perplexity.mean == pytest.approx(math.exp(float(plain.double().mean())), rel=1e-4)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_plan_predicts_what_masked_attention_does(family: str) -> None:
    model = tiny.loaded(family)
    contexts, following = ids_of(model, measure(model, {}))
    mask = torch.ones_like(contexts)
    eviction = random_eviction(model.model, mask)
    result = measure(model, {"plan": eviction.program}, batch=len(contexts))
    with reference(model.model, eviction.kept) as cache:
        logits = torch.cat(feed(model.model, cache, [(contexts, mask), (following, torch.ones_like(following))]), 1)
    found, wanted = losses(result, "plan"), expected(logits, following)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[:, 0], losses(result, "full")[:, 0])  # predicted before anything is evicted
    assert not torch.allclose(found[:, 1:], losses(result, "full")[:, 1:], atol=1e-2)


@pytest.mark.parametrize("prefill", [False, True])
def test_a_decode_phase_sees_one_token_after_another(model: LoadedModel, prefill: bool) -> None:
    program = tova(model.model, prefill)
    result = measure(model, {"tova": program})
    contexts, following = ids_of(model, result)
    with running(model.model, NAME):
        cache = PlanCache(model.model, program)
        pieces = [(contexts, torch.ones_like(contexts)), *one_by_one(following)]
        logits = torch.cat(feed(model.model, cache, pieces), 1)
    torch.testing.assert_close(losses(result, "tova"), expected(logits, following), atol=1e-4, rtol=1e-4)
    (sample, *_) = [sample for sample in result if sample.method == "tova"]
    heads = 4 * 2
    assert sample.entries == heads * (9 if prefill else LEAD + CONTEXT)
    assert sample.most == heads * (9 if prefill else LEAD + CONTEXT) + heads


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_batches_and_passes_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.loaded(family)
    programs = {"third": third(model.model), "tova": tova(model.model)}
    whole = measure(model, programs)
    tokens = 5
    monkeypatch.setattr(perplexity, "MOST_LOGITS", tokens * model.model.config.vocab_size)
    seen = note_passes(model.model)
    pieces = measure(model, programs, batch=1)
    assert {count for _, count in seen} == {LEAD + CONTEXT, 5, 1}  # the 11 tokens that are fed: 5, 5 and 1
    assert [(s.method, s.start, s.entries, s.most) for s in whole] == [
        (s.method, s.start, s.entries, s.most) for s in pieces
    ]
    for method in ("full", *programs):
        torch.testing.assert_close(losses(whole, method), losses(pieces, method), atol=1e-4, rtol=1e-4)


def note_passes(model: Any) -> list[tuple[int, int]]:
    """The shapes of the inputs of all forward passes from now on."""
    seen: list[tuple[int, int]] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True)
    return seen


def test_a_context_is_read_once_for_all_methods() -> None:
    model = tiny.loaded()
    seen = note_passes(model.model)
    done = []
    programs = {"third": third(model.model), "tova": tova(model.model)}
    measure(model, programs, batch=3, progress=lambda one, all_: done.append((one, all_)))
    assert done == [(0, 2), (1, 2), (2, 2)]
    fed = [(3, CONTINUATION - 1)] * 3 + [(1, CONTINUATION - 1)] * 3
    assert seen == [(3, LEAD + CONTEXT), *fed[:3], (1, LEAD + CONTEXT), *fed[3:]]


def test_what_is_held(model: LoadedModel) -> None:
    half = {2: create_policy("streaming"), 3: create_policy("streaming")}
    part = Program(PhaseProgram(half, lambda _: np.full((2, 2), 8, dtype=np.int64)))
    uniform = equal_uniform(model.model, create_policy("streaming"), {"prefill": lambda _: 77})
    result = measure(model, {"part": part, "uniform": uniform})
    length, fed, heads = LEAD + CONTEXT, CONTINUATION - 1, 8
    held = {method.name: method.held for method in summary(result).methods}
    assert held["full"].entries == heads * length
    assert held["part"].entries == 4 * 8 + 4 * length  # layers outside the plan hold everything
    assert held["uniform"].entries == 77
    assert [held[method].most - held[method].entries for method in held] == [heads * fed] * 3
    assert held["uniform"].bytes < held["part"].bytes < held["full"].bytes


# --- windows ------------------------------------------------------------------------------------------------------


def starts(result: list[WindowLoss], method: str = "full") -> list[int]:
    return [sample.start for sample in result if sample.method == method]


def test_windows_are_those_of_the_text(model: LoadedModel) -> None:
    result = measure(model, {"third": third(model.model)})
    assert starts(result) == starts(result, "third") == [0, 52, 104, 156]
    assert (summary(result).windows, summary(result).notes) == (4, [])
    few = measure(model, {}, stride=20, windows=3, seed=5)
    more = measure(model, {}, stride=20, windows=5, seed=5)
    assert len(starts(few)) == 3
    assert starts(few) == sorted(starts(few))
    assert set(starts(few)) < set(starts(more)) < set(range(0, 220 - 52 + 1, 20))
    by_start = dict(zip(starts(more), losses(more, "full"), strict=True))
    for start, found in zip(starts(few), losses(few, "full"), strict=True):
        torch.testing.assert_close(found, by_start[start], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("numbers", "options", "problem"),
    [
        ((600, 40), {}, "longer than the 512 tokens that the model takes: shorten them"),
        ((472, 41), {}, "longer than the 512 tokens that the model takes"),
        ((440, 40), {}, r"story has 220 tokens, a window of 440 \+ 40 needs 480: give a longer text or shorter"),
        ((40, 1), {}, "continuations of 2 tokens or more.*: got 1 tokens"),
        ((40, 8), {"windows": 0}, "needs a window or more .* 0 windows"),
        ((0, 8), {}, "windows need lengths and a stride of at least 1, got 0, 8, 8"),
        ((40, 8), {"stride": 0}, "got 40, 8, 0"),
    ],
)
def test_windows_that_cannot_be_measured(
    model: LoadedModel, numbers: tuple[int, int], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        measure_perplexity(model, {}, TEXT, *numbers, **options)


def test_a_model_that_is_broken() -> None:
    model = tiny.loaded()
    model.model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(IncompatibleError, match="story, window at token 0, method full: the model emits NaN"):
        measure(model, {"third": third(model.model)})


# --- rows ---------------------------------------------------------------------------------------------------------


def result_of(by_method: dict[str, list[tuple[float, ...]]]) -> list[WindowLoss]:
    return [
        WindowLoss(method, 9 * number, losses, 100 if method == "full" else 25, 1024.0, 110)
        for method, windows in by_method.items()
        for number, losses in enumerate(windows)
    ]


def test_rows_by_hand() -> None:
    """Means of windows 1.5 three times and 3.5 three times: s is sqrt(1.2), and t of five degrees 2.5706."""
    full_losses, plan_losses = [(1.0, 2.0), (3.0, 4.0)] * 3, [(1.0, 4.0), (2.0, 4.5)] * 3
    full, plan = summary(result_of({"full": full_losses, "plan": plan_losses})).methods
    assert full.difference is None
    reach = 2.570582 * math.sqrt(1.2 / 6)
    assert full.nll == Estimate(
        2.5, pytest.approx(2.5 - reach, abs=1e-5), pytest.approx(2.5 + reach, abs=1e-5), contexts=6
    )
    assert full.perplexity.mean == math.exp(2.5)
    assert full.perplexity.low == pytest.approx(math.exp(2.5 - reach), rel=1e-5)
    assert plan.nll.mean == 2.875
    assert plan.difference is not None
    reach = 2.570582 * math.sqrt(6 * 0.625**2 / 5 / 6)
    assert (plan.difference.mean, plan.difference.low) == (0.375, pytest.approx(0.375 - reach, abs=1e-5))
    assert (plan.better, plan.equal, plan.worse) == (3, 0, 3)
    assert plan.held == Footprint(25, 1024, 110)


LOSSES = st.lists(st.tuples(*[st.floats(0, 20)] * 3), min_size=5, max_size=12)


@given(LOSSES, st.floats(-1, 1))
@at_most(25)
def test_differences_are_paired(windows: list[tuple[float, ...]], shift: float) -> None:
    moved = [tuple(loss + shift for loss in window) for window in windows]
    full, same, other = summary(result_of({"full": windows, "same": windows, "other": moved})).methods
    assert same.nll == full.nll
    assert same.difference is not None and other.difference is not None
    assert (same.difference.low, same.difference.high, same.equal) == (0, 0, len(windows))
    shifted = (other.difference.mean, other.difference.low, other.difference.high)
    assert shifted == pytest.approx((shift, shift, shift), abs=1e-9)  # however far apart the windows are
    assert full.nll.low <= full.nll.mean <= full.nll.high


def test_table_and_json() -> None:
    result = summary(result_of({"full": [(1.0, 2.0), (3.0, 4.0)], "plan": [(1.0, 4.0), (2.0, 4.5)]}))
    console = Console(width=200, file=io.StringIO())
    console.print(on_screen(perplexity_table(result)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "m: perplexity of t, 2 windows of 7 + 2 tokens" in shown
    (plan,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["plan"]]
    assert " ".join(plan).endswith("+0.3750 [2 contexts: no interval] 1 / 0 / 1 25 0.250 1.0 110")
    data = result.as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["methods"][0]["difference"] is None
    assert data["methods"][1]["worse"] == 1
    assert (data["starts"][-1], data["methods"][1]["by_window"][-1]) == (9, 3.25)
    assert (data["context"], data["continuation"], data["stride"], data["windows"]) == (7, 2, 9, 2)
