"""What a PolyKV calibration costs before it is run: forward tokens, arithmetic and memory, as papers do it and as here.

The papers run the model anew for every layer, phase, pattern and budget, over the prompt and its continuation. Here a
prompt of T tokens is read once, the attention of every ablated layer is replayed by itself, and only the K tokens of
the continuation go on from there: ablating layer l of D costs K (D - l) token-layers instead of D (T + K).

A token costs two operations per parameter of a layer, and four per query head and dimension for every token it sees;
the output head is applied to continuations only. Sliding windows, scores of patterns, and decode rules, which go token
by token, are not counted: seconds are a lower bound.

Llama-3.1-8B, T = 8192, K = 128, nine patterns, two phases and one budget:

    papers  4,800,640 forward tokens  77.6 PFLOP  776 s at 100 TFLOP/s
    here       46,336 forward tokens   0.9 PFLOP  9.1 s                  85 times less
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.calibration.polykv.options import PolykvOptions
    from kvsearch.calibration.prompts import CalibrationPrompt
    from kvsearch.policies import Policy

FP32 = 4
REPLAY_TABLES = 4  # of attention logits of one token: logits, masked ones, weights, and those in the making
PATTERN_BYTES = 17  # of scores and ranks, for every entry of a prompt; the mean over the paper's patterns
STATE_BYTES = 80  # of an entry while it is replayed: positions, order, and what decode rules remember


@dataclass(frozen=True)
class ModelSize:
    """The shape of a model. `parameters` are those of all decoder layers, `bytes` those of a number."""

    layers: int
    full_layers: tuple[int, ...]  # in which something can be evicted
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    bytes: int = 2

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """Read the shape off a model; IncompatibleError as `describe`. Of experts it counts all, not those in use."""
        from kvsearch.models.architecture import decoder, describe, text_config

        shape, config = describe(model), text_config(model)
        layers: Any = decoder(model).layers
        return cls(
            shape.layers, shape.full_layers, shape.hidden_size, getattr(config, "intermediate_size", 0),
            shape.query_heads, shape.kv_heads, shape.head_dim, config.vocab_size,
            sum(int(parameter.numel()) for parameter in layers.parameters()), int(model.dtype.itemsize),
        )  # fmt: skip

    @property
    def activations(self) -> int:
        """Bytes of a token on its way through a layer."""
        states = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (4 * self.hidden + states + 3 * self.intermediate) * self.bytes


@dataclass(frozen=True)
class SweepWork:
    """What is measured: `prompts` are their tokens, each with the tokens of its continuations.

    `tried` is how many ablations a layer has: `patterns` times phases times budgets; 0 where only entropy is
    measured. `query_rows` and `column_sums` are what patterns need of a prompt.
    """

    prompts: tuple[tuple[int, tuple[int, ...]], ...]
    tried: int
    losses: bool = True  # whether ablations go on to the output
    batch: int = 8
    query_rows: int = 0
    column_sums: bool = False
    patterns: int = 0

    @classmethod
    def of(cls, prompts: Sequence[CalibrationPrompt], policies: Sequence[Policy], options: PolykvOptions) -> SweepWork:
        """Describe the work of a calibration; UsageError if a policy has no decode rule."""
        from kvsearch.calibration.polykv.ablations import entropy_needs, needs_of

        ablated = "cosine" in options.signals or "ppl" in options.signals
        used = policies if ablated else ()
        needs = needs_of(used, options.measured_phases)
        if "entropy" in options.signals:
            needs.append(entropy_needs(options.entropy_rows, options.measured_phases))
        return cls(
            tuple((one.length, tuple(after.tokens.shape[1] for after in one.continuations)) for one in prompts),
            tried=len(used) * len(options.measured_phases) * len(options.budgets),
            losses="ppl" in options.signals,
            batch=options.batch,
            query_rows=max((need.query_rows for need in needs), default=0),
            column_sums=any(need.column_sums for need in needs),
            patterns=len(used),
        )

    @property
    def longest(self) -> tuple[int, int]:
        """The most tokens of a prompt and of a continuation."""
        return max(length for length, _ in self.prompts), max(k for _, after in self.prompts for k in after)


@dataclass(frozen=True)
class PassCost:
    """`forward_tokens` are tokens through all layers, `seconds` at the rate that was asked for."""

    forward_tokens: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one batch besides the weights, in numbers of `groups`, the ablations that are swept at a time.

    `layers` are replayed side by side. `minimum` is that of one group and one layer, `peak` that of as many as fit:
    layers get half of what is left for more of them, at most, and groups the rest.
    """

    cache: int
    observed: int
    minimum: int
    layers: int
    groups: int
    peak: int


