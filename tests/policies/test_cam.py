from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.errors import UsageError
from kvsearch.policies import cam, create_policy, merging
from kvsearch.policies.base import Needs
from kvsearch.policies.cam import CaM
from kvsearch.policies.decoding import Cached, State, Step
from kvsearch.policies.h2o import H2O, MASS
from kvsearch.policies.noise import uniform
from kvsearch.policies.streaming import StreamingLLM
from tests.policies.contract import Case, PolicyContract, cases, observe, properties
from tests.policies.course import arrive, at_start, cloned, decode, leaving_slots, slots
from tests.policies.examples import NAN, check_order_of_slots, leaves, plain, scattered, step_at


class TestContract(PolicyContract):
    policy = CaM()
    score_is_position = True


class TestContractWithoutSinks(PolicyContract):
    policy = CaM(sinks=0, merge_next=1, expectation=True)
    score_is_position = True


class TestContractH2O(PolicyContract):
    policy = CaM(base="h2o", sinks=1, merge_prompt=True)


class TestContractH2OWindow(PolicyContract):
    policy = CaM(base="h2o", sinks=0, recent=3)


# --- one entry --------------------------------------------------------------------------------------------------------


def holding(values: list[float], mass: list[float], positions: list[int]) -> Cached:
    """One head with values of one number each."""
    cached = step_at(positions, keys=[float(position) for position in positions]).cached
    state = State({MASS: torch.tensor([mass])})
    return dataclasses.replace(cached, values=torch.tensor([values])[..., None], state=state)


