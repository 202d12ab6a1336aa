from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvsearch.kernels.rows import Rows
from kvsearch.policies.scoring import find_kernel_rows
from kvsearch.testing.policy_contract import Case, observe
from tests.combinations import first_value
from tests.kernels.reference import relative_error
from tests.kernels.serving import interpreted
from tests.runtime.policies import FIRST, SMALL

fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32


@dataclass
class Prompt:
    """The last rows of a prompt with padding on the left of its first sequence."""

    heads: int
    group: int
    rows: int
    length: int
    dim: int
    dtype: torch.dtype = fp32
    pads: int = 0
    softcap: float | None = None
    sinks: bool = False
    batch: int = 2

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        # as projections make them: heads are next to each other in memory, not tokens
        self.queries = normal(self.batch, self.rows, self.heads * self.group, self.dim).transpose(1, 2)
        self.keys = normal(self.batch, self.length, self.heads, self.dim).transpose(1, 2)
        index = torch.arange(self.length)[None] - torch.tensor([self.pads, *[0] * (self.batch - 1)])[:, None]
        self.columns = index.clamp(min=-1)
        self.sink = normal(1, self.heads, self.group).float() if self.sinks else None

    def given(self, causal: bool) -> Rows:
        places = self.columns[:, -self.rows :]
        how = self.dim**-0.5, self.softcap, self.sink, causal
        return Rows(self.queries, self.keys, self.columns, places, *how)

    def expected(self) -> Tensor:
        """The attention of every row, [B, Hkv, G, rows, T] fp64."""
        queries = self.queries.double().unflatten(1, (self.heads, self.group))
        logits = torch.einsum("bhgrd,bhtd->bhgrt", queries, self.keys.double()) * self.dim**-0.5
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        places = self.columns[:, -self.rows :, None]
        seen = (self.columns[:, None] >= 0) & (self.columns[:, None] <= places)
        logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
        if self.sink is not None:
            logits = torch.cat([logits, self.sink.double()[..., None, None].expand(*logits.shape[:-1], 1)], -1)
        return logits.softmax(-1)[..., : self.length].nan_to_num(0.0)


@first_value("causal", [True, False])
@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(1, 2, 32, 300, 80, dtype=bf16, batch=1),
        Prompt(2, 2, 5, 40, 16, pads=37, sinks=True),
        Prompt(1, 3, 80, 80, 32, dtype=fp16, pads=9, softcap=5.0),
        Prompt(1, 1, 1, 1, 256),
    ],
    ids=str,
)
def test_what_entries_receive_is_that_of_a_dense_softmax(prompt: Prompt, causal: bool) -> None:
    rows, weights = prompt.given(causal), prompt.expected()
    received = weights.sum(-2)
    assert relative_error(rows.received("mean"), received.mean(2)) < 1e-5
    assert relative_error(rows.received("max"), received.amax(2)) < 1e-5
    real = weights.any(-1, keepdim=True)
    count = real.sum(-2).clamp(min=1)
    mean, variance = rows.moments()
    expected = received / count
    squares = ((weights - expected[..., None, :]) * real).square().sum(-2)
    assert relative_error(mean, expected) < 1e-5
    assert relative_error(variance, squares / (count - 1).clamp(min=1)) < 1e-5


@first_value("group", ["sum", "max"])
@first_value("factors", ["both", "neither", "norms"])
def test_peaks_are_those_of_a_dense_softmax(group: Literal["sum", "max"], factors: str) -> None:
    prompt = Prompt(2, 3, 37, 90, 16, pads=5, sinks=True)
    context = 61
    generator = torch.Generator().manual_seed(1)
    norms = None if factors == "neither" else torch.rand(2, 2, 3, context, generator=generator)
    weights = torch.rand(2, 37, generator=generator) if factors == "both" else None
    given = prompt.expected()[..., :context]
    if norms is not None:
        given = given * norms[..., None, :]
    given = given.sum(2) if group == "sum" else given.amax(2)
    if weights is not None:
        given = given * weights[:, None, :, None]
    found = prompt.given(causal=True).peaks(context, norms, weights, group)
    assert relative_error(found, given.amax(2)) < 1e-5


@pytest.mark.parametrize("name", [name for name in FIRST.values() if SMALL[name].needs().query_rows])
def test_scores_are_those_of_pytorchs_path(name: str) -> None:
    policy, case = SMALL[name], Case(2, 2, 14, (0, 6), 1)
    with interpreted(False):
        expected = policy.score(observe(policy, case))
    observation = observe(policy, case)
    assert find_kernel_rows(observation, 3) is not None
    found = policy.score(observation)
    real = observation.valid[:, None].expand_as(found)
    torch.testing.assert_close(found[real], expected[real], atol=1e-6, rtol=1e-5)


def test_long_prompts_are_within_the_axes_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes 65,535 programs on the second and third axis; all rows of a prompt of 4M tokens are more tiles."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr("kvsearch.kernels.rows.launch", lambda _, grid, *__, **___: grids.append(grid))
    monkeypatch.setattr("kvsearch.kernels.rows.chunks", lambda length, *_: (1, length))
    rows = 4 << 20
    states = [torch.empty(1, heads, rows, 64, dtype=bf16, device="meta") for heads in (32, 8)]
    places = torch.empty(1, rows, dtype=torch.int64, device="meta")
    Rows(*states, places, places, scaling=0.125, causal=True).received("max")
    assert len(grids) == 2
    assert max(grids[0]) > 65_535
    assert all(size <= 65_535 for grid in grids for size in grid[1:])
