"""What answers lose by attention outputs: against finite differences, and where layers can stand in for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.calibration.data import find_default_data, load_calibration_data
from kvsearch.calibration.importance import ImportancePass, measure_output_errors, measure_output_slopes
from kvsearch.calibration.prompts import Continuation, encode_prompts
from kvsearch.models.architecture import describe
from kvsearch.models.loading import load
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import observe
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.gates import gated_attention
from kvsearch.runtime.logits import Logits
from kvsearch.signals.predictions import compute_log_odds
from tests.families import build, prompts
from tests.runtime.helpers import assert_close, running

CONTEXT, ANSWER = 40, 3
POLICY: Policy = create_policy("snapkv", {"window": 4, "kernel": 3, "sinks": 2})


@contextmanager
def asked(model: Any) -> Iterator[tuple[ImportancePass, Continuation, Tensor]]:
    """A context with a question of 4 tokens and an answer of 3, and which entries of it stay."""
    ids, _ = prompts(1, CONTEXT + 7)
    with running(model, NAME):
        passed = ImportancePass(model, [POLICY], ids[:, :CONTEXT])
        after = Continuation(ids[:, CONTEXT:], 7 - ANSWER)
        yield passed, after, passed.ranks() < POLICY.protected(CONTEXT)


def smooth(family: str) -> Any:
    """A random model whose log-odds are smooth in its attention outputs."""
    model = build(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.mul_(0.5)
    return model


# qwen3_5 gates attention outputs and bitnet normalises them in front of the output projection
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_5", pytest.param("bitnet", marks=pytest.mark.nightly)],
)
def test_slopes_are_finite_differences_of_the_log_odds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node is in the middle of the way: all layers see half of the entries that are not protected."""
    model = smooth(family)
    generator = torch.Generator().manual_seed(1)
    layers = len(describe(model).full_layers)
    with asked(model) as (passed, after, protected):
        [(slopes, _)] = measure_output_slopes(passed, [after], protected, 1)
        answer = after.tokens[0, -ANSWER:]

        def odds(row: int, added: Tensor) -> float:
            calls = iter(range(layers))

            def shifted(*args: Any) -> Tensor:
                return gated_attention(*args) + (added if next(calls) == row else 0.0)

            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(observe, "gated_attention", shifted)
                rows = torch.zeros(2, dtype=torch.long)
                keep = dict(enumerate(protected))
                with passed.following(after.tokens.repeat(2, 1), keep, torch.tensor([0.5]), rows) as output:
                    return float(compute_log_odds(output.logits[1][after.predicting], answer).double().sum())

        for row, slope in enumerate(slopes):
            assert slope.shape == (7, model.config.num_attention_heads, slope.shape[-1])
            direction = slope / slope.norm() + torch.randn(slope.shape, generator=generator) / slope.numel() ** 0.5
            step = 0.02 * direction
            found = (odds(row, step) - odds(row, -step)) / 2
            assert found == pytest.approx(float((slope * step).sum()), rel=0.02, abs=1e-5)
            assert abs(found) > 1e-4


def test_layers_that_stand_in_for_each_other_all_have_errors() -> None:
    """The last three layers all retrieve, so that under the full cache alone hardly anything hangs on one of them.

    Gradients there would give them errors of .7, .3 and .2, and layer 2 .7.
    """
    loaded = load("bundled-redundant")
    data = load_calibration_data(find_default_data("bundled-redundant")).limit_questions(1)
    policy = create_policy("snapkv", {"sinks": 4})
    [prompt] = encode_prompts(loaded, data)
    with running(loaded.model, NAME):
        passed = ImportancePass(loaded.model, [policy], prompt.ids)
        ranks, kept = passed.ranks(), policy.protected(prompt.length)
        errors = next(measure_output_errors(passed, prompt.continuations, ranks < kept, [ranks.argsort(-1)]))[0]
    of_layers = errors[..., kept].sum(-1)
    assert of_layers[3:].min() > 3
    assert of_layers[:3].max() < 1


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (3.0, True)])
def test_gates_lead_in_a_straight_line_from_the_full_cache_to_one_without(softcap: float | None, sinks: bool) -> None:
    """Rows follow one prompt, each through a gate of its own; derivatives by the tokens are those of autograd."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(2).requires_grad_()

    tokens = (draw(3, 4, 5, 8), draw(3, 2, 5, 8), draw(3, 2, 5, 6))
    prompt = (draw(1, 2, 20, 8).detach(), draw(1, 2, 20, 6).detach())
    keep = torch.rand(2, 20, generator=generator) < torch.tensor([[0.3], [0.5]])
    how = Logits(8**-0.5, softcap, None, draw(2, 2).detach() if sinks else None)
    gates = torch.tensor([1.0, 0.0, 0.25])

    def attended(shown: Tensor) -> Tensor:
        keys, values = (
            torch.cat([far.expand(3, -1, -1, -1), own], 2) for far, own in zip(prompt, tokens[1:], strict=True)
        )
        mask = torch.cat([shown[:, None].expand(-1, 5, -1), torch.ones(5, 5).tril().bool().expand(2, -1, -1)], -1)
        scores = how.of(tokens[0], keys.repeat_interleave(2, 1)).masked_fill(~mask.repeat_interleave(2, 0), -torch.inf)
        weights = how.softmax(scores.view(3, 2, 2, 5, 25).permute(1, 2, 0, 3, 4), torch.arange(2))
        return (weights.permute(2, 0, 1, 3, 4).flatten(1, 2) @ values.repeat_interleave(2, 1)).transpose(1, 2)

    output = gated_attention(tokens, prompt, keep, gates, how)
    expected = torch.lerp(attended(keep), attended(torch.ones_like(keep)), gates[:, None, None, None])
    assert_close(output, expected)
    slopes = draw(*output.shape)
    derived = (torch.autograd.grad(made, tokens, slopes) for made in (output, expected))
    for found, by_autograd in zip(*derived, strict=True):
        assert_close(found, by_autograd)
