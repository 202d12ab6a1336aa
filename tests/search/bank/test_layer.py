"""Attention over shared prefixes, against a softmax over the concatenation."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.runtime.logits import Logits
from kvsearch.search.bank.passes import PrefixLayer, SuffixTokens, VisibleKV, attend_prefix
from tests.examples import at_most


def yes(*rows: str) -> list[list[bool]]:
    """Rows of a mask, x where something is seen."""
    return [[letter == "x" for letter in row] for row in rows]


def test_a_prefix_is_a_view_with_a_mask_only_where_heads_or_samples_differ() -> None:
    states = torch.arange(2 * 2 * 6.0).view(2, 2, 6, 1)
    entries = torch.tensor([[[3, 3], [3, 3]], [[4, 5], [3, 5]], [[2, 5], [1, 5]]])  # [P, S, Hkv]
    same, near, apart = PrefixLayer(
        [(states, states)], SuffixTokens(torch.tensor([6, 6])), *[entries[:, :, None]] * 2
    ).visible_prompt()
    ((heads, whole),) = same
    assert heads == slice(0, 2)
    assert whole.keys.data_ptr() == whole.values.data_ptr() == states.data_ptr()
    assert whole.keys.shape == (2, 2, 3, 1)
    assert whole.seen is None
    ((_, masked),) = near
    assert masked.seen[:, :, 0, 0].tolist() == [yes("xxxx.", "xxxxx"), yes("xxx..", "xxxxx")]
    # one large head does not make the other as wide
    (first, small), (second, large) = apart
    assert (first, second) == (slice(0, 1), slice(1, 2))
    assert small.seen[:, :, 0, 0].tolist() == [yes("xx"), yes("x.")]
    assert large.keys.shape == (2, 1, 5, 1)
    assert large.seen is None


def naive(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One softmax per query; keys and values have the query heads, `seen` is [S, Hq, q, N], `sinks` [Hkv, G]."""
    scores = (query @ keys.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        beside = sinks.flatten()[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ values
    return scores.softmax(-1) @ values


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
    sinks = drawn(heads, group) if capped else None
    logits = Logits(0.7, 2.0 if capped else None, sinks=sinks)

    def attend(part: slice) -> Tensor:
        count = int(lengths[:, part].max())
        return attend_prefix(
            query[:, part.start * group : part.stop * group],
            VisibleKV(far[:, part, :count], far_values[:, part, :count], prefix[:, part, None, None, :count]),
            VisibleKV(near[:, part], near_values[:, part], causal[None, None, None]),
            logits,
            part,
        )

    together = attend(slice(0, heads))
    one_by_one = torch.cat([attend(slice(head, head + 1)) for head in range(heads)], 1)
    keys = torch.cat([far, near], 2).repeat_interleave(group, 1)
    values = torch.cat([far_values, near_values], 2).repeat_interleave(group, 1)
    seen = torch.cat([prefix[:, :, None].expand(-1, -1, rows, -1), causal.expand(samples, heads, -1, -1)], -1)
    expected = naive(query, keys, values, seen.repeat_interleave(group, 1), 0.7, logits.softcap, sinks)
    assert together.shape == (samples, heads * group, rows, 5)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one_by_one, expected, atol=1e-5, rtol=1e-5)
