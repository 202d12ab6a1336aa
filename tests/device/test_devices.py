"""Several devices: launches, what layers of different devices say together, and the bank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.calibration.lukv import LukvCalibration, measure_importance
from kvsearch.calibration.options import LukvOptions
from kvsearch.calibration.probe.context_pass import measure_recalls
from kvsearch.kernels import attention, blocks, rows, step
from kvsearch.kernels.jit import attention as attention_kernels
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.shared_prefill import compress_prompts, prefill_all
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.passes import PrefixLayer, SuffixTokens
from tests import tiny
from tests.device.accelerator import backend, device, events, recording, spread
from tests.families import build, prompts
from tests.runtime.helpers import feed, held_tokens, running
from tests.runtime.test_fork import programs
from tests.search.bank.cases import SNAPKV, random_candidates, samples_of

PROMPTS = [prompts(1, length, seed=length)[0][0] for length in (23, 40, 40, 31)]


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


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_of_unequal_length_are_read_without_padding(family: str) -> None:
    """Attention without a mask holds no matrix of logits; what is kept and replied is that of a padded batch."""
    found = []
    for place in ("cpu", f"{device(1)}"):
        model = build(family, place, tie_word_embeddings=False)
        read_with: list[dict[str, Tensor]] = []
        model.register_forward_pre_hook(lambda _, __, given, passes=read_with: passes.append(given), with_kwargs=True)
        made = programs(model)
        with running(model, NAME):
            for joint in compress_prompts(
                model, {str(number): each for number, each in enumerate(made)}, PROMPTS, set()
            ):
                assert place == "cpu" or all(
                    given["input_ids"].shape[1] == 1 or given["attention_mask"].all() for given in read_with
                )
                replies = joint.replies
                kept = [
                    replies.cache.kept_positions(layer, row, head)
                    for layer in replies.cache.planned
                    for row in range(len(replies.mask))
                    for head in range(2)
                ]
                said = replies.reply([6] * len(replies.mask))
                found.append((joint.methods, joint.entries, kept, said, replies.most))
    half = len(found) // 2
    for mine, expected in zip(found[half:], found[:half], strict=True):
        assert mine == expected


def test_masks_of_the_bank_are_made_on_the_device() -> None:
    entries = torch.tensor([[[[1, 3]], [[2, 2]]]])  # of one candidate, two samples, one policy and two heads
    there, states = entries.to(device(1)), torch.zeros(2, 2, 4, 8, device=device(1))
    suffix = SuffixTokens(there[0, :, 0, 0])
    with recording():
        [prefix] = PrefixLayer([(states, states)], suffix, entries, there).visible_prompt()
    assert {kind for kind, _ in events()} == {"kernel"}
    assert prefix.seen.device == device(1)


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


@pytest.mark.nightly
def test_entries_are_ranked_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host sorting the entries of a long context takes longer than the pass that they are measured in."""
    places: list[torch.device] = []
    argsort = Tensor.argsort

    def note(x: Tensor, *args: Any, **how: Any) -> Tensor:
        if x.dim() > 1:  # by head, not the few rows of a batch
            places.append(x.device)
        return argsort(x, *args, **how)

    monkeypatch.setattr(Tensor, "argsort", note)
    loaded = tiny.wrap(build("llama", vocab_size=len(tiny.WORDS)).to(device(1)))
    snapkv = create_policy("snapkv", {"window": 4})
    calibration = LukvCalibration(loaded, tiny.calibration_data(110), [snapkv], LukvOptions(answers="given"))
    assert list(measure_importance(loaded, calibration.prepare(), snapkv, LukvOptions(answers="given")))
    context_pass: Any = SimpleNamespace(
        importance_pass=SimpleNamespace(model=loaded.model), largest=torch.rand(1, 2, 40)
    )
    measure_recalls([torch.rand(1, 2, 40)], context_pass)
    assert places == [device(1)] * 2


@pytest.mark.nightly
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
