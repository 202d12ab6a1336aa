"""A share of what a head keeps for a generic ranking, beside a fitted one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.core.errors import UsageError
from kvsearch.policies import create_policy
from kvsearch.policies.generic import GENERIC, SINKS, SPREAD, WINDOW, generic_needs, generic_scores, sharing
from kvsearch.policies.ranking import rank_under
from tests.examples import fixed
from tests.policies.probes import bank, fitted, ranking
from tests.runtime.layers import Layer, Scene


def test_a_share_of_every_budget() -> None:
    """The fit wants 0 1 2 3 4, a generic ranking 4 3 2 1 0 with a quarter: of four entries one is its."""
    scores = torch.tensor([[9.0, 7.0, 5.0, 3.0, 1.0]])
    generic = scores.flip(-1)
    # (r + 1) / .25: 20 16 12 8 4; (s + 1) / .75: 4/3 8/3 4 16/3 20/3: entry 4 comes fourth, with 2 at 4
    assert sharing(scores, generic, 0.25).tolist() == [[9.0, 7.0, 5.0, 1.0, 3.0]]
    assert sharing(scores, generic, 1.0).tolist() == [[1.0, 3.0, 5.0, 7.0, 9.0]]
    assert sharing(scores, generic, 0.5).tolist() == [[9.0, 5.0, 1.0, 3.0, 7.0]]


def test_equal_scores_are_told_apart() -> None:
    scores, generic = torch.full((1, 5), 3.0), torch.tensor([[0.0, 4.0, 2.0, 3.0, 1.0]])
    found = sharing(scores, generic, 1.0)
    assert found.argsort(descending=True).tolist() == [[1, 3, 2, 4, 0]]
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=0)


@fixed()
@given(st.integers(1, 30), st.floats(0.01, 1), st.integers(0, 99))
def test_both_rankings_have_their_parts_at_every_budget(count: int, share: float, seed: int) -> None:
    scores, generic = torch.rand(2, count, generator=torch.Generator().manual_seed(seed))
    found = sharing(scores, generic, share)
    assert torch.equal(found.sort().values, scores.sort().values)
    for budget in range(1, count + 1):
        kept = set(found.topk(budget).indices.tolist())
        for wanted, part in ((generic, share), (scores, 1 - share)):
            assert kept >= set(wanted.topk(int(part * budget * (1 - 1e-9))).indices.tolist())


def test_a_spread_is_even_at_every_budget() -> None:
    """Of 200 entries the best n leave no gap much larger than 200 / n (three-distance theorem)."""
    layer = Layer(Scene(1, 1, 200, (0,), 1, (4, 4), 0))
    places = generic_scores(SPREAD, layer.observation(fitted(ranking(layers=range(8)))))[0, 0]
    for kept in (5, 13, 40, 100):
        chosen = places.topk(kept).indices.sort().values
        gaps = chosen.diff(prepend=torch.tensor([-1]), append=torch.tensor([200]))
        assert int(gaps.max()) <= 3 * 200 / kept


@pytest.mark.parametrize("name", GENERIC)
def test_protected_entries_are_kept_and_no_part_of_the_share(name: str) -> None:
    layer = Layer(Scene(2, 1, 20, (0, 3), 1, (4, 4), 0))
    policy = fitted(ranking(("value_norm",), layers=(3,)), generic=name, share=1.0, sinks=2, protect=3)
    seen = layer.observation(policy)
    wanted, ranks = generic_scores(name, seen), rank_under(policy, seen)
    for row, pads in enumerate((0, 3)):
        kept = torch.nonzero(ranks[row, 0] < 9).flatten().tolist()
        best = wanted[row, 0, pads + 2 : 17].topk(4).values.min()
        assert {pads, pads + 1, 17, 18, 19} <= set(kept)
        assert all(wanted[row, 0, column] >= best for column in kept if pads + 2 <= column < 17)


def test_what_a_share_needs_is_asked_for() -> None:
    assert generic_needs(SPREAD) == fitted(ranking(("value_norm",)), share=0.5).needs()
    needs = bank(generic="snapkv", share=0.1).needs()
    assert (needs.query_rows, needs.query_statistics_from, needs.projection) == (WINDOW, None, True)
    assert bank(generic="expected_attention", share=0.1).needs().query_statistics_from == SINKS
    assert bank(generic="expected_attention").needs() == bank().needs()


def test_no_share_is_not_stated() -> None:
    """Plans and profiles from before there were shares are those of today."""
    assert "share" not in fitted().parameters() and "generic" not in fitted().parameters()
    assert fitted(generic="snapkv") == fitted()
    stated = fitted(generic="snapkv", share=0.2).parameters()
    assert (stated["generic"], stated["share"]) == ("snapkv", 0.2)
    with pytest.raises(UsageError, match=r"share must be between 0 and 1, got 1\.5"):
        create_policy("probe", {"weights": "0" * 64, "share": 1.5})
    with pytest.raises(UsageError, match=r"generic is expected_attention, .*, got 'snap'"):
        create_policy("probe", {"weights": "0" * 64, "generic": "snap", "share": 0.5})


def test_while_decoding_prompts_keep_their_share_and_new_tokens_are_scored_by_the_fit() -> None:
    ones = {"linear": [[[1.0]]], "center": [[[0.0]]], "scale": [[[1.0]]], "bias": [[0.0]]}
    policy = fitted(ranking(("value_norm",), width=0, layers=(3,), **ones), sinks=0, protect=1, share=0.5)
    layer = Layer(Scene(1, 1, 12, (0,), 4, (6,), 1))
    prompt = layer.observation(policy)
    scores = policy.score(prompt)[0, 0].tolist() + layer.value[0, 0, 12:].norm(dim=-1).tolist()
    held = set(torch.nonzero(rank_under(policy, prompt)[0, 0] < 6).flatten().tolist())
    for token in range(12, 16):
        held -= {min(held, key=scores.__getitem__)}  # the newest entry is protected
        held |= {token}
    assert set(layer.decode(policy, policy)[1].kept_positions(0, 0)) == held
