"""Attention in fp64, as one reads it in a paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.kernels.attention import Entries

NAN = float("nan")


@dataclass
class Case:
    """Segments with holes and spare columns, both full of NaN, and queries to them."""

    segments: int
    group: int
    dim: int
    value_dim: int
    columns: int
    rows: int = 1
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sinks: bool = False
    holes: bool = False
    ragged: bool = False
    weighted: bool = False
    scale: float = 1.0  # of the keys
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.query = normal(self.segments, self.group * self.rows, self.dim).to(self.dtype)
        self.keys = (self.scale * normal(self.segments, self.columns, self.dim)).to(self.dtype)
        self.values = normal(self.segments, self.columns, self.value_dim).to(self.dtype)
        self.sink = normal(self.segments, self.group) if self.sinks else None
        self.lengths = self.positions = None
        self.shown = torch.ones(self.segments, self.columns, dtype=torch.bool)
        if self.ragged:
            self.lengths = torch.randint(self.rows, self.columns + 1, (self.segments,), generator=generator)
            self.shown &= torch.arange(self.columns) < self.lengths[:, None]
        if self.holes:
            self.shown &= torch.rand(self.segments, self.columns, generator=generator) < 0.6
            self.positions = torch.where(self.shown, 5, -1)
        self.clean = self.keys.double(), self.values.double()
        self.log_weights = (2 * normal(self.segments, self.columns)).to(self.dtype) if self.weighted else None
        self.keys[~self.shown] = self.values[~self.shown] = NAN

    def block(self) -> Entries:
        """All segments beside one another: they are not `ragged`."""
        return Entries(self.keys, self.values, self.columns, self.positions, log_weights=self.log_weights)

    def flat(self) -> Entries:
        """Segments behind one another, in another order, with what is nobody's between them."""
        gap = self.columns + 3
        device = self.keys.device
        order = torch.arange(self.segments, device=device).roll(1)
        starts = order * gap
        parts = [states.new_full((self.segments, gap, states.shape[-1]), NAN) for states in (self.keys, self.values)]
        for part, states in zip(parts, (self.keys, self.values), strict=True):
            part[order, : self.columns] = states
        positions = None
        if self.positions is not None:
            positions = torch.zeros(self.segments, gap, dtype=torch.int32, device=device)
            positions[order, : self.columns] = self.positions.int()
            positions = positions.flatten()
        lengths = torch.full_like(starts, self.columns) if self.lengths is None else self.lengths
        weights = None
        if self.log_weights is not None:
            weights = self.keys.new_full((self.segments, gap), NAN)
            weights[order, : self.columns] = self.log_weights
            weights = weights.flatten()
        return Entries(*(part.flatten(0, 1) for part in parts), self.columns, positions, lengths, starts, weights)

    @property
    def scaling(self) -> float:
        return self.dim**-0.5

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output [S, G * rows, Dv] and the mean row [S, C], fp64."""
        keys, values = self.clean
        logits = self.query.double() @ keys.transpose(-1, -2) * self.scaling
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.log_weights is not None:
            logits = logits + self.log_weights.double()[:, None]
        stop = torch.full((self.segments,), self.columns) if self.lengths is None else self.lengths
        last = stop[:, None] - self.rows + torch.arange(self.group * self.rows) % self.rows
        seen = self.shown[:, None] & (torch.arange(self.columns) <= last[..., None])
        logits = logits.masked_fill(~seen, float("-inf"))
        if self.sink is not None:
            logits = torch.cat([logits, self.sink.double().repeat_interleave(self.rows, 1)[..., None]], -1)
        weights = logits.softmax(-1)[..., : self.columns].nan_to_num(0.0)
        return weights @ values, weights.mean(1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error against the largest number expected; NaN where something was not written."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
