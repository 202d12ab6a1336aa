"""What holds for every policy while decoding: counts, protection, padding, batches, chunks, copies.

One drawn scene serves all of it, as most of the time goes into decoding its tokens one by one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies import Policy
from kvsearch.policies.ranking import apply_to_each
from kvsearch.policies.registry import BUILT_IN
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.eviction import evict
from kvsearch.testing.policy_contract import properties
from tests.combinations import in_turn
from tests.examples import at_most, fixed
from tests.policies.probes import example
from tests.runtime.layers import Layer, Scene, held, scenes
from tests.runtime.policies import FIRST, SMALL, policies_of

# each policy once, and those whose settings change what leaves at once, is protected or is folded
SETTINGS = [
    *FIRST.values(),
    "scissorhands{'history': 11, 'window': 1, 'drop': 0}",
    "cam{'base': 'h2o', 'expectation': True}",
]


def begin(layer: Layer, prefill: Policy | None, decode: Policy) -> Decoding:
    used = [policy for policy in (prefill, decode) if policy is not None]
    return evict(layer.observation(*used), prefill and layer.rule(prefill), layer.rule(decode))


def feed(layer: Layer, holder: Decoding, first: int, count: int, valid: Tensor | None = None) -> Tensor:
    """Tokens `first` to `first + count` after the prompt, as one chunk."""
    query, key, value = (states[:, :, first : first + count] for states in layer.tokens())
    positions = layer.valid.sum(-1, keepdim=True) + torch.arange(first, first + count)
    return holder.attend(query, key, value, positions, layer.logits, arrived=valid)


@pytest.mark.parametrize("name", policies_of(SETTINGS))
def test_decoding(name: str) -> None:
    policy = SMALL[name]

    @settings(fixed(5), suppress_health_check=properties.suppress_health_check)
    @given(scenes(max_tokens=6), st.lists(st.integers(0, 3), min_size=4, max_size=12))
    def right(scene: Scene, pattern: list[int]) -> None:
        layer = Layer(scene)
        rows = [unpadded(layer, row) for row in range(len(scene.pads))]
        for prefill in (policy, None):
            start, alone = begin(layer, prefill, policy), [begin(row, prefill, policy) for row in rows]
            outputs, end = counts_and_protection(layer, start.copy(), policy, prefill is not None)
            padding_among_the_tokens_changes_nothing(layer, start.copy(), rows, alone)
            if prefill is None:
                rows_can_be_rearranged_and_copied(layer, start, outputs, end)
            else:
                a_prompt_in_chunks_starts_from_the_same_state(layer, policy, outputs, end)
                batches_and_chunks_change_nothing(layer, start.copy(), rows, alone, outputs, end)
                sequences_may_pause(layer, start.copy(), rows, alone, outputs, pattern)

    right()


def counts_and_protection(layer: Layer, holder: Decoding, policy: Policy, evicted: bool) -> tuple[Tensor, Decoding]:
    """Token by token: the entries held, the most ever held, and what is protected; also the outputs and the end."""
    outputs = []
    budgets, before = torch.tensor(layer.scene.budgets), holder.entries()
    drops, protected_counts = (
        apply_to_each(policy.drop_at, budgets),
        apply_to_each(policy.protected_at, budgets).tolist(),
    )
    most = before
    for token in range(layer.scene.tokens):
        outputs.append(feed(layer, holder, token, 1))
        seen = layer.valid.sum(-1)[:, None] + token + 1
        prompt = (seen - token - 1).expand_as(before)
        free = apply_to_each(policy.keeps_all, budgets.expand_as(before), prompt).bool()
        most = torch.maximum(most, before + 1)
        after = torch.where((before + 1 > budgets) & ~free, budgets + 1 - drops, before + 1)
        assert torch.equal(holder.entries(), after)
        assert torch.equal(holder.most_entries(), most)
        before = after
        for count, heads in zip(seen.flatten().tolist(), held(holder), strict=True):
            for head, kept in enumerate(heads):
                assert kept == sorted(set(kept))
                assert 0 <= kept[0] <= kept[-1] < count
                sinks, recent = protected_counts[head]
                protected = {*range(min(sinks, count)), *range(max(0, count - recent), count)}
                if not evicted:  # a prefill phase may have dropped sinks that did not fit
                    assert protected <= set(kept)
    return torch.cat(outputs, 2), holder


def batches_and_chunks_change_nothing(
    layer: Layer, holder: Decoding, rows: list[Layer], alone: list[Decoding], one_by_one: Tensor, end: Decoding
) -> None:
    """All tokens at once, and each sequence without padding on its own."""
    together = feed(layer, holder, 0, layer.scene.tokens)
    torch.testing.assert_close(together, one_by_one, atol=1e-6, rtol=1e-6)
    assert held(holder) == held(end)
    for row, (single, start) in enumerate(zip(rows, alone, strict=True)):
        apart = start.copy()
        output = feed(single, apart, 0, layer.scene.tokens)
        torch.testing.assert_close(output[0], one_by_one[row], atol=1e-5, rtol=1e-5)
        assert held(apart)[0] == held(end)[row]


def a_prompt_in_chunks_starts_from_the_same_state(
    layer: Layer, policy: Policy, one_by_one: Tensor, end: Decoding
) -> None:
    holder = evict(layer.observation(policy, chunk=3), layer.rule(policy), layer.rule(policy))
    output = feed(layer, holder, 0, layer.scene.tokens)
    torch.testing.assert_close(output, one_by_one, atol=1e-5, rtol=1e-5)
    assert held(holder) == held(end)


def unpadded(layer: Layer, row: int) -> Layer:
    """One sequence of a layer on its own, without its padding."""
    pads = layer.scene.pads[row]
    made = Layer(layer.scene)
    made.scene = dataclasses.replace(layer.scene, length=layer.scene.length - pads, pads=(0,))
    made.query, made.key, made.value = (t[row : row + 1, :, pads:] for t in (layer.query, layer.key, layer.value))
    made.valid = layer.valid[row : row + 1, pads:]
    return made


def padding_among_the_tokens_changes_nothing(
    layer: Layer, holder: Decoding, rows: list[Layer], alone: list[Decoding]
) -> None:
    """A padded question: its first sequence starts later, and ends as if the padding had not been there."""
    tokens, batch = layer.scene.tokens, len(layer.scene.pads)
    pads = tokens // 2
    valid = torch.ones(batch, tokens, dtype=torch.bool)
    valid[0, :pads] = False
    shift = torch.zeros(batch, 1, dtype=torch.long)
    shift[0] = pads
    query, key, value = layer.tokens()
    positions = (layer.valid.sum(-1, keepdim=True) + torch.arange(tokens) - shift).clamp(min=0)
    output = holder.attend(query, key, value, positions, layer.logits, arrived=valid)
    for row, (single, start) in enumerate(zip(rows, alone, strict=True)):
        skip, apart = pads if row == 0 else 0, start.copy()
        query, key, value = (states[:, :, skip:] for states in single.tokens())
        positions = single.valid.sum(-1, keepdim=True) + torch.arange(tokens - skip)
        expected = apart.attend(query, key, value, positions, layer.logits)
        torch.testing.assert_close(output[row, :, skip:], expected[0], atol=1e-5, rtol=1e-5)
        assert held(apart)[0] == held(holder)[row]


def sequences_may_pause(
    layer: Layer, holder: Decoding, rows: list[Layer], alone: list[Decoding], expected: Tensor, pattern: list[int]
) -> None:
    """Padding in any step of any row, also after an eviction has left a hole: each row ends as it would alone."""
    tokens, batch = layer.scene.tokens, len(layer.scene.pads)
    done = [0] * batch
    for bits in pattern:
        active = [bool(bits >> row & 1) and done[row] < tokens for row in range(batch)]
        if not any(active):
            continue
        now = [min(token, tokens - 1) for token in done]
        query, key, value = (
            torch.stack([states[row, :, now[row]] for row in range(batch)])[:, :, None] for states in layer.tokens()
        )
        positions = layer.valid.sum(-1, keepdim=True) + torch.tensor(done)[:, None]
        output = holder.attend(query, key, value, positions, layer.logits, arrived=torch.tensor(active)[:, None])
        for row in range(batch):
            if active[row]:
                torch.testing.assert_close(output[row, :, 0], expected[row, :, done[row]], atol=1e-5, rtol=1e-5)
                done[row] += 1
    for row, (single, start) in enumerate(zip(rows, alone, strict=True)):
        apart = start.copy()
        if done[row]:
            feed(single, apart, 0, done[row])
        assert held(apart)[0] == held(holder)[row]
        assert torch.equal(holder.entries()[row], apart.entries()[0])


def rows_can_be_rearranged_and_copied(layer: Layer, saved: Decoding, outputs: Tensor, end: Decoding) -> None:
    """At any time: a copy from the middle goes on to the same end, and so do its rows in another order."""
    tokens = layer.scene.tokens
    half = tokens // 2
    order = [len(layer.scene.pads) - 1, 0, 0]
    if half:
        feed(layer, saved, 0, half)
    moved = saved.copy().select_rows(order)
    query, key, value = (states[order][:, :, half:] for states in layer.tokens())
    positions = (layer.valid.sum(-1, keepdim=True) + torch.arange(half, tokens))[order]
    again = moved.attend(query, key, value, positions, layer.logits)
    torch.testing.assert_close(again, outputs[order][:, :, half:], atol=1e-6, rtol=1e-6)
    assert held(moved) == [held(end)[row] for row in order]
    assert torch.equal(moved.most_entries(), end.most_entries()[order])
    replayed = feed(layer, saved, half, tokens - half)
    torch.testing.assert_close(replayed, outputs[:, :, half:], atol=1e-6, rtol=1e-6)
    assert held(saved) == held(end)


@in_turn(name=[name for name in BUILT_IN if name not in ("kvzip", "kvzap")], phases=["decode", "both"])
def test_replay_equals_token_by_token(name: str, phases: str) -> None:
    policy = example(name)

    @settings(properties, max_examples=at_most(15).max_examples)
    @given(scenes())
    def equal(scene: Scene) -> None:
        check(scene, policy if phases == "both" else None, policy)

    equal()


def check(scene: Scene, prefill: Policy | None, decode: Policy) -> None:
    layer = Layer(scene)
    before = [tensor.clone() for tensor in (layer.query, layer.key, layer.value)]
    outputs, _ = layer.decode(prefill, decode)
    used = [policy for policy in (prefill, decode) if policy is not None]
    followed = layer.followed(layer.observation(*used))
    found = followed.replay(prefill and layer.rule(prefill), layer.rule(decode))
    for token in range(scene.tokens):
        for row, pad in enumerate(scene.pads):
            own = scene.length - pad + token
            shown = [(columns.nonzero()[:, 0] - pad).tolist() for columns in found.shown[row, :, token]]
            assert shown == [[*entries, own] for entries in layer.seen[token][row]]
    torch.testing.assert_close(found.outputs, outputs, atol=1e-5, rtol=1e-5)
    for tensor, same in zip((layer.query, layer.key, layer.value), before, strict=True):
        assert torch.equal(tensor, same)