def merged(policy: CaM, cached: Cached, leaving: list[list[int]]) -> Tensor:
    """Values [S, C, Dv] after a merge; nothing else changes."""
    after = cloned(cached)
    policy.merge(after, slots(leaving))
    torch.testing.assert_close(after.keys, cached.keys, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(after.positions, cached.positions)
    assert torch.equal(after.state.entries[MASS], cached.state.entries[MASS])
    return after.values


# in slots out of order: 7 leaves; 8 and 9 are the next two that stay, 3 is before it, 12 behind them
ENTRY = holding([100.0, 4.0, NAN, 10.0, 1.0, 20.0], [0.7, 0.2, 0.0, 0.5, 0.9, 0.3], [3, 7, -1, 9, 12, 8])


def test_the_expected_value() -> None:
    """Mass .2 against a mean of .4: half of the value, 4, goes to the next two, in equal parts."""
    values = merged(CaM(merge_next=2, expectation=True), ENTRY, [[1]])
    torch.testing.assert_close(values[0, :, 0], torch.tensor([100.0, 4.0, NAN, 11.0, 1.0, 21.0]), equal_nan=True)


@pytest.mark.parametrize("seed", range(8))
def test_all_or_nothing_as_drawn(seed: int) -> None:
    values = merged(CaM(merge_next=2, seed=seed), ENTRY, [[1]])[0, :, 0]
    gain = 2.0 * (float(uniform(seed, 0, 0, 7)) < 0.5)
    torch.testing.assert_close(values, torch.tensor([100.0, 4.0, NAN, 10.0 + gain, 1.0, 20.0 + gain]), equal_nan=True)


def test_both_outcomes_are_drawn() -> None:
    assert {float(uniform(seed, 0, 0, 7)) < 0.5 for seed in range(8)} == {True, False}


@pytest.mark.parametrize(
    ("merge_next", "gains"),
    [
        (1, [0.0, 0.0, 4 * 0.2 / 0.3]),
        (3, [4 * (0.2 / (1.7 / 3)) / 3] * 3),
        (32, [4 * (0.2 / (1.7 / 3)) / 3] * 3),  # three are all there are
    ],
)
def test_how_many_are_next(merge_next: int, gains: list[float]) -> None:
    values = merged(CaM(merge_next=merge_next, expectation=True), ENTRY, [[1]])[0, [3, 4, 5], 0]
    torch.testing.assert_close(values - torch.tensor([10.0, 1.0, 20.0]), torch.tensor(gains), rtol=1e-4, atol=1e-5)


def test_nothing_follows_the_newest() -> None:
    values = merged(CaM(base="h2o", sinks=0), ENTRY, [[4]])
    torch.testing.assert_close(values, ENTRY.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("mass", "share"),
    [((0.0, 0.0), 0.0), ((0.3, 0.0), 1.0), ((0.0, 0.3), 0.0), ((0.9, 0.3), 1.0), ((0.3, 0.3), 1.0), ((0.1, 0.4), 0.25)],
)
def test_probabilities_at_the_ends(mass: tuple[float, float], share: float) -> None:
    """Of nothing and by nothing included."""
    cached = holding([8.0, 1.0], list(mass), [0, 1])
    assert float(merged(CaM(expectation=True), cached, [[0]])[0, 1, 0]) == pytest.approx(1.0 + 8.0 * share)
    if share in (0.0, 1.0):
        for seed in range(20):
            assert float(merged(CaM(seed=seed), cached, [[0]])[0, 1, 0]) == 1.0 + 8.0 * share


def test_how_often_a_value_is_added() -> None:
    """3000 heads, probability .3: within four standard deviations, and not the same heads in every layer or seed."""
    values, mass = torch.ones(3000, 2, 1), torch.tensor([[0.3, 1.0]]).repeat(3000, 1)
    positions = torch.tensor([[5, 9]]).repeat(3000, 1)
    drawn = []
    for layer, seed in ((0, 0), (1, 0), (0, 1)):
        cached = Cached(values, values.clone(), positions, State({MASS: mass}), layer, torch.arange(3000))
        CaM(seed=seed).merge(cached, torch.zeros(3000, 1, dtype=torch.int64))
        drawn.append(cached.values[:, 1, 0] == 2)
        assert abs(float(drawn[-1].float().mean()) - 0.3) < 4 * (0.3 * 0.7 / 3000) ** 0.5
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = float((drawn[one] & drawn[other]).float().mean())
        assert abs(both - 0.09) < 4 * (0.09 * 0.91 / 3000) ** 0.5


# --- many entries -----------------------------------------------------------------------------------------------------


def many(seed: int, share: float, dim: int = 3) -> tuple[Cached, list[list[int]]]:
    """Heads with entries in any slots, some without mass, and slots that leave, ascending by position."""
    generator = torch.Generator().manual_seed(seed)
    step = scattered(seed, segments=3, slots=13, dim=dim)
    mass = step.row * (torch.rand(step.row.shape, generator=generator) < 0.8)
    cached = dataclasses.replace(step.cached, state=State({MASS: mass}), layer=seed % 5)
    lists = []
    for position, newest in zip(cached.positions.tolist(), step.newest.tolist(), strict=True):
        held = [slot for slot, at in enumerate(position) if at >= 0 and slot != newest]
        chosen = [slot for slot in held if float(torch.rand((), generator=generator)) < share]
        lists.append(sorted(chosen, key=position.__getitem__))
    return cached, lists


def by_definition(policy: CaM, cached: Cached, lists: list[list[int]]) -> Tensor:
    """Values after the merge, entry by entry: all of them, or the youngest of each head."""
    values = cached.values.double().clone()
    for segment, gone in enumerate(lists):
        position, mass = cached.positions[segment].tolist(), cached.state.entries[MASS][segment].tolist()
        stays = [slot for slot, at in enumerate(position) if at >= 0 and slot not in gone]
        for slot in gone if policy.merge_prompt else gone[-1:]:
            later = sorted((at for at in stays if position[at] > position[slot]), key=position.__getitem__)
            following = later[: policy.merge_next]
            total = sum(mass[at] for at in following)
            if not following or mass[slot] == 0:
                continue
            share = min(1.0, mass[slot] * len(following) / total) if total else 1.0
            if not policy.expectation:
                share = float(uniform(policy.seed, cached.layer, cached.heads[segment], position[slot])) < share
            for at in following:
                values[segment, at] += share * cached.values[segment, slot].double() / len(following)
    return values


seeds, shares = st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9])
several = st.sampled_from([1, 2, 5, 32])
whole = st.builds(
    CaM, merge_next=several, seed=st.integers(0, 9), expectation=st.booleans(), merge_prompt=st.just(True)
)
policies = st.one_of(whole, st.builds(CaM, merge_next=several, expectation=st.booleans()))


