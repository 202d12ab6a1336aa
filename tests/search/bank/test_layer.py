"""Attention over shared prefixes: against a softmax over the concatenation, and what tokens see of each other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.runtime.logits import Logits
from kvsearch.search.bank.passes import PrefixLayer, SuffixTokens, VisibleKV, WindowLayer, attend_prefix
from tests.examples import at_most


def yes(*rows: str) -> list[list[bool]]:
    """Rows of a mask, x where something is seen."""
    return [[letter == "x" for letter in row] for row in rows]


def test_padding_takes_no_position_and_is_seen_by_itself_alone() -> None:
    suffix = SuffixTokens(torch.tensor([5, 9]))
    positions = suffix.extend(torch.tensor([[False, True, True], [True, True, True]]))
    assert positions[:, 1:].tolist() == [[5, 6], [10, 11]]
    assert positions[1, 0] == 9
    assert suffix.seen[:, 0, 0].tolist() == [yes("x..", ".x.", ".xx"), yes("x..", "xx.", "xxx")]


def test_a_prefix_is_a_view_with_a_mask_only_where_heads_differ() -> None:
    states = torch.arange(2 * 2 * 6.0).view(2, 2, 6, 1)
    entries = torch.tensor([[[3, 3], [3, 3]], [[2, 5], [1, 4]]])  # [P, S, Hkv]
    same, ragged = PrefixLayer(
        [(states, states)], SuffixTokens(torch.tensor([6, 6])), *[entries[:, :, None]] * 2
    ).shared()
    assert same.keys.data_ptr() == ragged.values.data_ptr() == states.data_ptr()
    assert same.keys.shape == (2, 2, 3, 1)
    assert same.seen is None
    assert ragged.seen[:, :, 0, 0].tolist() == [yes("xx...", "xxxxx"), yes("x....", "xxxx.")]


def test_a_window_moves_with_the_token_and_ends_with_the_prompt() -> None:
    """Prompts of 3 and 9 tokens, a window of 4: the stored entries are the last 3 of each."""
    states = torch.zeros(2, 1, 3, 1)
    suffix = SuffixTokens(torch.tensor([3, 9]))
    layer = WindowLayer(states, states, suffix, window=4, candidates=2)
    suffix.extend(torch.ones(2, 2, dtype=torch.bool))
    first, second = layer.shared()
    assert first is second
    assert first.seen[:, 0, 0].tolist() == [yes("xxx", ".xx")] * 2
    suffix.extend(torch.ones(2, 3, dtype=torch.bool))
    assert layer.seen()[:, 0, 0].tolist() == [yes("xxx..", "xxxx.", ".xxxx")] * 2  # type: ignore[index]


def naive(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """One softmax per query; keys and values have the query heads, `seen` is [S, Hq, q, N]."""
    scores = (query @ keys.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values


@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(0, 7), st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
@at_most(60)
def test_attention_is_one_softmax_over_prefix_and_own_tokens(
    samples: int, heads: int, group: int, rows: int, width: int, capped: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query = drawn(samples, heads * group, rows, 4)
    far, far_values = drawn(samples, heads, width, 4), drawn(samples, heads, width, 5)
    near, near_values = drawn(samples, heads, rows, 4), drawn(samples, heads, rows, 5)
    lengths = torch.randint(0, width + 1, (samples, heads), generator=generator)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    prefix = torch.arange(width) < lengths[..., None]
    logits = Logits(0.7, 2.0 if capped else None)
    found = attend_prefix(
        query,
        VisibleKV(far, far_values, prefix[:, :, None, None]),
        VisibleKV(near, near_values, causal[None, None, None]),
        logits,
    )
    keys = torch.cat([far, near], 2).repeat_interleave(group, 1)
    values = torch.cat([far_values, near_values], 2).repeat_interleave(group, 1)
    seen = torch.cat([prefix[:, :, None].expand(-1, -1, rows, -1), causal.expand(samples, heads, -1, -1)], -1)
    expected = naive(query, keys, values, seen.repeat_interleave(group, 1), 0.7, logits.softcap)
    assert found.shape == (samples, heads * group, rows, 5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
