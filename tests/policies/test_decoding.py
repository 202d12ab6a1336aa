"""What stays of segments whose entries sit in any order: the choice of the many that are kept at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvsearch.policies.decoding import best

# equal ones among them, both zeros, and the ends of what floats can say
PRIORITIES = st.sampled_from([float("-inf"), -3.0e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 2.0, 3.0e38, float("inf")])


@st.composite
def segments(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Priorities, protected slots, positions [S, C], and how many stay [S]."""
    count, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rows: list[tuple[list[float], list[bool], list[int], int]] = []
    for _ in range(count):
        positions = draw(st.permutations(range(width)))
        positions = [position if draw(st.booleans()) else -1 for position in positions]
        held = sum(position >= 0 for position in positions)
        protected = [position >= 0 and draw(st.booleans()) for position in positions]
        rows.append(([draw(PRIORITIES) for _ in positions], protected, positions, draw(st.integers(0, held))))
    priorities, protected, positions, counts = zip(*rows, strict=True)
    return torch.tensor(priorities), torch.tensor(protected), torch.tensor(positions), torch.tensor(counts)


@given(segments(), st.integers(0, 3))
def test_protected_entries_stay_then_the_highest_then_the_first(
    given: tuple[Tensor, Tensor, Tensor, Tensor], spare: int
) -> None:
    priorities, protected, positions, counts = given
    found = best(*given, most=int(counts.max()) + spare)
    for row, count in enumerate(counts.tolist()):
        held = [slot for slot, position in enumerate(positions[row].tolist()) if position >= 0]
        held.sort(key=lambda slot: (not protected[row, slot], -float(priorities[row, slot]), int(positions[row, slot])))
        assert sorted(held[:count]) == found[row].nonzero().flatten().tolist()
