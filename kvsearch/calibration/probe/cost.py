"""What a ranking costs before it is fitted: passes, arithmetic, the entries that are held, and bytes of weights.

Every context is read under its full cache, and what is asked of it goes on from there: a fit reads contexts to fit on
and to report on once, those to choose on as often as something is chosen. Own replies count with as many tokens as
they may have. Attention that is only replayed is not counted, so seconds are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import COMPARED, ProbeOptions, QueryBankOptions, RankingOptions
from kvsearch.calibration.polykv.cost import FP32, ModelSize, Operations, PassCost, cost_of, pairs_of
from kvsearch.calibration.probe.bank import CANDIDATES
from kvsearch.calibration.probe.measure import FEW
from kvsearch.calibration.probe.reading import BUDGETS, Parts, kind_to_leave_out, prepared, split
from kvsearch.calibration.probe.sample import WIDTH
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies.probe import SINKS, SPREAD


@dataclass(frozen=True)
class RankingCost:
    """The cost of a fit at `tflops` 10^12 operations a second; `contexts` are those to fit, choose and report on."""

    tflops: float
    contexts: tuple[int, int, int]
    passes: int  # plain runs of the model over a context
    continuations: int  # over what is asked of one
    reading: PassCost
    held_bytes: int  # entries, or queries, to fit on
    weights_bytes: int  # at most

    def as_json(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return asdict(self)

    def lines(self, words: str) -> Iterator[str]:
        """Say it, with the arithmetic in `words`."""
        fit, choose, report = self.contexts
        yield f"contexts: {fit} to fit on, {choose} to choose on, {report} to report on"
        runs = f"{self.passes:,} runs of the model over contexts, {self.continuations:,} over what is asked of them"
        yield f"{runs}: at least {words}"
        yield f"held to fit on: {self.held_bytes / 1e6:.3g} MB; weights: at most {self.weights_bytes / 1e6:.3g} MB"


def ranking_cost(
    loaded: LoadedModel, data: CalibrationData, options: RankingOptions, tflops: float = 100.0
) -> RankingCost:
    """Estimate what a calibration takes; errors as `prepared`, or UsageError if the rate is not above 0."""
    if not 0 < tflops < float("inf"):
        raise UsageError(f"a rate of {tflops:g} TFLOP/s must be above 0")
    prompts, asking = prepared(loaded, data, options)
    parts, size, work = split(prompts, options.seed), ModelSize.of(loaded.model), _Work(ModelSize.of(loaded.model))
    if options.answers == "own" and "answers" in asking.targets:
        for prompt in prompts:
            replies = [one.answer + (one.most or options.answer_tokens) for one in prompt.continuations]
            work.read(prompt.length, replies, bool(replies))
    lengths = {prompt: [one.tokens.shape[1] for one in asking.questions(prompt, "cpu")] for prompt in prompts}
    if isinstance(options, ProbeOptions):
        left_out = kind_to_leave_out(parts) if "answers" in asking.targets else None
        _count_probe(work, parts, lengths, options, left_out is not None)
        held, weights = _bytes_of_probe(size, parts, options, len(asking.targets), left_out is not None)
    else:
        assert isinstance(options, QueryBankOptions)
        for prompt in prompts:
            work.read(prompt.length, lengths[prompt])
        share = -(-CANDIDATES // len(parts.fit))
        asked = sum(min(share, sum(lengths[prompt])) for prompt in parts.fit)
        query = len(size.full_layers) * size.heads * size.head_dim * FP32
        held, weights = asked * query, min(options.bank, asked) * query
    cost = cost_of(size, work.made, tflops)
    return RankingCost(
        tflops, (len(parts.fit), len(parts.choose), len(parts.report)), work.passes, work.continuations, cost, held,
        weights,
    )  # fmt: skip


class _Work:
    """Counts runs of the model."""

    def __init__(self, size: ModelSize) -> None:
        self.size, self.made, self.passes, self.continuations = size, Operations(), 0, 0

    def read(self, length: int, asked: Sequence[int], times: int = 1) -> None:
        """Read a context, and all that is asked of it."""
        layers = self.size.layers
        self.made.add(layers * length, layers * pairs_of(0, length), 0, times)
        self.passes += times
        self.ask(length, asked, times)

    def ask(self, length: int, asked: Sequence[int], times: int = 1) -> None:
        """Run what is asked of a context, numbers of tokens, after it."""
        for count in asked:
            layers = self.size.layers
            self.made.add(layers * count, layers * pairs_of(length, count), count, times)
            self.continuations += times


def _count_probe(
    work: _Work,
    parts: Parts,
    lengths: Mapping[CalibrationPrompt, list[int]],
    options: ProbeOptions,
    leaves_out: bool,
) -> None:
    """Count the runs of a fit: what is fitted, chosen (twice where a kind is left out) and reported."""

    def judged(prompt: CalibrationPrompt) -> list[int]:
        return [one.tokens.shape[1] for one in prompt.continuations] or lengths[prompt]

    fits = 1 + leaves_out
    for prompt in parts.fit:
        work.read(prompt.length, lengths[prompt])
    for prompt in parts.choose:
        work.read(prompt.length, lengths[prompt], fits)  # the best regression
        if SPREAD in options.features:
            work.read(prompt.length, lengths[prompt], fits)  # how far heads move
            work.read(prompt.length, (), fits)  # how far replies move, of two rankings
            work.ask(prompt.length, judged(prompt), fits * (1 + 2 * len(BUDGETS)))
    for prompt in parts.report:
        work.read(prompt.length, lengths[prompt])
        work.ask(prompt.length, judged(prompt), 1 + (fits + len(COMPARED)) * len(BUDGETS))


def _bytes_of_probe(
    size: ModelSize, parts: Parts, options: ProbeOptions, targets: int, leaves_out: bool
) -> tuple[int, int]:
    """Return the bytes of the entries that are drawn, with their targets, and at most those of the weights."""
    columns = sum(size.head_dim if name in ("key", "value") else 1 for name in options.looked_at)
    heads, each = len(size.full_layers) * size.kv_heads, -(-options.entries // len(parts.fit))
    drawn = sum(min(each, prompt.length - SINKS - options.protect) for prompt in parts.fit)
    told = 1 + (targets if targets > 1 else 0) + leaves_out
    width = WIDTH if options.form == "network" and len(parts.fit) >= FEW else 0
    # center, scale and linear; hidden, with its bias and output; bias
    weights = 3 * columns + width * (columns + 2) + 1
    return heads * drawn * (columns + told) * FP32, heads * weights * FP32