@dataclass(frozen=True)
class CostEstimate:
    """A calibration by the papers' procedure and by ours, at `tflops`; `memory` is that of ours."""

    tflops: float
    samples: int
    runs: int  # of the model, in the papers' procedure
    naive: PassCost
    sweep: PassCost
    memory: Memory

    @property
    def speedup(self) -> float:
        """How many times less arithmetic the sweep takes."""
        return self.naive.flops / self.sweep.flops

    def as_json(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return {**asdict(self), "speedup": self.speedup}


def estimate(size: ModelSize, work: SweepWork, tflops: float = 100.0, max_memory: int | None = None) -> CostEstimate:
    """Estimate cost and memory of `work` on a machine of `tflops` 10^12 operations a second, in `max_memory` bytes.

    Raises:
        UsageError: the rate is not above 0, or not even one ablation at a time fits the memory.
    """
    if not 0 < tflops < float("inf"):
        raise UsageError(f"a rate of {tflops:g} TFLOP/s must be above 0")
    samples = sum(len(after) for _, after in work.prompts)
    return CostEstimate(
        tflops,
        samples,
        runs=samples * (1 + work.tried * len(size.full_layers)),
        naive=cost_of(size, _naive(size, work), tflops),
        sweep=cost_of(size, _sweep(size, work), tflops),
        memory=memory_of(size, work, max_memory),
    )


def memory_of(size: ModelSize, work: SweepWork, max_memory: int | None = None) -> Memory:
    """Return what the longest batch takes, with as many ablations at once as fit `max_memory` bytes (None: all).

    Raises:
        UsageError: not even one fits.
    """
    length, count = work.longest
    batch = min(work.batch, len(work.prompts))
    rows = min(work.batch, sum(len(after) for _, after in work.prompts))  # of continuations at a time
    entry = 2 * size.kv_heads * size.head_dim * size.bytes
    cache = batch * length * size.layers * entry
    sums = length * size.kv_heads * FP32 * work.column_sums
    remembered = PATTERN_BYTES * work.patterns * length * size.kv_heads
    queries = work.query_rows * size.heads * size.head_dim * size.bytes
    observed = batch * len(size.full_layers) * (queries + sums + remembered)
    states = size.layers * (size.heads + 2 * size.kv_heads) * size.head_dim + (size.layers + 1) * size.hidden
    baseline = rows * count * states * size.bytes
    head = rows * count * size.vocabulary * (FP32 + size.bytes)
    reading, fixed = batch * length * size.activations, baseline + head
    group, layer = rows * count * size.activations, replay_bytes(size, work, rows)
    minimum = cache + observed + max(reading, fixed + group + layer)
    if max_memory is not None and minimum > max_memory:
        advice = "lower --batch or raise" if batch > 1 else "shorten the texts or raise"
        raise UsageError(
            f"a batch of {batch} with prompts of up to {length} tokens takes {_gigabytes(minimum)} besides the "
            f"weights, --max-memory is {max_memory / 1e9:.3g} GB: {advice} it"
        )
    groups = max(1, work.tried * len(size.full_layers) if work.losses else 0)
    layers = max(1, len(size.full_layers) if work.tried else 0)
    if max_memory is not None:
        free = max_memory - cache - observed - fixed - group - layer
        layers = min(layers, 1 + free // 2 // layer)
        groups = min(groups, 1 + (free - (layers - 1) * layer) // group)
    peak = cache + observed + max(reading, fixed + groups * group + layers * layer)
    return Memory(cache, observed, minimum, layers, groups, peak)


def replay_bytes(size: ModelSize, work: SweepWork, rows: int) -> int:
    """Return what the replays of one layer take for `rows` continuations: copies of keys and values, logits, outputs.

    The scratch of a chunk, see `policies.scoring.chunk_bytes`, is not counted: it does not grow with the prompts.
    """
    length, count = work.longest
    entry = 2 * size.kv_heads * size.head_dim * size.bytes
    column = 2 * entry + REPLAY_TABLES * FP32 * size.heads + STATE_BYTES * size.kv_heads
    return rows * ((length + count) * column + work.tried * count * size.heads * size.head_dim * size.bytes)


def _gigabytes(size: int) -> str:
    """Return bytes in GB, rounded up to a MB: a limit of that is enough."""
    return f"{math.ceil(size / 1e6) / 1e3:g} GB"


@dataclass
class Operations:
    """Counts what a model computes."""

    tokens: int = 0  # through one layer
    pairs: int = 0  # of tokens, in one layer
    scored: int = 0  # tokens through the output head

    def add(self, tokens: int, pairs: int, scored: int, times: int = 1) -> None:
        """Count a run `times` over."""
        self.tokens += tokens * times
        self.pairs += pairs * times
        self.scored += scored * times


def pairs_of(seen: int, count: int) -> int:
    """Count pairs of `count` tokens with themselves, those before them, and `seen` ones before all."""
    return count * seen + count * (count + 1) // 2


def _naive(size: ModelSize, work: SweepWork) -> Operations:
    made, runs = Operations(), 1 + work.tried * len(size.full_layers)
    for length, following in work.prompts:
        for count in following:
            made.add(size.layers * (length + count), size.layers * pairs_of(0, length + count), count, runs)
    return made


def _sweep(size: ModelSize, work: SweepWork) -> Operations:
    made = Operations()
    for length, following in work.prompts:
        made.add(size.layers * length, size.layers * pairs_of(0, length), 0)
        for count in following:
            pairs = pairs_of(length, count)
            made.add(size.layers * count, size.layers * pairs, count)
            for layer in size.full_layers:
                left = size.layers - layer  # layers that what is ablated goes through, where losses are measured
                once = (left * count, left * pairs, count) if work.losses else (0, pairs, 0)
                made.add(*once, work.tried)
    return made


def cost_of(size: ModelSize, operations: Operations, tflops: float) -> PassCost:
    """Return what operations cost at a rate."""
    flops = (
        2 * size.parameters / size.layers * operations.tokens
        + 4 * size.heads * size.head_dim * operations.pairs
        + 2 * size.hidden * size.vocabulary * operations.scored
    )
    return PassCost(operations.tokens / size.layers, flops, flops / (tflops * 1e12))
