"""Several devices: launches, what layers of different devices say together, and the bank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.kernels import attention, blocks, rows, step
from kvsearch.kernels.jit import attention as attention_kernels
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.shared_prefill import prefill_all
from kvsearch.search.bank.bank import CandidateBank
from tests import tiny
from tests.families import build, prompts
from tests.runtime.helpers import feed, held_tokens, running
from tests.search.bank.cases import SNAPKV, random_candidates, samples_of
from tests.torture.device.accelerator import backend, device, spread


@pytest.mark.parametrize("what", ["attention", "scores", "step", "row"])
def test_kernels_are_launched_on_the_device_of_their_tensors(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which hooks of device maps do not set."""
    launched: list[tuple[str, int]] = []
    kind: Any = type(attention_kernels.attend_chunks)

    def launch(kernel: Any, _: Any) -> Any:
        return lambda *_, **__: launched.append((kernel.fn.__name__, backend().current_device()))

    monkeypatch.setattr(kind, "__getitem__", launch)
    monkeypatch.setattr(blocks, "processors", lambda _: 4)
    states = torch.zeros(2, 600, 16, device=device(1))
    query = states[:, :4]
    positions = states[..., 0].long()
    number = positions[:, 0]
    if what == "attention":
        attention.attend(query, attention.Entries(states, states, 600), 1.0, want_row=True)
    elif what == "scores":
        rows.Rows(query[None], states[None], positions[:1], positions[:1, :4], 1.0).received("mean")
    else:
        sums = (states[..., 0], number) if what == "row" else None
        given = (states, states, positions, (), number, positions[:, :2], number, number, number)
        slots = step.Slots(*given, sums=sums)
        step.step(query, query[:, 0], query[:, 0], slots, 600, "row" if sums else "position", 1.0)
    assert backend().current_device() == 0
    assert len(launched) == 2 + (what == "row")
    assert {index for _, index in launched} == {1}


def test_padding_and_prompts_that_are_read_again() -> None:
    """A device map hands layers of the second device what those of the first one have."""
    ids, mask = prompts(2, 40, pads=7)
    policy = create_policy("kvzip", {"chunk": 16, "protect": 2, "plus": True})
    kept = []
    for model in (build("llama"), spread(build("llama"))):
        read, token, last = (tensor.to(model.device) for tensor in (ids, ids[:, :1], torch.tensor([[1], [0]])))
        cache = PlanCache(model, Program.uniform(model, policy, lambda _: 12))
        with running(model, NAME):
            prefill_all(model, [cache], read, mask.to(model.device))
            feed(model, cache, [(token, last)], mask.to(model.device))  # the second sequence has ended
        kept.append([held_tokens(cache, layer, 2, 2) for layer in cache.planned])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_bank(family: str) -> None:
    """Losses against the full cache and replies, of questions that follow and of prompts that go on."""
    found = []
    for place in (spread, lambda model: model):
        loaded = tiny.wrap(place(build(family, vocab_size=len(tiny.WORDS), tie_word_embeddings=False)))
        bank = CandidateBank(loaded, SNAPKV, samples_of(loaded, "question-agnostic"), 50)
        candidates = random_candidates(loaded, 3, 50)
        found.append((bank.measure_losses(candidates), bank.score_replies(candidates)))
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)
