from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.core import errors
from kvsearch.core.errors import KvsearchWarning
from kvsearch.kernels import attention
from kvsearch.runtime.attention import attend_ragged
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.store import blocks, flat
from kvsearch.runtime.store.blocks import group_segments
from kvsearch.runtime.store.cache_file import CacheShape, TensorReader, _dump_ragged, _load_ragged
from kvsearch.runtime.store.storage import RaggedStore
from tests.examples import fixed
from tests.kernels.serving import interpreted
from tests.runtime.places import INTERPRETER, PLACES, SLOW_PLACES, at


@fixed()
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40))
def test_segments_of_similar_length_share_a_block(lengths: list[int]) -> None:
    groups = group_segments(lengths, torch.device("cpu"))
    assert sorted(index for members in groups for index in members) == list(range(len(lengths)))
    assert all(members == sorted(members) for members in groups)
    widths = [max(lengths[index] for index in members) for members in groups]
    assert all(a < b for a, b in pairwise(widths))
    waste = sum(width * len(members) for width, members in zip(widths, groups, strict=True)) - sum(lengths)
    assert 0 <= waste <= blocks.WASTE * sum(lengths)


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, shown: Tensor, softcap: float | None, log_weights: Tensor
) -> Tensor:
    """[B, Hq, q, D] against [B, Hkv, T, D] with shown [B, Hkv, q, T]; a row that sees nothing gives zero.

    `log_weights` [B, Hkv, T] are added to logits.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values, shown, log_weights = (t.repeat_interleave(group, 1) for t in (keys, values, shown, log_weights))
    logits = query @ keys.transpose(-1, -2) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + log_weights[:, :, None]
    return logits.masked_fill(~shown, float("-inf")).softmax(-1).nan_to_num(0.0) @ values


def packed(keys: Tensor, values: Tensor, keep: Tensor, index: Tensor, log_weights: Tensor | None = None) -> RaggedStore:
    """What `keep` leaves of a dense layer."""
    counts, lengths = keep.sum(-1).cpu().numpy(), (index[:, -1] + 1).tolist()
    return RaggedStore.pack(keys, values, keep, index, counts, lengths, log_weights)


class Pair:
    """A ragged store beside the dense tensors and the mask it stands for; entries are `weighted`, or not."""

    def __init__(
        self, batch: int, heads: int, length: int, seed: int, device: str = "cpu", weighted: bool = False
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.heads = device, heads
        self.keys, self.values = self.normal(batch, heads, length, 4), self.normal(batch, heads, length, 6)
        share = torch.rand(batch, heads, 1, generator=self.generator)
        self.held = (torch.rand(batch, heads, length, generator=self.generator) < share).to(device)
        self.index = torch.arange(length, device=device).expand(batch, -1)
        self.tokens = torch.full((batch,), length, device=device)
        self.log_weights = 2 * weighted * self.normal(batch, heads, length)
        weights = self.log_weights if weighted else None
        self.store = packed(self.keys, self.values, self.held, self.index, weights)

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
        real = torch.ones(self.batch, count, dtype=torch.bool, device=self.device)
        real[0, :pads] = False
        self.store.append(*self._arrive(real), real if pads else None)

    def put(self, count: int, room: int) -> None:
        """Add `count` tokens as decode steps do that are captured, with room for `room` of them at a time."""
        self.store.reserve(room)
        for _ in range(count):
            self.store.prepare_step()
            before = self.lasting()
            self.store.put(*self._arrive(torch.ones(self.batch, 1, dtype=torch.bool, device=self.device)))
            assert self.lasting() == before
            self.store.finish_step()

    def lasting(self) -> list[int]:
        """Where the tensors of the store lie."""
        return [tensor.data_ptr() for block in self.store.blocks for tensor in block.tensors()]

    def _arrive(self, real: Tensor) -> tuple[Tensor, Tensor]:
        count = real.shape[1]
        keys, values = self.normal(self.batch, self.heads, count, 4), self.normal(self.batch, self.heads, count, 6)
        new = torch.where(real, self.tokens[:, None] + real.cumsum(-1) - 1, -1)
        self.tokens = self.tokens + real.sum(-1)
        self.index = torch.cat([self.index, new], 1)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.held = torch.cat([self.held, real[:, None].expand(-1, self.heads, -1)], 2)
        self.log_weights = torch.nn.functional.pad(self.log_weights, (0, count))
        return keys, values

    def crop(self, count: int) -> None:
        self.store.crop(count)
        self.keys, self.values, self.held, self.log_weights = (
            t[:, :, : self.length - count] for t in (self.keys, self.values, self.held, self.log_weights)
        )
        self.tokens = self.tokens - (self.index[:, self.length :] >= 0).sum(-1)
        self.index = self.index[:, : self.length]

    def select(self, rows: list[int]) -> None:
        self.store = self.store.select_rows(rows)
        self.keys, self.values, self.held = self.keys[rows], self.values[rows], self.held[rows]
        self.index, self.tokens = self.index[rows], self.tokens[rows]
        self.log_weights = self.log_weights[rows]

    def reload(self) -> None:
        """Write the store to a file's tensors and read them again."""
        reader = TensorReader(_dump_ragged(self.store), "", torch.device(self.device))
        shape = CacheShape(self.batch, self.heads, self.heads, self.length, 0, self.keys.dtype)
        self.store = _load_ragged(reader, shape)

    def check(self, rows: int, softcap: float | None = None) -> None:
        assert torch.equal(self.store.entries(), self.held.sum(-1).cpu())
        assert self.store.tokens.tolist() == self.tokens.tolist()
        for sequence in range(self.batch):
            for head in range(self.heads):
                expected = self.index[sequence, self.held[sequence, head]].tolist()
                assert self.store.kept_positions(sequence, head) == expected
        query = self.normal(self.batch, 3 * self.heads, rows, 4)
        causal = torch.ones(rows, self.length, dtype=torch.bool, device=self.device).tril(self.length - rows)
        shown = self.held[:, :, None] & causal
        expected = dense_attention(query, self.keys, self.values, shown, softcap, self.log_weights)
        torch.testing.assert_close(
            attend_ragged(self.store, query, Logits(0.3, softcap)), expected, atol=2e-6, rtol=1e-5
        )
        rows_seen = shown.any(-1)
        assert bool(expected[rows_seen.repeat_interleave(3, 1)].abs().sum(-1).gt(0).all())


steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(0, 4)),
    st.tuples(st.just("put"), st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.just("crop"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("select"), st.integers(0, 2**12), st.just(0)),
    st.tuples(st.just("reload"), st.just(0), st.just(0)),
)
History = list[tuple[str, int, int]]


def follow(pair: Pair, history: History, softcap: float | None) -> None:
    for what, amount, extra in history:
        rows = 1
        if what == "append":
            pair.append(amount, min(extra, amount - 1))
            rows = amount
        elif what == "put":
            pair.put(amount, extra)
        elif what == "crop":
            pair.crop(min(amount, pair.store.appended))
        elif what == "select":
            pair.select([amount // 3**i % pair.batch for i in range(1 + amount % 4)])
        else:
            pair.reload()
        if pair.length:
            pair.check(rows, softcap)
    assert pair.store.batch == pair.batch


@pytest.mark.slow
@pytest.mark.parametrize("place", SLOW_PLACES)
@fixed(12)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 99), st.lists(steps, max_size=6),
    st.sampled_from([None, 2.0]), st.booleans(),
)  # fmt: skip
def test_any_history_equals_a_dense_cache_with_a_mask(
    place: str, batch: int, heads: int, length: int, seed: int, history: History, softcap: float | None, weighted: bool
) -> None:
    with at(place) as device:
        follow(Pair(batch, heads, length, seed, device, weighted), history, softcap)


@pytest.mark.parametrize("place", PLACES)
def test_log_weights_take_one_number_of_an_entry_where_there_are_some(place: str) -> None:
    with at(place) as device:
        plain, weighted = (Pair(2, 2, 40, 1, device, carries) for carries in (False, True))
        stored = sum(block.positions.numel() for block in weighted.store.blocks)
        assert weighted.store.nbytes() - plain.store.nbytes() == stored * weighted.keys.itemsize
        follow(weighted, [("append", 3, 1), ("put", 2, 2), ("select", 7, 0), ("append", 2, 0), ("reload", 0, 0)], None)


