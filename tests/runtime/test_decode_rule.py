"""What holds for every policy while decoding: counts, protection, padding, batches, chunks, copies."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies import Policy, create_policy
from kvsearch.policies.ranking import at_each
from kvsearch.policies.registry import BUILT_IN
from kvsearch.runtime.decoding import Decoding
from kvsearch.runtime.eviction import evict
from tests.policies.contract import DIM, properties, rope
from tests.runtime.layers import Layer, Scene, held, scenes
from tests.runtime.policies import SMALL

every_policy = pytest.mark.parametrize("name", SMALL)
EXEMPT = ("full", "duo_attention")


def begin(layer: Layer, prefill: Policy | None, decode: Policy) -> Decoding:
    used = [policy for policy in (prefill, decode) if policy is not None]
    holder = evict(layer.observation(*used), prefill and layer.rule(prefill), layer.rule(decode), rope)
    assert isinstance(holder, Decoding)
    return holder


def feed(layer: Layer, holder: Decoding, first: int, count: int, valid: Tensor | None = None) -> Tensor:
    """Tokens `first` to `first + count` after the prompt, as one chunk."""
    query, key, value = (states[:, :, first : first + count] for states in layer.tokens())
    positions = layer.valid.sum(-1, keepdim=True) + torch.arange(first, first + count)
    return holder.attend(query, key, value, valid, positions, layer.logits)


@every_policy
def test_counts_protection_and_the_most_ever_held(name: str) -> None:
    policy = SMALL[name]

    @properties
    @given(scenes())
    def right(scene: Scene) -> None:
        layer = Layer(scene)
        for prefill in (None, policy):
            holder = begin(layer, prefill, policy)
            budgets, before = torch.tensor(scene.budgets), holder.entries()
            drops = at_each(policy.drop_at, budgets)
            most = before
            for token in range(scene.tokens):
                feed(layer, holder, token, 1)
                seen = layer.valid.sum(-1)[:, None] + token + 1
                prompt = (seen - token - 1).expand_as(before)
                free = at_each(policy.exempt, budgets.expand_as(before), prompt).bool()
                most = torch.maximum(most, before + 1)
                after = torch.where((before + 1 > budgets) & ~free, budgets + 1 - drops, before + 1)
                assert torch.equal(holder.entries(), after)
                assert torch.equal(holder.most_entries(), most)
                before = after
                sinks, recent = at_each(policy.protected_at, budgets).unbind(-1)
                for row, heads in enumerate(held(holder)):
                    for head, kept in enumerate(heads):
                        assert kept == sorted(set(kept))
                        assert 0 <= kept[0] <= kept[-1] < int(seen[row])
                        protected = {
                            *range(int(sinks[head])),
                            *range(int(seen[row]) - int(recent[head]), int(seen[row])),
                        }
                        if prefill is None:  # a prefill phase may have dropped sinks that did not fit
                            assert {index for index in protected if 0 <= index < seen[row]} <= set(kept)

    right()


@every_policy
def test_padding_batches_and_chunks_change_nothing(name: str) -> None:
    policy = SMALL[name]

    @properties
    @given(scenes())
    def same(scene: Scene) -> None:
        layer = Layer(scene)
        holder = begin(layer, policy, policy)
        one_by_one = torch.cat([feed(layer, holder, token, 1) for token in range(scene.tokens)], 2)
        together = begin(layer, policy, policy)
        torch.testing.assert_close(feed(layer, together, 0, scene.tokens), one_by_one, atol=1e-6, rtol=1e-6)
        assert held(together) == held(holder)
        for row in range(len(scene.pads)):
            alone = unpadded(layer, row)
            apart = begin(alone, policy, policy)
            output = feed(alone, apart, 0, scene.tokens)
            torch.testing.assert_close(output[0], one_by_one[row], atol=1e-5, rtol=1e-5)
            assert held(apart)[0] == held(holder)[row]

    same()


def unpadded(layer: Layer, row: int) -> Layer:
    """One sequence of a layer on its own, without its padding."""
    pads = layer.scene.pads[row]
    made = Layer(layer.scene)
    made.scene = dataclasses.replace(layer.scene, length=layer.scene.length - pads, pads=(0,))
    made.query, made.key, made.value = (t[row : row + 1, :, pads:] for t in (layer.query, layer.key, layer.value))
    made.valid = layer.valid[row : row + 1, pads:]
    return made


@every_policy
def test_padding_among_the_tokens_changes_nothing(name: str) -> None:
    """A padded question: its first sequence starts later, and ends as if the padding had not been there."""
    policy = SMALL[name]

    @properties
    @given(scenes(max_tokens=6))
    def same(scene: Scene) -> None:
        layer = Layer(scene)
        pads = scene.tokens // 2
        valid = torch.ones(len(scene.pads), scene.tokens, dtype=torch.bool)
        valid[0, :pads] = False
        shift = torch.zeros(len(scene.pads), 1, dtype=torch.long)
        shift[0] = pads
        for prefill in (None, policy):
            holder = begin(layer, prefill, policy)
            query, key, value = layer.tokens()
            positions = (layer.valid.sum(-1, keepdim=True) + torch.arange(scene.tokens) - shift).clamp(min=0)
            output = holder.attend(query, key, value, valid, positions, layer.logits)
            for row in range(len(scene.pads)):
                skip = pads if row == 0 else 0
                alone = unpadded(layer, row)
                real = alone.scene.length
                alone.query, alone.key, alone.value = (
                    torch.cat([t[:, :, :real], t[:, :, real + skip :]], 2)
                    for t in (alone.query, alone.key, alone.value)
                )
                apart = begin(alone, prefill, policy)
                expected = feed(alone, apart, 0, scene.tokens - skip)
                torch.testing.assert_close(output[row, :, skip:], expected[0], atol=1e-5, rtol=1e-5)
                assert held(apart)[0] == held(holder)[row]

    same()


@every_policy
def test_sequences_may_pause_at_any_time(name: str) -> None:
    """Padding in any step of any row, also after an eviction has left a hole: each row ends as it would alone."""
    policy = SMALL[name]

    @properties
    @given(scenes(max_tokens=6), st.lists(st.integers(0, 3), min_size=4, max_size=20))
    def same(scene: Scene, pattern: list[int]) -> None:
        layer = Layer(scene)
        batch = len(scene.pads)
        expected = feed(layer, begin(layer, policy, policy), 0, scene.tokens)
        holder, done = begin(layer, policy, policy), [0] * batch
        for bits in pattern:
            active = [bool(bits >> row & 1) and done[row] < scene.tokens for row in range(batch)]
            if not any(active):
                continue
            now = [min(token, scene.tokens - 1) for token in done]
            query, key, value = (
                torch.stack([states[row, :, now[row]] for row in range(batch)])[:, :, None] for states in layer.tokens()
            )
            positions = layer.valid.sum(-1, keepdim=True) + torch.tensor(done)[:, None]
            output = holder.attend(query, key, value, torch.tensor(active)[:, None], positions, layer.logits)
            for row in range(batch):
                if active[row]:
                    torch.testing.assert_close(output[row, :, 0], expected[row, :, done[row]], atol=1e-5, rtol=1e-5)
                    done[row] += 1
        for row in range(batch):
            alone = unpadded(layer, row)
            apart = begin(alone, policy, policy)
            if done[row]:
                feed(alone, apart, 0, done[row])
            assert held(apart)[0] == held(holder)[row]
            assert torch.equal(holder.entries()[row], apart.entries()[0])

    same()


def test_statistics_while_decoding_are_those_of_the_prompt() -> None:
    """ExpectedAttention leaves the sinks' queries out, in the prompt and over the rows that decoding remembers."""
    policy = create_policy("expected_attention", {"sinks": 3, "future": 4})
    layer = Layer(Scene(2, 2, 9, (0, 4), 1, (4, 4), 0))
    given_prompt = layer.observation(policy).statistics[3]
    rule = begin(layer, None, policy).rule
    lengths = layer.valid.sum(-1)
    rows, heads = torch.arange(2).repeat_interleave(2), torch.arange(2).repeat(2)
    found = rule._statistics(rows, heads, lengths[rows])[3]
    torch.testing.assert_close(found.mean.reshape(2, 4, DIM), given_prompt.mean)
    torch.testing.assert_close(found.covariance.reshape(2, 4, DIM, DIM), given_prompt.covariance)


