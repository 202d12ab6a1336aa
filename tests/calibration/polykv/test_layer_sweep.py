"""The cheap passes against the papers' procedure: every pattern, phase and layer, on every kind of architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.calibration.polykv.layer_sweep import (
    AblationResults,
    Ablations,
    ContinuationBatch,
    LayerSweep,
    PromptBatch,
    SweepSizes,
    TextContinuation,
)
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.architecture import describe
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime.attention import run_attention
from tests.calibration.polykv.naive import measure_naively
from tests.families import EACH_FAMILY, build

EVERYTHING = ("cosine", "ppl", "entropy")
NAMES = (
    "h2o", "tova", "cam", "pyramidkv", "snapkv", "d2o", "cake", "scissorhands", "streaming", "vatp", "lava",
    "keydiff", "knorm", "expected_attention", "criticalkv", "defensivekv",
)  # fmt: skip
CPU = torch.device("cpu")


def small(names: Sequence[str] = NAMES) -> tuple[Policy, ...]:
    """Policies whose protected entries fit a budget of 9."""
    settings: dict[str, Any] = {"window": 4, "kernel": 3, "sinks": 2, "history": 16}
    made = []
    for name in names:
        known = create_policy(name, {}).parameters()
        made.append(create_policy(name, {key: value for key, value in settings.items() if key in known}))
    return tuple(made)


def batch(*shapes: tuple[int, tuple[int, ...]], vocabulary: int = 97, seed: int = 0) -> PromptBatch:
    """Prompts of random tokens: of each, its length and those of what follows; the answers start at the third token."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (1, count), generator=generator)

    made = [
        CalibrationPrompt(random(length), number, number, tuple(Continuation(random(count), 2) for count in after))
        for number, (length, after) in enumerate(shapes)
    ]
    return PromptBatch(range(len(made)), made)


def tried(model: Any, policies: tuple[Policy, ...], *budgets: int) -> Ablations:
    shape = describe(model)
    return Ablations(policies, budgets, ("prefill", "decode"), shape.full_layers, shape.kv_heads)


ALL = (10**6, 10**6)


def samples_of(prompts: PromptBatch) -> list[TextContinuation]:
    """All continuations of prompts."""
    return [(row, number) for row, one in enumerate(prompts.prompts) for number in range(len(one.continuations))]


def first_of(prompts: PromptBatch) -> ContinuationBatch:
    """The first continuation of every prompt."""
    return prompts.continuations([one for one in samples_of(prompts) if one[1] == 0], CPU)


def both(
    model: Any, what: Ablations, prompts: PromptBatch, at_once: SweepSizes = ALL
) -> tuple[AblationResults, AblationResults, ContinuationBatch]:
    """What the sweep and the naive procedure measure of all continuations."""
    samples = samples_of(prompts)
    after = prompts.continuations(samples, CPU)
    with run_attention(model):
        swept = LayerSweep(model, what, prompts, EVERYTHING, at_once).measure(after)
        naive = measure_naively(model, what, *prompts.repeat_prompts(samples).padded(CPU), after)
    return swept, naive, after


def assert_same(swept: AblationResults, naive: AblationResults, tolerance: float = 1e-4) -> None:
    for name, array in naive.arrays(EVERYTHING).items():
        found = swept.arrays(EVERYTHING)[name]
        assert np.isfinite(array).all()
        np.testing.assert_allclose(found, array, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("family", [*EACH_FAMILY, pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_all_families_agree_with_the_naive_procedure(family: str) -> None:
    """Sliding windows, soft caps, norms of queries, biases, learned sinks; padded prompts and continuations."""
    model = build(family)
    swept, naive, _ = both(model, tried(model, small(("snapkv", "tova", "h2o")), 9), batch((40, (9,)), (33, (6,))))
    assert_same(swept, naive)
    assert naive.loss.std() > 1e-3
    assert naive.cosine.min() < 0.99


@pytest.mark.nightly
def test_all_patterns_agree_with_the_naive_procedure() -> None:
    """At two budgets, of which the larger evicts nothing of one prompt before it is followed; one is followed twice."""
    model = build("llama", num_hidden_layers=2)
    swept, naive, _ = both(model, tried(model, small(), 9, 30), batch((40, (12, 5)), (26, (8,))))
    assert_same(swept, naive)


def sweep(
    model: Any, what: Ablations, prompts: PromptBatch, samples: Sequence[TextContinuation], at_once: SweepSizes = ALL
) -> AblationResults:
    with run_attention(model):
        return LayerSweep(model, what, prompts, EVERYTHING, at_once).measure(prompts.continuations(samples, CPU))


def test_a_sweep_in_chunks_measures_the_same() -> None:
    model = build("llama")
    what, prompts = tried(model, small(("snapkv", "cam", "cake")), 9), batch((40, (9,)))
    whole = sweep(model, what, prompts, samples_of(prompts))
    for at_once in ((1, 1), (5, 2)):
        assert_same(sweep(model, what, prompts, samples_of(prompts), at_once), whole, 1e-6)


def test_nothing_evicted_changes_nothing_and_the_model_is_left_as_it_was() -> None:
    """A budget of everything: cosine 1, error 0, the loss of the full cache."""
    model, prompts = build("llama"), batch((40, (9,)))
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    swept = sweep(model, tried(model, small(("snapkv", "tova", "scissorhands")), 60), prompts, samples_of(prompts))
    assert (swept.cosine == 1).all()
    assert (swept.error == 0).all()
    full = swept.full_loss[:, None, None, None, None] + np.zeros_like(swept.loss)
    np.testing.assert_allclose(swept.loss, full, atol=1e-6)
    assert sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()) == hooks
    assert model.config._attn_implementation == "sdpa"


def test_logits_that_are_made_in_another_way_are_refused() -> None:
    """A scale behind the output head, as some architectures have."""
    model = build("llama")
    prompts = batch((40, (9,)))
    original = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    with (
        run_attention(model),
        pytest.raises(IncompatibleError, match="makes its logits in a way that is not known here"),
    ):
        LayerSweep(model, tried(model, small(("snapkv",)), 9), prompts, EVERYTHING, ALL).measure(first_of(prompts))


def test_continuations_count_what_is_predicted() -> None:
    """Lengths 5 and 3, answers from the third token on: three and one predicted tokens; losses and means by hand."""
    after = first_of(batch((9, (5,)), (8, (3,))))
    assert after.counts.tolist() == [5, 3]
    assert after.followed.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert after.predicting.tolist() == [[False, True, True, True], [False, True, False, False]]
    values = torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 6, 100, 100]])
    assert after.mean_over_tokens(values).tolist() == [3.0, 3.0]
    logits = torch.zeros(2, 5, 97)
    logits[0, 1, after.tokens[0, 2]] = 2.0
    chance = float(np.log(97))
    sure = float(np.log(np.exp(2.0) + 96)) - 2.0
    np.testing.assert_allclose(after.losses(logits), [(sure + 2 * chance) / 3, chance], rtol=1e-6)
