"""What holds for PyTorch's own path holds with kernels in its place: the runtime's own tests, an example of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvsearch.kernels import attention
from kvsearch.kernels.dispatch import interpreted
from kvsearch.kernels.step import step
from kvsearch.policies import create_policy
from kvsearch.runtime import fused
from tests.runtime import test_families, test_generate, test_sharing
from tests.runtime.layers import Layer, Scene, held
from tests.runtime.test_decode_rule import begin, feed


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count the calls of the kernels: a test without any would be one of PyTorch's path again."""
    calls: list[str] = []
    attend = attention.attend

    def counted(*args: object, **kwargs: object) -> object:
        calls.append("attend")
        return attend(*args, **kwargs)  # type: ignore[arg-type]

    def stepped(*args: object, **kwargs: object) -> object:
        calls.append("step")
        return step(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend", counted)
    monkeypatch.setattr(fused, "step", stepped)
    yield calls
    assert calls


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "cake", "scissorhands", "cam", "d2o", "vatp", "snapkv"])
def test_decode_rules(name: str, served: list[str]) -> None:
    """A padded batch with padding among its tokens ends with the entries that PyTorch's path leaves."""
    settings = {"cake": {"window": 3}, "snapkv": {"window": 1, "refresh": 3}}
    policy = create_policy(name, settings.get(name, {}))
    budgets = (8, 8) if name == "tova" else (5, 8)  # rows of a layer are added up in one block
    layer = Layer(Scene(2, 2, 12, (0, 4), 5, budgets, 3, softcap=2.0 if name == "h2o" else None))
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[0, 1:3] = False
    with interpreted(False):
        expected = begin(layer, policy, policy)
        outputs = feed(layer, expected, 0, 5, valid)
    holder = begin(layer, policy, policy)
    torch.testing.assert_close(feed(layer, holder, 0, 5, valid), outputs, atol=1e-5, rtol=1e-5)
    assert held(holder) == held(expected)
    assert ("step" in served) == (name not in ("cam", "d2o", "vatp"))


@pytest.mark.parametrize("name", ["tova", "cake", "scissorhands"])
def test_decode_rules_over_several_chunks(name: str) -> None:
    policy = create_policy(name, {"cake": {"window": 3, "pooling": "max"}}.get(name, {}))
    layer = Layer(Scene(2, 2, 640, (0,), 3, (630, 630), 3))
    with interpreted(False):
        expected, holder = begin(layer, policy, policy), begin(layer, policy, policy)
        outputs = feed(layer, expected, 0, 3)
    torch.testing.assert_close(feed(layer, holder, 0, 3), outputs, atol=1e-5, rtol=1e-5)
    assert held(holder) == held(expected)


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_generating(way: str) -> None:
    test_generate.test_evicted_prompts_generate_what_masking_does("llama", way, "cpu")


def test_drafts() -> None:
    test_generate.test_prompt_lookup_decoding_equals_plain_decoding("llama", 3, "cpu")


def test_questions_about_one_context() -> None:
    test_generate.test_another_question_about_the_same_context("llama", "cpu")
    test_generate.test_copies_of_a_prompts_cache_go_separate_ways("cpu")


@pytest.mark.parametrize("how", ["adakv", "lava"])
def test_budgets_of_the_prompt(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = test_sharing.test_trimming_layer_by_layer_ends_where_deciding_at_the_end_would
    trimmed(how, test_sharing.SINGLE[0], monkeypatch)
    test_sharing.test_decoding_equals_masking(how, "llama", "cpu")


def test_decode_budgets_of_the_prompt() -> None:
    """A pool that a decode phase follows is handed on to its slots."""
    test_sharing.test_a_decode_phase_alone_shares_too()


def test_learned_sinks_stay() -> None:
    test_families.test_a_family_does_what_it_should("gpt_oss")
