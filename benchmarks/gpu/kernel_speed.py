"""Part 2, about 6 minutes: attention of a decode step, and a whole step, beside SDPA and FlashInfer.

    python benchmarks/gpu/kernel_speed.py

A layer of Llama-3.1-8B: 8 kv heads, 4 query heads for each, 128 numbers, bfloat16; 12,800 entries per head on average,
the same in all heads ("even") or as calibrated ones differ ("skewed", a fifth to 2.5 times). Times are of captured
launches, as in decoding, over several layers in turn, so that no cache of the device holds a layer from the last time.
Shares are of the bandwidth of a copy: keys and values are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from steps import Settings, Step, main, seconds_of
from torch import Tensor

from kvsearch.benchmark.speed import make_skewed_budgets, measure_roofline
from kvsearch.kernels.attention import Entries, attend
from kvsearch.kernels.step import Rule, Slots, step

HEADS, GROUP, DIM = 8, 4, 128
SCALING = DIM**-0.5
PAGE = 16  # entries of a page of FlashInfer's
RULES: tuple[Rule, ...] = ("position", "mass", "stored", "row", "persistence", "pooled")
CONSTANTS: dict[Rule, dict[str, int | str]] = {
    "persistence": {"HISTORY": 400}, "pooled": {"KERNEL": 5, "POOLING": "avg", "PROTECT": 32},
}  # fmt: skip


@dataclass(frozen=True)
class Decoding:
    """Heads of a batch with their entries; shapes as sizes of a machine without a GPU permit."""

    batch: int
    skewed: bool
    where: Settings

    @property
    def mean(self) -> int:
        return 60 if self.where.small else 12_800

    @cached_property
    def counts(self) -> Tensor:
        """Entries of every head, [B * Hkv] int64."""
        even = np.full((self.batch, HEADS), self.mean)
        budgets = make_skewed_budgets(self.batch, HEADS, self.mean) if self.skewed else even
        return torch.from_numpy(budgets.flatten()).to(self.where.kernels)

    @property
    def layers(self) -> int:
        """Layers in turn."""
        return 1 if self.where.small else 4

    @property
    def facts(self) -> dict[str, Any]:
        return {"batch": self.batch, "budgets": "skewed" if self.skewed else "even"}

    def made(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.where.kernels, dtype=torch.float32).to(torch.bfloat16)

    def query(self) -> Tensor:
        return self.made(len(self.counts), GROUP, DIM)

    def share(self, seconds: float, bandwidth: float) -> dict[str, float]:
        """The time in ms, and the share of the bandwidth."""
        size = int(self.counts.sum()) * 2 * DIM * 2
        return {"ms": 1e3 * seconds, "share": size / seconds / bandwidth}


def decodings(where: Settings, skewed: tuple[bool, ...] = (False, True)) -> Iterator[Decoding]:
    for batch, differs in product((1, 2) if where.small else (1, 16), skewed):
        yield Decoding(batch, differs, where)


def in_turn(actions: list[Callable[[], object]], where: Settings) -> float:
    """The seconds of one of several actions that are done one after the other."""
    return seconds_of(lambda: [action() for action in actions], where) / len(actions)


def measured(where: Settings, make: Callable[[Decoding], Callable[[], object]]) -> list[dict[str, Any]]:
    """Time what `make` makes for every batch and budgets, a layer at a time."""
    bandwidth = measure_roofline(torch.device(where.kernels), torch.bfloat16).bandwidth
    found = []
    with where.serving():
        for decoding in decodings(where):
            seconds = in_turn([make(decoding) for _ in range(decoding.layers)], where)
            found.append({**decoding.facts, **decoding.share(seconds, bandwidth)})
    return found


def ours(where: Settings) -> list[dict[str, Any]]:
    """Entries of all heads behind one another, as plans without a decode phase store them."""

    def make(decoding: Decoding) -> Callable[[], object]:
        counts = decoding.counts
        rows = int(counts.sum())
        longest = int(counts.max())
        starts = counts.cumsum(0) - counts
        held = Entries(decoding.made(rows, DIM), decoding.made(rows, DIM), longest, lengths=counts, starts=starts)
        return partial(attend, decoding.query(), held, SCALING)

    return measured(where, make)


def sdpa(where: Settings) -> list[dict[str, Any]]:
    """PyTorch's attention over dense heads, padded to the longest, with a mask where they differ."""

    def make(decoding: Decoding) -> Callable[[], object]:
        counts = decoding.counts
        longest = int(counts.max())
        query = decoding.query()[:, None]
        keys, values = (decoding.made(len(counts), 1, longest, DIM) for _ in range(2))
        mask = None
        if decoding.skewed:
            mask = (torch.arange(longest, device=counts.device) < counts[:, None])[:, None, None]
        return partial(F.scaled_dot_product_attention, query, keys, values, attn_mask=mask)

    return measured(where, make)


