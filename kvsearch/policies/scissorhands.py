"""Scissorhands (Liu et al. 2023): entries that keep getting more than an even share of attention stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvsearch.policies.base import AttentionRow, Needs, Observation, Policy, Running
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.scoring import BatchPart, iterate_window_rows
from kvsearch.policies.tensors import Tensor, torch

LOW = "low"
MASSES = "mass"
RING = "ring"
MAX_HISTORY = 2**15 - 1  # rows of history: counts are int16
SCALE_BITS = 31


@dataclass(frozen=True)
class Scissorhands(Policy):
    """persistence[i] = 1 - low[i] / seen[i] over the last `history` queries.

    low[i] counts the queries t with mean_g a[t, i] < 1 / (keys visible to t), seen[i] those that could see i. Equal
    ratios are ordered by the attention received. The score is the place in that order among the layer's entries: 0, 1,
    2, ... with equal entries in the same place, which fp32 holds exactly up to 2^24 places.

    While decoding, the keys visible are those held, and `drop` entries leave at once, 0: half the budget; the attention
    received goes on from that of the prompt's last `history` queries.
    """

    name: ClassVar[str] = "scissorhands"
    source: ClassVar[str] = "Scissorhands, arXiv 2305.17118; persistence ratio, history 400, recent 10"
    summary: ClassVar[str] = "share of the last 400 queries that gave it more than an even share"
    weakness: ClassVar[str] = "+17% of a prefill; an even share is little in a long prompt"
    is_baseline: ClassVar[bool] = True
    row: ClassVar[AttentionRow] = "group"
    running: ClassVar[Running] = "persistence"

    history: int = 400
    window: int = 10
    drop: int = 1
    sinks: int = 0

    def __post_init__(self) -> None:
        self._require(
            1 <= self.history <= MAX_HISTORY, f"history must be between 1 and {MAX_HISTORY}, got {self.history}"
        )
        self._at_least(0, "drop")
        super().__post_init__()

    def needs(self) -> Needs:
        return Needs(query_rows=self.history)

    def score(self, observation: Observation) -> Tensor:
        """Place by persistence and attention received, [B, Hkv, T] fp32."""
        # An entry has been seen by the tokens behind it, by at most as many as the history has.
        low, mass, _ = self._history(observation)
        seen = (observation.seen[:, None] - observation.index).clamp(max=self.history)[:, None].expand_as(low)
        real = observation.valid[:, None].expand_as(low)
        return places(*(tensor.flatten(1) for tensor in (low, seen, mass, real))).view_as(mass)

    def _history(self, observation: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Return low rows int16 [B, Hkv, T], attention received fp32, and which rows were low, see `start`."""

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            shape = observation.keys.shape[:3]
            low = observation.keys.new_zeros(shape, dtype=torch.int16)
            mass = torch.zeros_like(low, dtype=torch.float32)
            ring = low.new_zeros(*shape, -(-self.history // 8), dtype=torch.uint8)
            for part, at, is_low, row in self._rows(observation):
                index = *part, slice(row.shape[-1])
                low[index] += is_low.sum(2, dtype=torch.int16)
                mass[index] += row.sum(2)
                byte, bit = self._slot(at[:, None, None])
                marks = is_low.transpose(-1, -2) * bit
                ring[index].scatter_add_(-1, byte.expand(marks.shape), marks)
            return low, mass, ring

        return observation.shared(("scissorhands", self.history), compute)

    def _rows(self, observation: Observation) -> Iterator[tuple[BatchPart, Tensor, Tensor, Tensor]]:
        """Yield the history, some sequences, kv heads and rows at a time.

        Yields (sequences and kv heads, index of every row's token [b, rows], whether entries are low [b, h, rows, N]
        bool, their attention, mean over the group); see `iterate_window_rows`.
        """
        index = observation.index
        padding = (index < 0).sum(-1, keepdim=True)
        columns = torch.arange(index.shape[1], device=index.device)
        count = min(self.history, observation.last_queries.shape[2])
        rows = observation.seen[:, None] - count + torch.arange(count, device=index.device)
        # padding, index -1, comes first; a row sees what is no later than itself
        ends = torch.searchsorted(index.contiguous(), rows, right=True)
        visible = ((columns < ends[..., None]) & (columns >= padding[..., None]))[:, None]  # [B, 1, count, T]
        even = (1 / (ends - padding))[:, None, :, None]
        done = 0
        before = None
        for part, probability in iterate_window_rows(observation, self.history):
            done = done if part == before else 0
            before = part
            here = part[0], slice(None), slice(done, done + probability.shape[-2]), slice(probability.shape[-1])
            done += probability.shape[-2]
            row, *others = probability.unbind(2)
            for other in others:  # the mean, in place: new memory would take longer than to fill it
                row += other
            row /= len(others) + 1
            yield part, rows[part[0], here[2]], (row < even[here]) & visible[here], row

    # --- decoding -------------------------------------------------------------------------------------------------

    @property
    def running_constants(self) -> dict[str, int | str]:
        return {"HISTORY": self.history}

    def drop_at(self, budget: int) -> int:
        """Return `drop` entries or half the budget, as far as the protected ones leave so many."""
        # An eviction must leave the protected entries, and the one that has just come.
        return max(1, min(self.drop or budget // 2, budget + 1 - sum(self.protected_at(budget))))

    def start(self, observation: Observation) -> State:
        """Return low counts, attention received and low rows: one bit per row, token t at bit t mod history."""
        low, mass, ring = self._history(observation)
        return State({MASSES: mass.clone(), LOW: low.clone(), RING: ring.clone()})  # in the order that kernels want

    def step(self, step: Step) -> Tensor:
        """Place by persistence and attention received in each segment, [S, C] fp32."""
        state = step.cached.state.entries
        positions = step.cached.positions
        held = None if step.full else step.cached.held
        if held is None:
            is_low = step.row < 1 / positions.shape[1]
        else:
            is_low = held & (step.row < held.sum(-1, keepdim=True).reciprocal())
        byte, bit = self._slot((step.seen - 1)[:, None, None])
        byte = byte.expand(*positions.shape, 1)
        now = state[RING].gather(-1, byte)
        # 1 into the history, -1 out of it; as a byte -1 is 255, which times a bit takes the bit away
        change = is_low.view(torch.int8) - ((now & bit) != 0)[..., 0].view(torch.int8)
        state[LOW] += change
        state[RING].scatter_(-1, byte, now.addcmul(change.view(torch.uint8)[..., None], bit))
        state[MASSES] += step.row
        seen = (step.seen[:, None] - positions).clamp(1, self.history)
        return places(state[LOW], seen, state[MASSES], held)

    def _slot(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the byte of the ring and bit in it, as a uint8 mask, of the row of a token."""
        slot = token % self.history
        return slot // 8, torch.bitwise_left_shift(1, slot % 8).to(torch.uint8)


def places(low: Tensor, seen: Tensor, mass: Tensor, real: Tensor | None) -> Tensor:
    """Place of the `real` entries by 1 - low / seen, then by mass, counted from 0, all [N, M]; equal entries share one.

    The others come behind them; None: all are real. low / seen <= 1 and 0 < seen < 2^15. Two different ratios differ by
    more than 2^-30, so that their first 31 bits tell them apart; the bits of a mass, which is not negative, are in the
    order of the masses.
    """
    ratio = (low.long() << SCALE_BITS) // seen
    key = torch.sub(mass.view(torch.int32), ratio, alpha=2**SCALE_BITS)
    if real is not None:
        key.masked_fill_(~real, torch.iinfo(torch.int64).max)  # behind all others
    ordered, order = key.sort(-1)
    differs = ordered[:, 1:] != ordered[:, :-1]
    return torch.zeros_like(mass).scatter_(-1, order[:, 1:], differs.cumsum(-1, dtype=torch.float32))
