"""Where a plan starts to pay: costs of steps, prompts and requests are fitted to a few measured ones, and foretold.

A step of a batch takes a + b batch + c batch x entries seconds, as weights are read once, tokens computed one by one
and every entry read. A prompt takes d + e length + f length^2, and a request g + h entries bytes. No coefficient is
negative, so that more work never takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from math import isqrt

import numpy as np

from kvsearch.core.fields import Count, Index
from kvsearch.evaluation.names import FULL

PAYS = 1.1  # times the full cache's tokens per second; less may be an error of prediction
CHECKS = 3  # points that are measured, but not for the fit
FINE = 256  # lengths between which a break-even is looked for
DOUBLINGS = 2  # of the longest measured length, as far as the model takes them


@dataclass(frozen=True)
class StepCosts:
    """Measured costs of one kind of cache at one length and batch.

    Args:
        entries: of one sequence that a step reads, in all full-attention layers and kv heads.
        prompt_entries: those that are held when the prompt was read, before anything leaves while decoding.
        token_seconds: of a decode step of the batch, in the fastest round.
        token_spread: how many times as long a step takes in the median round; well above 1 where a machine is busy.
        prefill_seconds: of one prompt, the fastest.
        request_bytes: of one sequence: its cache, and what a step takes beside it.
    """

    cache: str
    length: Count
    batch: Count
    entries: Index
    prompt_entries: Index
    token_seconds: float
    token_spread: float
    prefill_seconds: float
    request_bytes: Index


@dataclass(frozen=True)
class CostCheck(StepCosts):
    """Costs that were measured, but not for the fit, beside what the fit says of them."""

    foretold_token_seconds: float
    foretold_prefill_seconds: float

    @property
    def error(self) -> float:
        """The relative error of the foretold seconds of a step."""
        return self.foretold_token_seconds / self.token_seconds - 1


@dataclass(frozen=True)
class CostModel:
    """Costs of one kind of cache: coefficients of the seconds of a step and a prompt, and the bytes of a request."""

    step: tuple[float, ...]
    prompt: tuple[float, ...]
    request: tuple[float, ...]

    @classmethod
    def fit(cls, costs: Sequence[StepCosts]) -> CostModel:
        """Fit the coefficients to what was measured of one kind of cache."""
        return cls(
            fit_costs(
                [_step_terms(cost.batch, cost.entries) for cost in costs], [cost.token_seconds for cost in costs]
            ),
            fit_costs([_prompt_terms(cost.length) for cost in costs], [cost.prefill_seconds for cost in costs]),
            fit_costs([(1, cost.prompt_entries) for cost in costs], [cost.request_bytes for cost in costs]),
        )

    def estimate_step(self, batch: int, entries: int) -> float:
        """Estimate the seconds of a decode step of a batch, with so many entries of each sequence."""
        return float(np.dot(self.step, _step_terms(batch, entries)))

    def estimate_prompt(self, length: int) -> float:
        """Estimate the seconds that one prompt takes to read."""
        return float(np.dot(self.prompt, _prompt_terms(length)))

    def estimate_request(self, prompt_entries: int) -> float:
        """Estimate the bytes of one sequence while it is decoded."""
        return float(np.dot(self.request, (1, prompt_entries)))

    def check(self, cost: StepCosts) -> CostCheck:
        """Put what this says beside what was measured."""
        return CostCheck(
            **asdict(cost),
            foretold_token_seconds=self.estimate_step(cost.batch, cost.entries),
            foretold_prefill_seconds=self.estimate_prompt(cost.length),
        )


def _step_terms(batch: int, entries: int) -> tuple[float, float, float]:
    return 1.0, float(batch), float(batch * entries)


def _prompt_terms(length: int) -> tuple[float, float, float]:
    return 1.0, float(length), float(length) ** 2


def fit_costs(terms: Sequence[Sequence[float]], measured: Sequence[float]) -> tuple[float, ...]:
    """Fit the non-negative coefficients [K] of a sum of `terms` [N, K] to what was `measured` [N], all positive.

    The squares of relative errors are least, so that short steps count as much as long ones.
    """
    from scipy.optimize import nnls

    rows = np.asarray(terms, np.float64) / np.asarray(measured, np.float64)[:, None]
    scale = rows.max(0)  # of the terms, which are many orders of magnitude apart
    coefficients, _ = nnls(rows / scale, np.ones(len(rows)))
    return tuple((coefficients / scale).tolist())


@dataclass(frozen=True)
class CurvePoint:
    """What is foretold of a kind of cache at one length and batch; `FULL` is the faster of the full caches.

    Args:
        speedup: how many times the full cache's tokens per second.
        prefill_seconds: of one prompt.
        requests: sequences that fit into memory at once, and the tokens per second of all of them.
        is_measured: whether length and batch are within those that were measured; `requests` may be beyond.
    """

    cache: str
    length: Count
    batch: Count
    tokens_per_second: float
    speedup: float
    prefill_seconds: float
    requests: Index
    requests_per_second: float
    is_measured: bool


@dataclass(frozen=True)
class BreakEven:
    """The least length from which on a plan decodes `PAYS` times as fast as the full cache; None: at no length."""

    cache: str
    batch: Count
    length: Count | None


@dataclass(frozen=True)
class Forecaster:
    """What fitted costs say of any length and batch.

    Args:
        costs: by kind of cache.
        count_entries: entries of a kind of cache that a step reads at a length, and those after the prompt.
        full: the kinds that evict nothing.
        memory: bytes for all sequences together.
    """

    costs: Mapping[str, CostModel]
    count_entries: Callable[[str, int], tuple[int, int]]
    full: tuple[str, ...]
    memory: int

    def estimate_rate(self, cache: str, length: int, batch: int) -> float:
        """Estimate the tokens per second of a batch, under `FULL` the faster full cache's."""
        if cache == FULL:
            return max(self.estimate_rate(name, length, batch) for name in self.full)
        entries, _ = self.count_entries(cache, length)
        return batch / self.costs[cache].estimate_step(batch, entries)

    def count_requests(self, cache: str, length: int) -> int:
        """Count the sequences that fit into memory at once, under `FULL` with the smaller full cache."""
        if cache == FULL:
            return max(self.count_requests(name, length) for name in self.full)
        _, entries = self.count_entries(cache, length)
        return int(self.memory // self.costs[cache].estimate_request(entries))

    def foretell(self, cache: str, length: int, batch: int, longest: int) -> CurvePoint:
        """Foretell a point of the curve; up to the `longest` length it was measured."""
        rate = self.estimate_rate(cache, length, batch)
        names = self.full if cache == FULL else (cache,)
        requests = self.count_requests(cache, length)
        return CurvePoint(
            cache, length, batch, rate,
            speedup=rate / self.estimate_rate(FULL, length, batch),
            prefill_seconds=min(self.costs[name].estimate_prompt(length) for name in names),
            requests=requests,
            requests_per_second=self.estimate_rate(cache, length, requests) if requests else 0.0,
            is_measured=length <= longest,
        )  # fmt: skip

    def find_break_even(self, cache: str, batch: int, shortest: int, longest: int) -> BreakEven:
        """Find the least length from `shortest` to `longest` from which on a plan pays."""
        first = None
        for length in np.unique(np.geomspace(shortest, longest, FINE).round().astype(int))[::-1].tolist():
            if self.estimate_rate(cache, length, batch) < PAYS * self.estimate_rate(FULL, length, batch):
                break
            first = length
        return BreakEven(cache, batch, first)


def choose_checks(lengths: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int]]:
    """Choose `CHECKS` points of length and batch that lie between those that are measured; fewer where none do."""
    lengths_between = _list_middles(lengths)
    inner = list(product(lengths_between, _list_middles(batches)))
    points = inner if len(inner) >= CHECKS else [*inner, *product(lengths_between, batches)][:CHECKS]
    return [points[round(at)] for at in np.linspace(0, len(points) - 1, min(CHECKS, len(points)))]


def _list_middles(values: Iterable[int]) -> list[int]:
    """List the geometric means of neighbours, but for those that are next to each other."""
    return [isqrt(low * high) for low, high in pairwise(sorted(set(values))) if isqrt(low * high) > low]


def list_lengths(lengths: Sequence[int], limit: int) -> list[int]:
    """List the lengths of a curve: those that are measured, and the longest doubled, up to the model's `limit`."""
    longer = [max(lengths) * 2**times for times in range(1, DOUBLINGS + 1)]
    return sorted({*lengths, *(length for length in longer if not limit or length <= limit)})
