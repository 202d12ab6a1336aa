"""Several devices: launches, what layers of different devices say together, and the bank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.kernels import attention, blocks, rows, step
from kvsearch.kernels.jit import attention as attention_kernels
from kvsearch.search.bank.bank import CandidateBank
from tests import tiny
from tests.device.accelerator import backend, device, spread
from tests.families import build
from tests.search.bank.cases import SNAPKV, random_candidates, samples_of


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
        slots = step.Slots(states, states, positions, (), number, positions[:, :2], number, number, number)
        layer = step.LayerSums(states[..., 0], number) if what == "row" else None
        step.step(query, query[:, 0], query[:, 0], slots, 600, "row" if layer else "position", 1.0, layer=layer)
    assert backend().current_device() == 0
    assert len(launched) == 2 + (what == "row")
    assert {index for _, index in launched} == {1}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_bank(family: str) -> None:
    """Losses against the full cache and replies, of questions that follow and of prompts that go on."""
    found = []
    for place in (spread, lambda model: model):
        loaded = tiny.wrap(place(build(family, vocab_size=len(tiny.WORDS), tie_word_embeddings=False)))
        bank = CandidateBank(loaded, SNAPKV, samples_of(loaded, "question-agnostic"), 50, full=True)
        candidates = random_candidates(loaded, 3, 50)
        found.append((bank.losses(candidates, objective="kl"), bank.losses(candidates), bank.scores(candidates)))
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)
