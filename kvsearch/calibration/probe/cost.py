"""What a ranking costs before it is fitted: passes, arithmetic, the entries that are held, and bytes of weights.

Every context is read under its full cache, and what is asked of it goes on from there: a fit reads contexts to fit on
and to report on once, those to choose on as often as something is chosen. Own replies count with as many tokens as
they may have. Attention that is looked at costs what its logits cost, once for importance, and whole for every set of
entries under which the output of heads is compared. Scores of policies and the softmax are not counted, and no machine
is always busy, so seconds are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import CANDIDATES, COMPARED, ProbeOptions, QueryBankOptions, RankingOptions
from kvsearch.calibration.polykv.cost import FP32, ModelSize, Operations, PassCost, cost_of, pairs_of
from kvsearch.calibration.probe.bank import ROUNDS
from kvsearch.calibration.probe.contexts import without
from kvsearch.calibration.probe.measure import FEW
from kvsearch.calibration.probe.reading import BUDGETS, Asking, Parts, evenly, kind_to_leave_out, prepared, split
from kvsearch.calibration.probe.sample import BATCH, RIDGE, STEPS, STRONG, WIDTH
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.policies.generic import SINKS, SPREAD
from kvsearch.policies.probe import column_count


@dataclass(frozen=True)
class RankingCost:
    """The cost of a fit at `tflops` 10^12 operations a second; `contexts` are those to fit, choose and report on."""

    tflops: float
    contexts: tuple[int, int, int]
    passes: int  # plain runs of the model over a context
    continuations: int  # over what is asked of one
    reading: PassCost
    disk_bytes: int  # entries, or queries, to fit on, until the end
    host_bytes: int  # at most, besides the model and the libraries
    fit_flops: float  # of Gram matrices and networks
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
        yield f"fitting: {self.fit_flops / 1e12:.3g} TFLOP more"
        yield f"memory of the host: at most {_size(self.host_bytes)}, besides the model"
        yield f"on disk: {_size(self.disk_bytes)} until it is done; weights: at most {_size(self.weights_bytes)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def ranking_cost(
    loaded: LoadedModel, data: CalibrationData, options: RankingOptions, tflops: float = 100.0
) -> RankingCost:
    """Estimate what a calibration takes; errors as `prepared`, or UsageError if the rate is not above 0."""
    if not 0 < tflops < float("inf"):
        raise UsageError(f"a rate of {tflops:g} TFLOP/s must be above 0")
    prompts, asking = prepared(loaded, data, options)
    return cost_of_fit(ModelSize.of(loaded.model), prompts, asking, options, tflops)


def cost_of_fit(
    size: ModelSize, prompts: Sequence[CalibrationPrompt], asking: Asking, options: RankingOptions, tflops: float
) -> RankingCost:
    """Estimate what a calibration on these prompts takes, for a model of this size."""
    parts, work = split(prompts, options.seed), _Work(size)
    if options.answers == "own" and "answers" in asking.targets:
        for prompt in prompts:
            replies = [one.answer + (one.most or options.answer_tokens) for one in prompt.continuations]
            if replies:
                work.read(prompt.length, replies, 0)
    kind = kind_to_leave_out(parts) if "answers" in asking.targets else None
    fits = [parts] if kind is None else [parts, without(parts, kind)]
    _count_fits(work, fits, asking, options, kind)
    if isinstance(options, ProbeOptions):
        disk, weights = _bytes_of_probe(size, parts, options, len(fits))
        host, fitting = _fitting(size, parts, options, len(fits))
    else:
        assert isinstance(options, QueryBankOptions)
        candidates = [_candidates(one, asking) for one in fits]
        query = len(size.full_layers) * size.heads * size.head_dim * FP32
        even = len(size.full_layers) * size.kv_heads * FP32
        disk, weights = sum(candidates) * query, min(options.bank, candidates[0]) * query + even
        # queries as they are joined, as vectors, and in the distances of k-means
        host = 3 * max(candidates) * query
        # distances for farthest points, which k-means begins at, in its rounds, with the means, and after them
        fitting = 2.0 * (disk / FP32) * options.bank * (2 + 2 * ROUNDS + 1)
    cost = cost_of(size, work.made, tflops)
    return RankingCost(
        tflops, (len(parts.fit), len(parts.choose), len(parts.report)), work.passes, work.continuations, cost, disk,
        host, fitting, weights,
    )  # fmt: skip


class _Work:
    """Counts runs of the model."""

    def __init__(self, size: ModelSize) -> None:
        self.size, self.made, self.passes, self.continuations = size, Operations(), 0, 0

    def read(self, length: int, asked: Sequence[int], replayed: float = 0.5) -> None:
        """Read a context, and all that is asked of it, whose attention is `replayed` so many times."""
        layers = self.size.layers
        self.made.add(layers * length, layers * pairs_of(0, length), 0)
        self.passes += 1
        self.ask(length, asked, replayed=replayed)

    def ask(self, length: int, asked: Sequence[int], times: int = 1, replayed: float = 0.0) -> None:
        """Run what is asked of a context, numbers of tokens, after it."""
        for count in asked:
            layers, pairs = self.size.layers, pairs_of(length, count)
            again = round(replayed * len(self.size.full_layers) * pairs)
            self.made.add(layers * count, layers * pairs + again, count, times)
            self.continuations += times


def _count_fits(
    work: _Work, fits: Sequence[Parts], asking: Asking, options: RankingOptions, left_out: str | None
) -> None:
    """Count the runs of a fit, of a second one without the kind of question that is `left_out`, and of the report.

    A second query bank reads the contexts to fit on again, a second probe has what was drawn of them.
    """
    probe = isinstance(options, ProbeOptions)
    spread = not isinstance(options, ProbeOptions) or SPREAD in options.features

    def asked(prompt: CalibrationPrompt) -> list[int]:
        return [one.tokens.shape[1] for one in asking.questions(prompt, "cpu")]

    def judged(prompt: CalibrationPrompt) -> list[int]:
        return [one.tokens.shape[1] for one in prompt.continuations] or list(evenly(asked(prompt)))

    for number, parts in enumerate(fits):
        for prompt in parts.fit if number == 0 or not probe else ():
            work.read(prompt.length, asked(prompt), 0.5 if probe else 0.0)  # a bank takes queries, not importance
        for prompt in parts.choose:
            work.read(prompt.length, asked(prompt))  # what ranks best
            if spread:
                # how far heads move, under two rankings at every budget
                work.read(prompt.length, asked(prompt), 1 + 2 * len(BUDGETS))
                work.read(prompt.length, ())  # how far replies move, of two rankings
                work.ask(prompt.length, judged(prompt), 1 + 2 * len(BUDGETS))
    for prompt in fits[0].report:
        rankings = 1 + (left_out in prompt.kinds if left_out is not None else 0) + len(COMPARED)
        work.read(prompt.length, asked(prompt))
        work.ask(prompt.length, judged(prompt), 1 + rankings * len(BUDGETS))


def _candidates(parts: Parts, asking: Asking) -> int:
    """Return of how many tokens a bank is chosen."""
    share = -(-CANDIDATES // len(parts.fit))
    return sum(min(share, sum(one.tokens.shape[1] for one in asking.questions(prompt, "cpu"))) for prompt in parts.fit)


def _bytes_of_probe(size: ModelSize, parts: Parts, options: ProbeOptions, fits: int) -> tuple[int, int]:
    """Return the bytes of the entries that are drawn, with a target for each fit, and at most those of the weights."""
    columns = column_count(options.looked_at, size.head_dim)
    heads, each = len(size.full_layers) * size.kv_heads, -(-options.entries // len(parts.fit))
    drawn = sum(min(each, prompt.length - SINKS - options.protect) for prompt in parts.fit)
    width = _width(parts, options)
    # center, scale and linear; hidden, with its bias and output; bias
    weights = 3 * columns + width * (columns + 2) + 1
    return heads * drawn * (columns + fits) * FP32, heads * weights * FP32


def _width(parts: Parts, options: ProbeOptions) -> int:
    """Return how many hidden units a head may have."""
    return WIDTH if options.form == "network" and len(parts.fit) >= FEW else 0


def _fitting(size: ModelSize, parts: Parts, options: ProbeOptions, fits: int) -> tuple[int, float]:
    """Return the bytes that the host needs, and the operations of Gram matrices and networks.

    While contexts are read: the features of one, and their copy as one layer's are taken. While a layer is fitted: its
    entries, standardised, without some of their columns, and twice as long for the Gram matrix.
    """
    columns, heads = column_count(options.looked_at, size.head_dim), len(size.full_layers) * size.kv_heads
    longest = max(prompt.length for part in parts for prompt in part)
    read = heads * longest * columns * FP32 + size.kv_heads * longest * columns * 2 * FP32
    layer = size.kv_heads * options.entries * columns * (3 * FP32 + 2 * 2 * FP32)
    strengths = len(STRONG) if len(parts.fit) < FEW else len(RIDGE)
    ridge = 2 * strengths * 2.0 * options.entries * columns**2  # on all columns, and on an entry's own
    network = 6.0 * STEPS * min(BATCH, options.entries) * columns * _width(parts, options)
    return max(read, layer), heads * (fits * ridge + network)
