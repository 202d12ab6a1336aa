"""Layer attention output loss and its bounds: a worked example, the identity behind the bound, and brute force."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies import scoring
from kvsearch.signals.attention_rows import (
    attention_change,
    bound_output_loss,
    compute_output_loss,
    eviction_errors,
    kept_prefix_errors,
)


def example(*hidden: int) -> tuple[Tensor, ...]:
    """One query that attends with [.5, .3, .2]; W_O is the identity."""
    keys = torch.tensor([0.5, 0.3, 0.2]).log().view(1, 1, 3, 1)
    values = torch.tensor([[1.0, 0.0], [0.0, 2.0], [4.0, 0.0]]).view(1, 1, 3, 2)
    shown = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    shown[..., list(hidden)] = False
    return torch.ones(1, 1, 1, 1), keys, values, shown


def test_a_worked_example() -> None:
    query, keys, values, shown = example(2)
    outputs, evicted = attention_change(query, keys, values, shown, scaling=1.0)
    expected = torch.tensor([1.3, 0.6]) - torch.tensor([0.625, 0.75])
    torch.testing.assert_close(outputs.flatten(), expected)
    assert evicted.item() == pytest.approx(0.2)
    weight = torch.eye(2)[None]
    assert compute_output_loss(outputs, weight).item() == pytest.approx(0.825)
    by_layer, by_head = bound_output_loss(evicted, values, weight)
    assert by_layer.item() == pytest.approx(2 * 4 * 0.2)
    assert by_head.item() == pytest.approx(1.6)


def test_bounds_of_heads_of_different_weight() -> None:
    """Rows of W_O with L1 norms 3 and 1 in head 0, 7 and 2 in head 1; the heads share one kv head."""
    weight = torch.tensor([[[1.0, -2.0], [0.5, 0.5]], [[-3.0, 4.0], [2.0, 0.0]]])
    values = torch.tensor([[1.0, -1.0], [2.0, 3.0]]).view(1, 1, 2, 2)
    by_layer, by_head = bound_output_loss(torch.tensor([0.1, 0.4]).view(1, 2, 1), values, weight)
    assert by_layer.item() == pytest.approx(2 * 7 * (5 * 0.1 + 5 * 0.4))
    assert by_head.item() == pytest.approx(2 * (3 * 5 * 0.1 + 7 * 5 * 0.4))


def test_a_value_bounds_only_the_queries_that_see_it() -> None:
    values = torch.tensor([1.0, 2.0, 8.0]).view(1, 1, 3, 1)
    by_layer, _ = bound_output_loss(torch.full((1, 1, 2), 0.5), values, torch.ones(1, 1, 1))
    assert by_layer.tolist() == [[2.0, 8.0]]


def test_a_small_mass_does_not_drown_in_rounding() -> None:
    keys = torch.tensor([0.0, 0.0, -30.0]).view(1, 1, 3, 1)
    values = torch.tensor([1.0, 3.0, 2.0]).view(1, 1, 3, 1)
    shown = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    outputs, evicted = attention_change(torch.ones(1, 1, 1, 1), keys, values, shown, scaling=1.0)
    mass = torch.tensor(-30.0).double().exp().item() / 2
    assert evicted.item() == pytest.approx(mass, rel=1e-5)
    # 2 m - m * (1 + 3) / 2 is 0 to first order in m
    assert abs(outputs.item()) < 1e-6 * mass


def test_a_kept_entry_that_was_hardly_looked_at() -> None:
    keys = torch.tensor([0.0, -500.0]).view(1, 1, 2, 1)
    values = torch.tensor([1.0, 5.0]).view(1, 1, 2, 1)
    shown = torch.tensor([False, True]).view(1, 1, 1, 2)
    outputs, evicted = attention_change(torch.ones(1, 1, 1, 1), keys, values, shown, scaling=1.0)
    assert outputs.item() == pytest.approx(1.0 - 5.0)
    assert evicted.item() == pytest.approx(1.0)


@dataclass(frozen=True)
class Case:
    """Random states of a layer and what its queries are shown."""

    query: Tensor
    keys: Tensor
    values: Tensor
    shown: Tensor
    weight: Tensor
    softcap: float | None

    def attention(self, hidden: bool) -> Tensor:
        """Attention in float64 without any of the shortcuts, [B, Hq, K, N]."""
        rows, length = self.shown.shape[2:]
        group = self.query.shape[1] // self.keys.shape[1]
        scores = self.query.double() @ self.keys.double().repeat_interleave(group, 1).transpose(-1, -2) * 0.7
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        allowed = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        if hidden:
            allowed = allowed & self.shown.repeat_interleave(group, 1)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp() * allowed
        return exponentials / exponentials.sum(-1, keepdim=True)

    def change(self) -> Tensor:
        """Change of the heads' outputs, [B, Hq, K, Dv] float64."""
        group = self.query.shape[1] // self.keys.shape[1]
        return (self.attention(False) - self.attention(True)) @ self.values.double().repeat_interleave(group, 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    heads, group, dim, rows = (draw(st.integers(1, most)) for most in (3, 4, 5, 4))
    length, width, batch = rows + draw(st.integers(0, 12)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))  # of the logits: from even to sharp attention

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shown = torch.rand(batch, heads, rows, length, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    shown |= torch.arange(length) == torch.arange(length - rows, length)[:, None]  # a token sees itself
    return Case(
        spread * normal(batch, heads * group, rows, dim), normal(batch, heads, length, dim),
        normal(batch, heads, length, dim + 1), shown, normal(heads * group, dim + 1, width),
        draw(st.sampled_from([None, 3.0])),
    )  # fmt: skip


@given(cases())
def test_losses_are_those_of_brute_force_and_within_the_bounds(case: Case) -> None:
    outputs, evicted = attention_change(case.query, case.keys, case.values, case.shown, 0.7, case.softcap)
    loss = compute_output_loss(outputs, case.weight)
    by_layer, by_head = bound_output_loss(evicted, case.values, case.weight)
    torch.testing.assert_close(outputs.double(), case.change(), atol=1e-5, rtol=1e-4)
    moved = torch.einsum("bhkd,hdm->bkm", case.change(), case.weight.double())
    torch.testing.assert_close(loss.double(), moved.abs().sum(-1), atol=1e-4, rtol=1e-4)
    moved = (case.attention(False) - case.attention(True)).abs().sum(-1)
    torch.testing.assert_close(2 * evicted.double(), moved, atol=1e-6, rtol=1e-4)  # by twice the evicted mass
    assert (loss <= by_head * (1 + 1e-4)).all()
    assert (by_head <= by_layer * (1 + 1e-5)).all()


@given(cases(), st.integers(0, 5), st.booleans())
def test_errors_under_many_masks_are_those_of_one_after_the_other(case: Case, masks: int, has_sinks: bool) -> None:
    """As from the change of the outputs of each mask, at some of the rows."""
    generator = torch.Generator().manual_seed(masks)
    heads, rows, length = case.shown.shape[1:]
    context = length - rows
    assume(context > 0)
    keeps = torch.rand(masks + 1, heads, context, generator=generator) < 0.5
    sinks = torch.randn(heads, case.query.shape[1] // heads, generator=generator) if has_sinks else None
    how = (0.7, case.softcap, sinks)
    places = torch.arange(0, rows, 2)
    weight = case.weight.unflatten(0, (heads, -1)).flatten(1, 2)
    own = torch.ones(1, heads, rows, rows, dtype=torch.bool)
    states = (case.query[:1], case.keys[:1], case.values[:1])
    query, keys, values = (each[0] for each in states)
    factors = weight @ weight.transpose(1, 2)
    errors = eviction_errors(query[:, places], keys, values, context + places, keeps, factors, *how)
    for keep, found in zip(keeps, errors, strict=True):
        shown = torch.cat([keep[None, :, None].expand(1, -1, rows, -1), own], -1)
        change = attention_change(*states, shown, *how)[0][0].unflatten(0, (heads, -1))
        moved = torch.einsum("hgkd,hgdm->hkm", change, case.weight.unflatten(0, (heads, -1)))[:, places]
        torch.testing.assert_close(found, moved.square().sum(-1).mean(-1), atol=1e-5, rtol=1e-4)
        if bool(keep.all()):
            assert float(found.max()) == 0


def test_errors_of_two_entries_in_either_order() -> None:
    """A token gives .5 and .3 to two entries and .2 to itself; along g they have 1, 2 and 4, so the output is 1.9.

    Alone it has 4, with the second entry (.6 + .8) / .5 = 2.8, with the first (.5 + .8) / .7.
    """
    keys = torch.tensor([0.5, 0.3, 0.2]).log().view(1, 3, 1)
    values = torch.tensor([[1.0, 0.0], [0.0, 2.0], [4.0, 0.0]])[None]
    orders = [torch.tensor([[1, 0]]), torch.tensor([[0, 1]])]
    errors = kept_prefix_errors(torch.ones(1, 1, 1), keys, values, torch.ones(1, 1, 2), orders, 1.0)
    expected = torch.tensor([[[2.1**2, 0.9**2, 0.0]], [[2.1**2, (1.3 / 0.7 - 1.9) ** 2, 0.0]]])
    torch.testing.assert_close(errors, expected)


def test_errors_of_a_token_that_hardly_sees_itself_are_finite() -> None:
    keys = torch.tensor([0.0, 0.0, -300.0]).view(1, 3, 1)
    values = torch.tensor([1.0, 3.0, 2.0]).view(1, 3, 1)
    errors = kept_prefix_errors(torch.ones(1, 1, 1), keys, values, torch.ones(1, 1, 1), [torch.tensor([[1, 0]])], 1.0)
    assert errors.isfinite().all()
    assert errors[0, 0, 1:].tolist() == pytest.approx([1.0, 0.0])


@given(cases(), st.booleans())
def test_errors_at_every_budget_are_those_of_attention_over_what_is_kept(case: Case, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, rows, length = case.shown.shape[1:]
    context = length - rows
    assume(context > 0)
    query, keys, values = case.query[0], case.keys[0], case.values[0]
    group = len(query) // heads
    slopes = torch.randn(len(query), rows, values.shape[-1], generator=generator)
    sinks = torch.randn(heads, group, generator=generator) if has_sinks else None
    orders = [torch.rand(heads, context, generator=generator).argsort(-1) for _ in range(2)]
    logits = 0.7 * query.double() @ keys.double().repeat_interleave(group, 0).transpose(1, 2)
    logits = logits if case.softcap is None else case.softcap * torch.tanh(logits / case.softcap)
    logits = logits.masked_fill(torch.ones(rows, length).triu(context + 1).bool(), -torch.inf)
    beside = (torch.full((heads, group), -torch.inf) if sinks is None else sinks).double()

    def pull(shown: Tensor) -> Tensor:
        """Outputs along the slopes, [Hq, K], where kv heads see `shown` [Hkv, N]."""
        seen = logits.masked_fill(~shown.repeat_interleave(group, 0)[:, None], -torch.inf)
        attention = torch.cat([seen, beside.view(-1, 1, 1).expand(-1, rows, 1)], -1).softmax(-1)[..., :-1]
        return ((attention @ values.double().repeat_interleave(group, 0)) * slopes).sum(-1)

    full = pull(torch.ones(heads, length, dtype=torch.bool))
    found = kept_prefix_errors(query, keys, values, slopes, orders, 0.7, case.softcap, sinks)
    assert found.shape == (2, heads, context + 1)
    for errors, order in zip(found, orders, strict=True):
        for budget in range(context + 1):
            shown = torch.ones(heads, length, dtype=torch.bool)
            shown.scatter_(1, order[:, budget:], value=False)
            expected = (pull(shown) - full).square().view(heads, -1).sum(-1)
            torch.testing.assert_close(errors[:, budget].double(), expected, atol=1e-4, rtol=1e-3)
    assert float(found[..., -1].max()) < 1e-8


def test_kv_heads_are_taken_in_parts_that_fit_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    query, shown = torch.randn(2, 8, 3, 4, generator=generator), torch.rand(2, 4, 3, 7, generator=generator) < 0.7
    keys, values = torch.randn(2, 2, 4, 7, 4, generator=generator)
    shown[..., 6] = shown[..., 5] = shown[..., 4] = True
    whole = attention_change(query, keys, values, shown, 0.5)
    monkeypatch.setattr(scoring, "CACHE_BYTES", 1)
    parts = attention_change(query, keys, values, shown, 0.5)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
