"""What holds for PyTorch's own path holds with kernels in its place: the runtime's own tests, an example of each."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from kvsearch.kernels import attention
from kvsearch.kernels.step import step
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime.decode import decoding
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.store.slots import SlotBlock
from tests.combinations import first_value
from tests.kernels.serving import interpreted
from tests.runtime.layers import Layer, Scene, held
from tests.runtime.test_decode_rule import begin, feed


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Count the calls of the kernels: a test without any would be one of PyTorch's path again."""
    attends, steps = Mock(wraps=attention.attend), Mock(wraps=step)
    monkeypatch.setattr(attention, "attend", attends)
    monkeypatch.setattr(decoding, "step", steps)
    yield steps
    assert attends.called or steps.called


def same_as_pytorch(policy: Policy, scene: Scene, pads: slice) -> Decoding:
    """What decoding the tokens of a scene with kernels leaves: what PyTorch's path does, with the same outputs.

    Its first sequence gets padding in place of the tokens `pads`.
    """
    layer, valid = Layer(scene), torch.ones(2, scene.tokens, dtype=torch.bool)
    valid[0, pads] = False
    real = valid[:, None, :, None]  # what becomes of padding is nobody's
    with interpreted(False):
        expected = begin(layer, policy, policy)
        outputs = feed(layer, expected, 0, scene.tokens, valid) * real
    holder = begin(layer, policy, policy)
    torch.testing.assert_close(feed(layer, holder, 0, scene.tokens, valid) * real, outputs, atol=1e-5, rtol=1e-5)
    assert held(holder) == held(expected)
    return holder


@first_value("name", ["h2o", "scissorhands", "streaming", "tova", "cake", "cam", "d2o", "snapkv"], usual=2)
def test_decode_rules(name: str, served: Mock) -> None:
    settings = {"cake": {"window": 3}, "snapkv": {"window": 1, "refresh": 3}}
    policy = create_policy(name, settings.get(name, {}))
    budgets = (8, 8) if name == "tova" else (5, 8)  # rows of a layer are added up in one block
    scene = Scene(2, 2, 12, (0, 4), 5, budgets, 3, softcap=2.0 if name == "h2o" else None, carries=True)
    same_as_pytorch(policy, scene, slice(1, 3))
    assert served.called == (name not in ("cam", "d2o"))


@pytest.mark.nightly
def test_tokens_go_to_empty_slots_where_several_entries_left_at_once() -> None:
    """Also before the next ones leave, and where a sequence gets padding meanwhile."""
    policy = create_policy("scissorhands", {"window": 1, "drop": 4})
    same_as_pytorch(policy, Scene(2, 2, 12, (0, 4), 12, (8, 11), 3, carries=True), slice(3, 5))


@pytest.mark.nightly
def test_the_order_of_entries_is_known_without_sorting_them_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the budgets, at them, and where some sequences get padding."""
    policy = create_policy("cake", {"window": 2, "kernel": 7, "pooling": "max", "sinks": 2})
    linked = []
    link = SlotBlock.link
    monkeypatch.setattr(SlotBlock, "link", lambda block: (linked.append(1), link(block)))
    blocks = same_as_pytorch(policy, Scene(2, 2, 24, (0, 3), 9, (9, 27), 3), slice(4, 6)).blocks
    assert len(linked) == len(blocks)
    for block in blocks:
        kept = block.links.clone()
        block.link()
        there = block.cached.held  # slots behind the next token's are in any order
        assert torch.equal(block.links[0][there], kept[0][there])