def flashinfer(where: Settings) -> list[dict[str, Any]] | dict[str, str]:
    """FlashInfer, to which every head of every sequence is a sequence of its own."""
    if find_spec("flashinfer") is None or where.kernels == "cpu":
        return {"failed": "FlashInfer is not installed, or there is no GPU"}
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    def make(decoding: Decoding) -> Callable[[], object]:
        pages = (decoding.counts + PAGE - 1) // PAGE
        ends = F.pad(pages.cumsum(0), (1, 0)).int()
        last = (decoding.counts - (pages - 1) * PAGE).int()
        count = int(ends[-1])
        workspace = torch.empty(2**27, dtype=torch.uint8, device=where.kernels)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        indices = torch.arange(count, dtype=torch.int32, device=where.kernels)
        wrapper.plan(ends, indices, last, GROUP, 1, DIM, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        states = tuple(decoding.made(count, PAGE, 1, DIM) for _ in range(2))
        return partial(wrapper.run, decoding.query(), states)

    return measured(where, make)


def steps(where: Settings) -> list[dict[str, Any]]:
    """A step of every rule, in which a token comes and an entry of each head leaves, with its attention."""
    bandwidth = measure_roofline(torch.device(where.kernels), torch.bfloat16).bandwidth
    found = []
    with where.serving():
        for rule, decoding in product(RULES, decodings(where, skewed=(False,))):
            seconds = in_turn([step_of(rule, decoding) for _ in range(decoding.layers)], where)
            found.append({"rule": rule, **decoding.facts, **decoding.share(seconds, bandwidth)})
    return found


def step_of(rule: Rule, decoding: Decoding) -> Callable[[], object]:
    """A step of full heads with one slot more than their budgets."""
    counts = decoding.counts
    heads = len(counts)
    width = decoding.mean + 1
    place = counts.device
    positions = torch.arange(width, device=place).repeat(heads, 1)
    positions[:, -1] = -1
    state: tuple[Tensor, ...] = (torch.rand(heads, width, device=place),)
    if rule == "persistence":
        counted = torch.zeros(heads, width, dtype=torch.int16, device=place)
        state = (*state, counted, torch.zeros(heads, width, 50, dtype=torch.uint8, device=place))
    protected = torch.full_like(counts, 4)
    clock = torch.stack([counts, counts - 5])
    keys, values = (decoding.made(heads, width, DIM) for _ in range(2))
    beside = torch.arange(width, dtype=torch.int32, device=place)  # slots are in the order of positions
    links = torch.stack([beside - 1, (beside + 2) % (width + 1) - 1])[:, None].repeat(1, heads, 1)
    slots = Slots(keys, values, positions, state, counts.clone(), clock, counts, protected, protected, links)
    if rule == "position":
        slots = replace(slots, state=())
    if rule == "row":  # positions go on while the same step is timed
        span = decoding.mean + 2**16
        first = torch.arange(heads, device=place) // HEADS * span
        slots = replace(slots, sums=(torch.zeros(2, decoding.batch * span, device=place), first))
    arriving = state[0][:, 0].clone if rule == "stored" else None
    token = decoding.made(heads, DIM), decoding.made(heads, DIM)
    return partial(
        step, decoding.query(), *token, slots, width, rule, SCALING, arriving=arriving, constants=CONSTANTS.get(rule)
    )


if __name__ == "__main__":
    main(
        __doc__,
        6,
        {
            "ours": Step(ours, 90),
            "sdpa": Step(sdpa, 60),
            "flashinfer": Step(flashinfer, 120),
            "steps": Step(steps, 120),
        },
    )
