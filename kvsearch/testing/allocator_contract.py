"""What every allocator must do; a test class subclasses `AllocatorContract` and makes allocator and signals.

    class TestMyAllocator(AllocatorContract):
        def allocator(self):
            return MyAllocator()

        def signals(self, rng):
            return rng.random((LAYERS, HEADS))

Besides these signals it gets awkward ones of the same shape: constant, tied, sparse, of any scale.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvsearch.budgets.allocator import Allocator, Signals
from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import UsageError

LAYERS, HEADS, LENGTH = 3, 4, 40


def awkward(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw values >= 0 of one of six kinds: constant, tied, sparse, a spike, heavy-tailed, or that at any scale."""
    kind = int(rng.integers(0, 6))
    if kind == 0:
        return np.full(shape, float(rng.integers(0, 2)))
    if kind == 1:
        return rng.integers(0, 3, shape).astype(float)
    if kind == 2:
        return rng.random(shape) * (rng.random(shape) < 0.3)
    if kind == 3:
        spike = np.zeros(shape)
        spike.flat[int(rng.integers(0, spike.size))] = 1.0
        return spike
    values = rng.pareto(1.1, shape)
    return values if kind == 4 else values * 10.0 ** float(rng.integers(-290, 290))


class AllocatorContract:
    """Subclasses define `allocator` and `signals`, [L, Hkv] or [L]; `scaled` raises the signal of one head or layer."""

    def allocator(self) -> Allocator:
        raise NotImplementedError

    def signals(self, rng: np.random.Generator) -> Signals:
        raise NotImplementedError

    def scaled(self, signals: Signals, layer: int, head: int) -> Signals:
        raised = signals.copy()
        raised[(layer, head)[: signals.ndim]] *= 2
        return raised

    @pytest.fixture(params=range(5))
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        return np.random.default_rng(request.param)

    def bounds(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        floors = rng.integers(0, 6, (LAYERS, HEADS))
        return floors, floors + rng.integers(0, LENGTH - 5, (LAYERS, HEADS))

    def test_exact_total_within_bounds(self, rng: np.random.Generator) -> None:
        shape = self.signals(rng).shape
        for signals in (self.signals(rng), *(awkward(rng, shape) for _ in range(12))):
            floors, caps = self.bounds(rng)
            for total in np.linspace(floors.sum(), caps.sum(), 6).astype(int):
                budgets = self.allocator().allocate(signals, int(total), floors, caps)
                assert budgets.shape == (LAYERS, HEADS)
                assert budgets.dtype == np.int64
                assert budgets.sum() == total
                assert (budgets >= floors).all()
                assert (budgets <= caps).all()

    def test_infeasible_totals_are_refused_in_one_line(self, rng: np.random.Generator) -> None:
        signals = self.signals(rng)
        floors, caps = self.bounds(rng)
        for total in (int(floors.sum()) - 1, int(caps.sum()) + 1):
            with pytest.raises(UsageError, match=str(total)) as caught:
                self.allocator().allocate(signals, total, floors, caps)
            assert "\n" not in str(caught.value)

    def test_same_input_same_budgets_and_nothing_changed(self, rng: np.random.Generator) -> None:
        signals = self.signals(rng)
        floors, caps = self.bounds(rng)
        before = signals.copy(), floors.copy(), caps.copy()
        total = int(floors.sum() + caps.sum()) // 2
        first = self.allocator().allocate(signals, total, floors, caps)
        again = self.allocator().allocate(signals.copy(), total, floors.copy(), caps.copy())
        assert (first == again).all()
        for kept, original in zip((signals, floors, caps), before, strict=True):
            assert (kept == original).all()

    def test_the_unit_of_the_signal_does_not_matter(self, rng: np.random.Generator) -> None:
        signals = self.signals(rng)
        floors, caps = self.bounds(rng)
        total = int(floors.sum() + caps.sum()) // 2
        budgets = self.allocator().allocate(signals, total, floors, caps)
        # a power of two scales floats without rounding, so the budgets have to be equal
        assert (self.allocator().allocate(signals * 1024, total, floors, caps) == budgets).all()

    def test_a_raised_signal_never_costs_budget(self, rng: np.random.Generator) -> None:
        signals = self.signals(rng)
        floors, caps = self.bounds(rng)
        for layer, head, share in ((0, 0, 0.2), (1, 3, 0.5), (2, 1, 0.8)):
            total = int(floors.sum() + share * (caps.sum() - floors.sum()))
            raised = self.scaled(signals, layer, head)
            before = self.allocator().allocate(signals, total, floors, caps)
            after = self.allocator().allocate(raised, total, floors, caps)
            least = self.budget_of(before, layer, head) - self.slack(signals, floors, caps)
            assert self.budget_of(after, layer, head) >= least

    def budget_of(self, budgets: Ints, layer: int, head: int) -> int:
        """Return the budget that a raised signal must not lower; for signals of layers, a subclass may sum heads."""
        return int(budgets[layer, head])

    def slack(self, signals: Signals, floors: Ints, caps: Ints) -> int:  # noqa: ARG002
        """Return by how many entries a raised signal may still lower a budget; 0 unless a subclass says why."""
        return 0
