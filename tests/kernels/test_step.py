from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsearch.kernels.step import Rule, Slots, step
from tests.combinations import first_value
from tests.kernels.reference import NAN

S, G, D, DV = 3, 4, 16, 24


class Head:
    """What S segments hold, step by step, in operations of PyTorch and fp64; spare slots are full of NaN."""

    def __init__(self, capacity: int, budgets: list[int], sinks: int, recent: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.keys, self.values = torch.full((S, capacity, D), NAN), torch.full((S, capacity, DV), NAN)
        self.positions, self.state = torch.full((S, capacity), -1), torch.zeros(S, capacity)
        self.budgets = torch.tensor(budgets)
        held = self.budgets - 1
        for segment, count in enumerate(held.tolist()):
            self.keys[segment, :count] = self.normal(count, D)
            self.values[segment, :count] = self.normal(count, DV)
            self.positions[segment, :count] = torch.arange(count)
            self.state[segment, :count] = self.normal(count).abs()
        self.log_weights = self.normal(S, capacity)
        self.slot, self.seen = held.clone(), held.clone()
        self.sinks, self.recent = torch.full((S,), sinks), torch.full((S,), recent)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def slots(self, rule: Rule, weighted: bool = True) -> Slots:
        """As they are now; entries that are not `weighted` have weights of 0 from here on."""
        if not weighted:
            self.log_weights.zero_()
        copies = (t.clone() for t in (self.keys, self.values, self.positions))
        state = () if rule == "position" else (self.state.clone(),)
        limits = self.clock(), self.budgets, self.sinks, self.recent
        weights = self.log_weights.clone() if weighted else None
        return Slots(*copies, state, self.slot.clone(), *limits, log_weights=weights)

    def clock(self) -> Tensor:
        return torch.stack([self.seen, self.seen - self.recent - 1])

    def step(self, query: Tensor, key: Tensor, value: Tensor, rule: Rule, arriving: Tensor, active: Tensor) -> Tensor:
        rows = torch.arange(S)
        where = rows[active], self.slot[active]
        self.keys[where], self.values[where] = key[active], value[active]
        self.positions[where], self.log_weights[where] = self.seen[active], 0.0
        self.seen = self.seen + active
        held = self.positions >= 0
        logits = query.double() @ self.keys.double().transpose(-1, -2) * D**-0.5
        logits = logits + self.log_weights.double()[:, None]
        weights = logits.masked_fill(~held[:, None], float("-inf")).softmax(-1)
        output = weights @ torch.where(held[..., None], self.values.double(), 0.0)
        if rule == "mass":
            self.state += weights.mean(1).float() * active[:, None]
        elif rule == "stored":
            self.state[where] = arriving[active]
        priority = self.positions.float() if rule == "position" else self.state
        leaving = torch.tensor([self.lowest(segment, priority[segment].tolist()) for segment in range(S)])
        over = (held.sum(-1) > self.budgets) & active
        gone = rows[over], leaving[over]
        self.positions[gone], self.state[gone] = -1, 0.0
        following = torch.where(held.all(-1), self.positions.shape[1] - 1, held.int().argmin(-1))
        self.slot = torch.where(active, torch.where(over, leaving, following), self.slot)
        return output

    def lowest(self, segment: int, priority: list[float]) -> int:
        """The slot of the lowest priority that is not protected, the later position among equals."""
        first, last = int(self.sinks[segment]), int(self.seen[segment] - self.recent[segment])
        where = enumerate(self.positions[segment].tolist())
        return min((priority[slot], -position, slot) for slot, position in where if first <= position < last)[2]


def test_many_slots_are_looked_at_by_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one alone would take longer than attention; the number of launches stays two."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr("kvsearch.kernels.attention.launch", lambda _, grid, *__, **___: grids.append(grid))
    monkeypatch.setattr("kvsearch.kernels.step.launch", lambda _, grid, *__, **___: grids.append(grid))
    monkeypatch.setattr("kvsearch.kernels.blocks.processors", lambda _: 132)
    head = Head(12_800, [12_799] * 3, sinks=2, recent=1)
    step(head.normal(S, G, D), head.normal(S, D), head.normal(S, DV), head.slots("mass"), 12_800, "mass", 1.0)
    (_, splits, _), (segments, programs) = grids
    assert segments == S
    assert programs - G >= splits // 2


def test_the_next_token_takes_no_slot_of_an_entry_where_several_left_at_once() -> None:
    """Entries are left of slots without one then, and right of them."""
    head = Head(9, [8, 7, 5], sinks=1, recent=1)
    head.positions[:, 1:3] = -1
    head.state[:, 1:3] = 0.0
    head.slot = torch.full((S,), 1)
    slots = head.slots("mass")
    active = torch.ones(S, dtype=torch.bool)
    for token in range(4):
        query, key, value = head.normal(S, G, D), head.normal(S, D), head.normal(S, DV)
        output = step(query, key, value, slots, 9, "mass", D**-0.5)
        expected = head.step(query, key, value, "mass", head.state[:, 0], active)
        torch.testing.assert_close(output, expected.float(), atol=1e-5, rtol=1e-5)
        assert torch.equal(slots.positions, head.positions), token
        assert torch.equal(slots.slot, head.slot), token


@first_value("pauses", [True, False])
@pytest.mark.parametrize("rule", ["position", "mass", "stored"])
def test_steps_hold_and_answer_what_operations_of_pytorch_do(rule: Rule, pauses: bool) -> None:
    """From below the budgets to steps in which an entry leaves each head; with pauses, some heads get nothing."""
    head = Head(9, [8, 6, 4], sinks=2, recent=1)
    slots = head.slots(rule, weighted=not pauses)
    for token in range(4):
        query, key, value = head.normal(S, G, D), head.normal(S, D), head.normal(S, DV)
        arriving = head.normal(S).abs()
        if token == 2:
            arriving = head.state[:, 3].clone()  # equal priorities: the later one leaves
        active = torch.tensor([True, token != 1, token != 2]) if pauses else torch.ones(S, dtype=torch.bool)
        told = active if pauses else None
        output = step(query, key, value, slots, 9, rule, D**-0.5, arriving=arriving.clone, active=told)
        expected = head.step(query, key, value, rule, arriving, active)
        torch.testing.assert_close(output, expected.float(), atol=1e-5, rtol=1e-5)
        assert torch.equal(slots.positions, head.positions)
        assert torch.equal(slots.slot, head.slot)
        assert torch.equal(slots.clock, head.clock())
        held = head.positions >= 0
        assert torch.equal(slots.keys[held], head.keys[held])
        assert torch.equal(slots.values[held], head.values[held])
        if slots.state:
            torch.testing.assert_close(slots.state[0], head.state, atol=1e-6, rtol=1e-5)