@pytest.mark.parametrize("place", PLACES)
def test_room_grows_by_an_eighth(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MIN_SPARE", 2)
    monkeypatch.setattr(flat, "MIN_SPARE", 2)
    with at(place) as device:
        pair = Pair(1, 2, 64, 3, device)
        before, row = pair.store.nbytes(), 2 * 4 * (4 + 6 + 1)  # bytes of a token
        entries = int(pair.store.entries().sum())
        assert row * entries / 2 <= before <= 1.1 * row * entries / 2 + 100
        for token in range(20):
            pair.append(1, 0)
            pair.check(1)
            assert pair.store.nbytes() <= 1.125 * (before + row * token) + 3 * row
        assert before < pair.store.nbytes()


class TestFlat:
    """What only the flat form does."""

    @pytest.fixture(autouse=True)
    def served(self) -> Iterator[None]:
        if INTERPRETER not in PLACES:
            pytest.skip("kernels are not interpreted here")
        with at(INTERPRETER):
            yield

    def test_no_padding_is_stored_and_attention_is_one_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keep = torch.zeros(2, 4, 500, dtype=torch.bool)
        for segment, length in enumerate([500, 0, 3, 77, 130, 1, 18, 250]):
            keep[segment // 4, segment % 4, :length] = True
        keys, values = torch.randn(2, 4, 500, 4), torch.randn(2, 4, 500, 6)
        store = packed(keys, values, keep, torch.arange(500).expand(2, -1))
        entries = int(keep.sum())
        assert [block.keys.shape for block in store.blocks] == [(entries, 4)]
        assert store.nbytes() <= entries * 4 * (4 + 6 + 1) + 8 * 8 * 4
        calls, attend = [], attention.attend
        monkeypatch.setattr(attention, "attend", lambda *given: (calls.append(1), attend(*given))[1])
        store.append(torch.randn(2, 4, 1, 4), torch.randn(2, 4, 1, 6))
        attend_ragged(store, torch.randn(2, 8, 1, 4), Logits(0.3))
        assert calls == [1]

    @fixed(10)
    @given(st.integers(0, 99), st.lists(steps, max_size=4))
    @pytest.mark.nightly
    def test_files_are_those_of_the_cpu(self, seed: int, history: History) -> None:
        """What is written of either form is the same to the bit, and can be read as either."""
        weighted = seed % 2 > 0
        flat_pair = Pair(2, 2, 1 + seed % 40, seed, weighted=weighted)
        with interpreted(False):
            dense_pair = Pair(2, 2, 1 + seed % 40, seed, weighted=weighted)
        for what, amount, extra in history:
            if what in ("append", "crop"):
                for pair in (flat_pair, dense_pair):
                    if what == "append":
                        pair.append(amount, min(extra, amount - 1))
                    else:
                        pair.crop(min(amount, pair.store.appended))
        written, expected = (_dump_ragged(pair.store) for pair in (flat_pair, dense_pair))
        assert isinstance(flat_pair.store.blocks[0], flat.FlatBlock)
        assert not isinstance(dense_pair.store.blocks[0], flat.FlatBlock)
        assert written.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == written[name].dtype
            assert torch.equal(tensor, written[name]), name
        dense_pair.reload()  # where kernels serve
        assert isinstance(dense_pair.store.blocks[0], flat.FlatBlock)
        with interpreted(False):
            flat_pair.reload()
            assert not isinstance(flat_pair.store.blocks[0], flat.FlatBlock)
        for pair in (flat_pair, dense_pair):
            pair.append(2, 1)
            pair.check(2)

    def test_heads_too_wide_for_kernels_stay_in_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(errors, "_said", set())
        keys = torch.randn(1, 2, 5, 320)
        with pytest.warns(KvsearchWarning, match="heads of 320"):
            store = packed(keys, keys, torch.ones(1, 2, 5) > 0, torch.arange(5)[None])
        assert not isinstance(store.blocks[0], flat.FlatBlock)
