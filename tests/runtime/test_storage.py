from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.runtime import storage
from kvsearch.runtime.attention import ragged_attention
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.storage import RaggedStore, bucket
from tests.examples import fixed
from tests.families import DEVICES

CPU = torch.device("cpu")


class TestBucket:
    @fixed()
    @given(st.lists(st.integers(0, 3000), min_size=1, max_size=40))
    def test_segments_of_similar_length_share_a_block(self, lengths: list[int]) -> None:
        groups = bucket(lengths, CPU)
        assert sorted(index for members in groups for index in members) == list(range(len(lengths)))
        assert all(members == sorted(members) for members in groups)
        widths = [max(lengths[index] for index in members) for members in groups]
        assert all(a < b for a, b in pairwise(widths))
        waste = sum(width * len(members) for width, members in zip(widths, groups, strict=True)) - sum(lengths)
        assert 0 <= waste <= storage.WASTE * sum(lengths)

    def test_equal_lengths_share_one_block(self) -> None:
        assert bucket([7, 7, 7], CPU) == [[0, 1, 2]]

    def test_near_lengths_do_too(self) -> None:
        assert bucket([1000, 500, 995], CPU) == [[1], [0, 2]]
        assert bucket([1000, 500, 900], CPU) == [[1], [2], [0]]


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, shown: Tensor, softcap: float | None) -> Tensor:
    """[B, Hq, q, D] against [B, Hkv, T, D] with shown [B, Hkv, q, T]; a row that sees nothing gives zero."""
    group = query.shape[1] // keys.shape[1]
    keys, values, shown = (t.repeat_interleave(group, 1) for t in (keys, values, shown))
    logits = query @ keys.transpose(-1, -2) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~shown, float("-inf")).softmax(-1).nan_to_num(0.0) @ values


class Pair:
    """A ragged store beside the dense tensors and the mask it stands for."""

    def __init__(self, batch: int, heads: int, length: int, seed: int, device: str = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.heads = device, heads
        self.keys, self.values = self.normal(batch, heads, length, 4), self.normal(batch, heads, length, 6)
        share = torch.rand(batch, heads, 1, generator=self.generator)
        self.held = (torch.rand(batch, heads, length, generator=self.generator) < share).to(device)
        self.index = torch.arange(length, device=device).expand(batch, -1)
        self.store = RaggedStore.pack(self.keys, self.values, self.held, self.index)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def append(self, count: int, pads: int) -> None:
        """Add `count` tokens; the first sequence gets `pads` pads in front."""
        keys, values = self.normal(self.batch, self.heads, count, 4), self.normal(self.batch, self.heads, count, 6)
        real = torch.ones(self.batch, count, dtype=torch.bool, device=self.device)
        real[0, :pads] = False
        self.store.append(keys, values, real if pads else None)
        new = torch.where(real, self.index.amax(-1, keepdim=True) + real.cumsum(-1), -1)
        self.index = torch.cat([self.index, new], 1)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.held = torch.cat([self.held, real[:, None].expand(-1, self.heads, -1)], 2)

    def crop(self, count: int) -> None:
        self.store.crop(count)
        self.keys, self.values, self.held = (
            t[:, :, : self.length - count] for t in (self.keys, self.values, self.held)
        )
        self.index = self.index[:, : self.length]

    def select(self, rows: list[int]) -> None:
        self.store = self.store.select_rows(rows)
        self.keys, self.values, self.held = self.keys[rows], self.values[rows], self.held[rows]
        self.index = self.index[rows]

    def check(self, rows: int, softcap: float | None = None) -> None:
        assert torch.equal(self.store.entries(), self.held.sum(-1).cpu())
        for sequence in range(self.batch):
            for head in range(self.heads):
                expected = self.index[sequence, self.held[sequence, head]].tolist()
                assert self.store.kept_positions(sequence, head) == expected
        query = self.normal(self.batch, 3 * self.heads, rows, 4)
        causal = torch.ones(rows, self.length, dtype=torch.bool, device=self.device).tril(self.length - rows)
        shown = self.held[:, :, None] & causal
        expected = dense_attention(query, self.keys, self.values, shown, softcap)
        torch.testing.assert_close(
            ragged_attention(self.store, query, Logits(0.3, softcap)), expected, atol=2e-6, rtol=1e-5
        )
        rows_seen = shown.any(-1)
        assert bool(expected[rows_seen.repeat_interleave(3, 1)].abs().sum(-1).gt(0).all())


steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(0, 4)),
    st.tuples(st.just("crop"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("select"), st.integers(0, 2**12), st.just(0)),
)


@pytest.mark.parametrize("device", DEVICES)
@fixed()
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 99), st.lists(steps, max_size=6),
    st.sampled_from([None, 2.0]),
)  # fmt: skip
def test_any_history_equals_a_dense_cache_with_a_mask(
    device: str,
    batch: int,
    heads: int,
    length: int,
    seed: int,
    history: list[tuple[str, int, int]],
    softcap: float | None,
) -> None:
    pair = Pair(batch, heads, length, seed, device)
    for what, amount, pads in history:
        rows = 1
        if what == "append":
            pair.append(amount, min(pads, amount - 1))
            rows = amount
        elif what == "crop":
            pair.crop(min(amount, pair.store.appended))
        else:
            pair.select([amount // 3**i % pair.batch for i in range(1 + amount % 4)])
        if pair.length:
            pair.check(rows, softcap)
    assert pair.store.batch == pair.batch


@pytest.mark.parametrize("device", DEVICES)
def test_room_grows_by_an_eighth(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MIN_SPARE", 2)
    pair = Pair(1, 2, 64, 3, device)
    before = pair.store.nbytes()
    assert all(block.keys.shape[1] == block.end for block in pair.store.blocks)
    for _ in range(20):
        pair.append(1, 0)
        pair.check(1)
    assert before < pair.store.nbytes()
    assert all(block.keys.shape[1] <= 1.125 * block.end + 3 for block in pair.store.blocks)


def test_packing_leaves_the_dense_layer_alone() -> None:
    keys, values = torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4)
    before = keys.clone(), values.clone()
    store = RaggedStore.pack(keys, values, torch.rand(2, 2, 8) < 0.5, torch.arange(8).expand(2, -1))
    for block in store.blocks:
        block.keys.zero_()
        block.values.zero_()
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


def test_positions_are_those_given() -> None:
    keep = torch.tensor([[[True, False, True]], [[False, True, True]]])
    positions = torch.tensor([[10, 11, 12], [20, 21, 22]])
    store = RaggedStore.pack(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2), keep, positions)
    assert store.kept_positions(0, 0) == [10, 12]
    assert store.kept_positions(1, 0) == [21, 22]
    assert store.kept_positions(2, 0) == []