@properties
@given(seeds, shares, policies)
def test_by_definition(seed: int, share: float, policy: CaM) -> None:
    cached, lists = many(seed, share)
    if max(map(len, lists)):
        expected = by_definition(policy, cached, lists).float()
        torch.testing.assert_close(merged(policy, cached, lists), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@properties
@given(seeds, shares, whole)
def test_one_by_one_from_the_last_is_all_at_once(seed: int, share: float, policy: CaM) -> None:
    """Backwards, each finds the same entries behind it as when all leave together."""
    cached, lists = many(seed, share)
    single = cloned(cached)
    for last in range(max(map(len, lists))):
        one = [[line[-1 - last]] if last < len(line) else [] for line in lists]
        policy.merge(single, slots(one))
        for segment, line in enumerate(one):
            single.positions[segment, line] = -1
    if max(map(len, lists)):
        together = merged(policy, cached, lists)
        torch.testing.assert_close(single.values, together, rtol=1e-5, atol=1e-6, equal_nan=True)


@properties
@given(seeds, shares, policies)
def test_heads_are_merged_on_their_own(seed: int, share: float, policy: CaM) -> None:
    """Nothing depends on what else is in the batch, and what does not receive anything does not change at all."""
    cached, lists = many(seed, share)
    if not max(map(len, lists)):
        return
    together = merged(policy, cached, lists)
    for segment, line in enumerate(lists):
        alone = Cached(
            *(getattr(cached, name)[[segment]] for name in ("keys", "values", "positions")),
            cached.state.changed(lambda of, at=segment: of[[at]], torch.clone),  # type: ignore[misc]
            cached.layer,
            cached.heads[[segment]],
        )
        values = merged(policy, alone, [line]) if line else alone.values
        torch.testing.assert_close(together[[segment]], values, rtol=1e-6, atol=1e-7, equal_nan=True)
        merging = line if policy.merge_prompt else line[-1:]
        first = min((int(cached.positions[segment, slot]) for slot in merging), default=10**9)
        same = (cached.positions[segment] < first) | torch.isin(torch.arange(13), torch.tensor(line, dtype=torch.int64))
        torch.testing.assert_close(
            together[segment, same], cached.values[segment, same], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("seed", range(4))
def test_scratch_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    cached, lists = many(seed, 0.5)
    policy = CaM(expectation=True, merge_prompt=True)
    expected = merged(policy, cached, lists)
    monkeypatch.setattr(cam, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(merging, "SCRATCH_BYTES", 1)
    torch.testing.assert_close(merged(policy, cached, lists), expected, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_rounded_once(seed: int) -> None:
    """In bfloat16 caches: all that goes into an entry is added in fp32."""
    cached, lists = many(seed, 0.6)
    half = dataclasses.replace(cached, values=cached.values.bfloat16())
    policy = CaM(expectation=True, merge_prompt=True)
    expected = by_definition(policy, half, lists).float().bfloat16()
    found = merged(policy, half, lists)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-6, equal_nan=True)
    differing = (found != expected) & ~expected.isnan()
    assert float(differing.float().mean()) < 0.02  # fp32 and fp64 rarely round apart


def test_views_are_changed_in_place() -> None:
    """A cache with more slots than are in use."""
    cached, lists = many(1, 0.5)
    store = torch.full((3, 20, 3), NAN)
    store[:, :13] = cached.values
    view = dataclasses.replace(cached, values=store[:, :13])
    policy = CaM(expectation=True, merge_prompt=True)
    policy.merge(view, slots(lists))
    torch.testing.assert_close(store[:, :13], merged(policy, cached, lists), equal_nan=True)
    assert bool(store[:, 13:].isnan().all())


# --- decoding ---------------------------------------------------------------------------------------------------------


@properties
@given(cases(max_length=8), st.integers(1, 9), st.sampled_from([CaM(sinks=1), CaM(base="h2o", sinks=0, merge_next=2)]))
def test_decoding(case: Case, budget: int, policy: CaM) -> None:
    """The base decides; masses are those of H2O; every entry that leaves is merged as defined."""
    observation = observe(policy, case)
    prompt = observation.received().flatten(0, 1)
    for moment in decode(policy, observation, budget, steps=5, seed=case.seed):
        cached, before = moment.step.cached, moment.before
        mass = cached.state.entries[MASS]
        expected = mass if policy.base == "h2o" else before.positions.float()
        assert torch.equal(moment.priorities[before.held], expected[before.held])
        lists = [[slot for slot in line if slot >= 0] for line in moment.leaving.tolist()]
        values = by_definition(policy, before, lists).float()
        torch.testing.assert_close(cached.values, values, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert torch.equal(cached.keys[before.held], before.keys[before.held])
        for segment, rows in enumerate(moment.rows):
            pads = case.pads[segment // case.heads]
            for position, value in moment.entries(mass, segment).items():
                column = position + pads
                total = float(prompt[segment, column]) if column < case.length else 0.0
                assert value == pytest.approx(total + sum(row.get(position, 0.0) for row in rows), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("base", ["streaming", "h2o"])
def test_the_first_step_after_a_long_prompt_merges_one_value(base: str) -> None:
    """All that is too much of a prompt leaves at once: no entry gains more than one value in m parts."""
    policy = CaM(base=base, merge_next=8, expectation=True)
    observation = observe(policy, Case(heads=2, group=2, length=400, pads=(0, 3), seed=1))
    generator = torch.Generator().manual_seed(0)
    cached, seen = at_start(policy, observation, 500, 1, generator)
    newest = arrive(cached, seen, generator)
    row = torch.rand(cached.positions.shape, generator=generator).masked_fill(~cached.held, 0.0)
    step = Step(cached, newest, seen + 1, row)
    leaving = leaving_slots(policy, step, policy.step(step), 16)
    assert (leaving >= 0).sum(-1).min() > 380
    before = cloned(cached)
    policy.merge(cached, leaving)
    moved = (cached.values - before.values).norm(dim=-1)
    assert (moved > 0).sum(-1).max() == 8
    assert float(moved.max()) <= float((before.values.norm(dim=-1) * before.held).max()) / 8 + 1e-6


def test_the_oldest_entry_behind_the_sinks_leaves() -> None:
    step = step_at([9, 0, 8, 1, 3, 4], [0.1, 0.1, 0.2, 0.2, 0.2, 0.2])
    state = State({MASS: torch.ones(1, 6)})
    step = dataclasses.replace(step, cached=dataclasses.replace(step.cached, state=state))
    assert leaves(CaM(sinks=2), step, budget=5) == [3]
    assert leaves(CaM(sinks=0), step, budget=5) == [0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("base", ["streaming", "h2o"])
def test_slots_in_any_order(seed: int, base: str) -> None:
    step = scattered(seed)
    state = State({MASS: step.row * 3})
    step = dataclasses.replace(step, cached=dataclasses.replace(step.cached, state=state))
    check_order_of_slots(CaM(base=base), step, seed)


def test_the_base_decides_on_the_prompt() -> None:
    observation = dataclasses.replace(plain(9), column_sums=torch.rand(1, 1, 9))
    assert torch.equal(CaM().score(observation), StreamingLLM().score(observation))
    assert CaM().first_stage(observation) is None
    h2o, inner = CaM(base="h2o", recent_share=0.3, sinks=2), H2O(recent_share=0.3, sinks=2)
    assert torch.equal(h2o.score(observation), inner.score(observation))
    assert torch.equal(h2o.first_stage(observation), inner.first_stage(observation))
    for budget in range(1, 9):
        assert (h2o.quota(budget), h2o.recent_at(budget)) == (inner.quota(budget), inner.recent_at(budget))
    assert (CaM(base="h2o", recent=5).recent_count, CaM().recent_count, CaM().sink_count) == (5, 1, 4)


def test_what_it_reads_and_when_it_merges() -> None:
    for policy in (CaM(), CaM(base="h2o")):
        assert (policy.online, policy.row, policy.needs()) == (True, "group", Needs(column_sums=True))
        assert (policy.merges, policy.merges_prompt) == (True, False)
    assert CaM(merge_prompt=True).merges_prompt


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"base": "tova"}, "base is streaming or h2o, got 'tova'"),
        ({"merge_next": 0}, "merge_next must be 1 or more, got 0"),
        ({"seed": -1}, r"seed must be between 0 and 2\^63 - 1, got -1"),
        ({"seed": 2**63}, rf"seed must be {2**63 - 1} or less, got {2**63}"),
        ({"sinks": -1}, "its base streaming: sinks must be 0 or more, got -1"),
        ({"base": "h2o", "recent": -1}, "its base h2o: recent must be 0 or more, got -1"),
    ],
)
def test_out_of_range(params: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^policy cam: {problem}$"):
        create_policy("cam", params)