@every_policy
def test_rows_can_be_rearranged_and_copied_at_any_time(name: str) -> None:
    policy = SMALL[name]

    @properties
    @given(scenes())
    def same(scene: Scene) -> None:
        layer = Layer(scene)
        holder = begin(layer, None, policy)
        half = scene.tokens // 2
        if half:
            feed(layer, holder, 0, half)
        saved, order = holder.copy(), [len(scene.pads) - 1, 0, 0]
        output = feed(layer, holder, half, scene.tokens - half)
        moved = saved.select_rows(order)
        query, key, value = (states[order][:, :, half:] for states in layer.tokens())
        positions = (layer.valid.sum(-1, keepdim=True) + torch.arange(half, scene.tokens))[order]
        again = moved.attend(query, key, value, None, positions, layer.logits)
        torch.testing.assert_close(again, output[order], atol=1e-6, rtol=1e-6)
        assert held(moved) == [held(holder)[row] for row in order]
        assert torch.equal(moved.most_entries(), holder.most_entries()[order])
        replayed = feed(layer, saved, half, scene.tokens - half)
        torch.testing.assert_close(replayed, output, atol=1e-6, rtol=1e-6)

    same()


@every_policy
def test_a_prompt_in_chunks_starts_from_the_same_state(name: str) -> None:
    policy = SMALL[name]

    @properties
    @given(scenes(max_length=10, max_tokens=3))
    def same(scene: Scene) -> None:
        layer = Layer(scene)
        outputs = []
        for chunk in (None, 3):
            observation = layer.observation(policy, chunk=chunk)
            holder = evict(observation, layer.rule(policy), layer.rule(policy), rope)
            assert isinstance(holder, Decoding)
            outputs.append((feed(layer, holder, 0, scene.tokens), held(holder)))
        torch.testing.assert_close(outputs[0][0], outputs[1][0], atol=1e-5, rtol=1e-5)
        assert outputs[0][1] == outputs[1][1]

    same()


def test_every_policy_is_covered() -> None:
    assert {policy.name for policy in SMALL.values()} == set(BUILT_IN)
    for name in BUILT_IN:
        create_policy(name)
