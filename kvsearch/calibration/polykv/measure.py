"""PolyKV: signals of every layer, phase and eviction pattern, from one full-cache pass over every prompt.

For each continuation of a prompt: how every pattern changes the attention output of every layer (cosine, relative
error), what it costs the continuation (loss), and how scattered attention is (entropy). Strategies are made of the
profile later, without running the model again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.calibration.base import Calibration
from kvsearch.calibration.polykv.layer_sweep import (
    ROWS,
    Ablations,
    LayerSweep,
    PromptBatch,
    SweepSizes,
    TextContinuation,
    collect_needs,
    make_batches,
)
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.prompts import CalibrationPrompt, encode_prompts
from kvsearch.core.errors import IncompatibleError, KvsearchWarning, UsageError
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.architecture import Architecture, describe, find_text_config
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import FP32, find_default_memory
from kvsearch.models.work import Work
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import CONTEXT, LENGTH, MEAN_ENTROPY, TOKENS, Arrays, SignalAxes
from kvsearch.policies import Policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.cache import check_rotary
from kvsearch.signals.attention_rows import mean_entropy

PROMPT = "prompt"
QUESTION = "question"  # numbers of a continuation's prompt and of it among those of the prompt, [M] int32

ABLATION_CPU_BYTES = 4 * 2**30  # of memory besides the weights
MEMORY_SHARE = 0.8
REPLAY_TABLES = 4  # of attention logits of one token: logits, masked ones, weights, and those in the making
PATTERN_BYTES = 17  # of scores and ranks, for every entry of a prompt; the mean over the paper's patterns
STATE_BYTES = 80  # of an entry while it is replayed: positions, order, and what decode rules remember

RANKING_TIME_FACTOR = 3.0  # times that passes take as long under all patterns: benchmarks/said_and_taken.py, on a CPU
SweepPass = tuple[PromptBatch, Sequence[TextContinuation]]


class PolykvCalibration(Calibration[PolykvOptions]):
    """The signals of every layer, phase and policy (arXiv 2606.15157, Eq. 2 to 5).

    A step is a pass over some continuations of the prompts of a batch.
    """

    @property
    def ablations(self) -> Ablations:
        """All ablations of this calibration."""
        shape = describe(self.loaded.model)
        options = self.options
        policies = tuple(self.policies)
        return Ablations(policies, options.budgets, options.measured_phases, shape.full_layers, shape.kv_heads)

    def prepare(self) -> list[CalibrationPrompt]:
        """Return the prompts; a `KvsearchWarning` if a budget evicts nothing from some of them.

        Raises:
            UsageError: no prompt is longer than a budget, or no token whose loss counts.
            IncompatibleError: a prompt and what follows do not fit the positions of the model.
        """
        options = self.options
        check_rotary(self.loaded.model, self.policies)
        prompts = encode_prompts(self.loaded, self.data, options.protocol, options.answer_tokens, options.max_length)
        lengths = [prompt.length for prompt in prompts]
        for budget in options.budgets:
            _check_evicts(lengths, budget)
        has_loss = any(after.predicted for prompt in prompts for after in prompt.continuations)
        if "ppl" in options.signals and not has_loss:
            raise UsageError(
                "no answer has a second token, and eviction cannot change the first one, which the prompt predicts: "
                "give longer answers, or --signals cosine,entropy"
            )
        return prompts

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the passes of the model and their tokens, in one sweep.

        Tokens that follow an ablation of layer l of D go on through D - l layers, where losses are
        measured; they count as so many that go through all layers.
        """
        options = self.options
        shape = describe(self.loaded.model)
        tried = len(self.ablations.of_layer)
        work = Work()
        for batch in make_batches(prompts, options.batch, self.loaded.device):
            work += Work.over(prompt.length for prompt in batch.prompts)
            for samples in batch.split_passes(options.batch):
                followed = sum(batch.tokens(sample) for sample in samples)
                work += Work(0, followed)
                if "ppl" in options.signals:
                    above = sum(shape.layers - layer for layer in shape.full_layers)
                    work += Work(tried * len(shape.full_layers), tried * followed * above // shape.layers)
        return work * RANKING_TIME_FACTOR

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        options = self.options
        at_once = choose_sweep_sizes(self.loaded, prompts, self.policies, options)
        work = partial(_measure_batch, ablations=self.ablations, options=options, at_once=at_once)
        passes: list[SweepPass] = [
            (batch, samples)
            for batch in make_batches(prompts, options.batch, self.loaded.device)
            for samples in batch.split_passes(options.batch)
        ]

        def make(missing: Sequence[SweepPass]) -> Iterator[Arrays]:
            groups = groupby(missing, key=itemgetter(0))
            items = [(batch, [samples for _, samples in group]) for batch, group in groups]
            for results in self.loaded.map(work, items):
                yield from results

        arrays = _concatenate(list(with_progress(self.steps.stage(passes, make), len(passes), progress)))
        return self._profile(arrays)

    def _profile(self, arrays: dict[str, NDArray[Any]]) -> Profile:
        options = self.options
        count = len(arrays[LENGTH])
        if ROWS in arrays:
            rows = arrays.pop(ROWS) / count
            arrays[MEAN_ENTROPY] = np.array(
                [[mean_entropy(torch.from_numpy(row)) for row in layers] for layers in rows], dtype=np.float32
            )
        base = next(policy for policy in self.policies if policy.name == options.policy)
        settings: dict[str, Any] = {
            **options.texts(self.data), "protocol": options.protocol, "answer_tokens": options.answer_tokens,
        }  # fmt: skip
        if options.phases != "both":
            settings["phases"] = options.phases
        metadata = self.describe(base.spec, settings, arrays[LENGTH].tolist(), base.least)
        axes = SignalAxes(
            patterns=tuple(policy.spec for policy in self.policies),
            phases=options.measured_phases,
            budgets=options.budgets,
            protocol=options.protocol,
        )
        return Profile(metadata.model_copy(update={"signals": axes}), arrays)


def _check_evicts(lengths: Sequence[int], budget: int) -> None:
    short = sum(length <= budget for length in lengths)
    if short == len(lengths):
        raise UsageError(
            f"nothing is evicted at a budget of {budget}: no calibration prompt has more than {max(lengths)} tokens; "
            "give longer texts or smaller budgets"
        )
    if short:
        warnings.warn(
            f"nothing is evicted at a budget of {budget} from {short} of {len(lengths)} calibration prompts, which "
            "have no more tokens: they say that patterns do not matter",
            KvsearchWarning,
            stacklevel=3,
        )


def _concatenate(passes: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """Concatenate the arrays of all continuations in order; mean attention rows are summed, [P, L, N]."""
    numbers = [np.concatenate([arrays_of_pass[name] for arrays_of_pass in passes]) for name in (QUESTION, PROMPT)]
    order = np.lexsort(numbers)
    names = [name for name in passes[0] if name not in (ROWS, PROMPT, QUESTION)]
    arrays = {name: np.concatenate([arrays_of_pass[name] for arrays_of_pass in passes])[order] for name in names}
    if ROWS in passes[0]:
        rows = [row for arrays_of_pass in passes for row in arrays_of_pass[ROWS]]
        total = np.zeros((*rows[0].shape[:2], max(row.shape[-1] for row in rows)))
        for number in order:
            total[..., : rows[number].shape[-1]] += rows[number]
        arrays[ROWS] = total
    return arrays


def _measure_batch(
    loaded: LoadedModel,
    item: tuple[PromptBatch, Sequence[Sequence[TextContinuation]]],
    ablations: Ablations,
    options: PolykvOptions,
    at_once: SweepSizes,
) -> Iterator[Arrays]:
    """Measure a batch of prompts; the `item` is the batch and the continuations of each missing pass.

    Raises:
        IncompatibleError: the model computes NaN.
    """
    batch, passes = item
    with run_attention(loaded.model):
        sweep = LayerSweep(loaded.model, ablations, batch, options.signals, at_once)
        for samples in passes:
            continuations = batch.continuations(samples, loaded.device)
            read = batch.repeat_prompts(samples)
            arrays: dict[str, NDArray[Any]] = {
                PROMPT: np.array(read.places, dtype=np.int32),
                QUESTION: np.array([number for _, number in samples], dtype=np.int32),
                CONTEXT: np.array([prompt.text for prompt in read.prompts], dtype=np.int32),
                LENGTH: np.array([prompt.length for prompt in read.prompts], dtype=np.int32),
                TOKENS: continuations.predicting.sum(-1).cpu().numpy().astype(np.int32),
            }
            arrays |= sweep.measure(continuations).arrays(options.signals)
            for array in arrays.values():
                bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))
                if bad.size:
                    context = int(arrays[CONTEXT][bad[0]])
                    raise IncompatibleError(f"{loaded.name}: the model computes NaN on calibration context {context}")
            yield arrays


def choose_sweep_sizes(
    loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], policies: Sequence[Policy], options: PolykvOptions
) -> SweepSizes:
    """Choose how many ablations are swept and how many layers replayed at a time, in the longest batch.

    Layers get half of what is left for more than one of each, at most, and ablations the rest.
    """
    shape = describe(loaded.model)
    config: Any = find_text_config(loaded.model)
    item = int(loaded.model.dtype.itemsize)
    phases = options.measured_phases
    is_ablated = bool({"cosine", "ppl"} & set(options.signals))
    patterns = policies if is_ablated else ()
    ablations = len(patterns) * len(phases) * len(options.budgets)  # of a layer
    needs = collect_needs(patterns, phases, options.signals)

    length = max(prompt.length for prompt in prompts)
    counts = [after.tokens.shape[1] for prompt in prompts for after in prompt.continuations]
    count = max(counts)
    batch = min(options.batch, len(prompts))
    rows = min(options.batch, len(counts))  # of continuations at a time
    states = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    # a token on its way through a layer
    token = (4 * shape.hidden_size + states + 3 * getattr(config, "intermediate_size", 0)) * item

    cache = batch * length * shape.layers * 2 * shape.kv_heads * shape.head_dim * item
    observed_queries = max((need.query_rows for need in needs), default=0) * shape.query_heads * shape.head_dim * item
    sums = length * shape.kv_heads * FP32 if any(need.column_sums for need in needs) else 0
    ranks = PATTERN_BYTES * len(patterns) * length * shape.kv_heads
    observed = batch * len(shape.full_layers) * (observed_queries + sums + ranks)
    baseline = rows * count * (shape.layers * states + (shape.layers + 1) * shape.hidden_size) * item
    head = rows * count * config.vocab_size * (FP32 + item)
    group = rows * count * token
    layer = rows * estimate_replay_bytes(shape, item, length, count, ablations)

    fixed = cache + observed + baseline + head + group + layer
    free = find_default_memory(loaded.device, ABLATION_CPU_BYTES, MEMORY_SHARE) - fixed
    all_layers = len(shape.full_layers) if is_ablated else 1
    layers = max(1, min(all_layers, 1 + free // 2 // layer))
    all_groups = ablations * len(shape.full_layers) if "ppl" in options.signals else 1
    groups = max(1, min(all_groups, 1 + (free - (layers - 1) * layer) // group))
    return groups, layers


def estimate_replay_bytes(shape: Architecture, item: int, length: int, count: int, ablations: int) -> int:
    """Estimate the bytes of replays of `count` tokens after a prompt in a layer: entries, logits, outputs.

    `item` are the bytes of a number. The scratch of a chunk, see `policies.scoring.chunk_bytes`, is not counted: it
    does not grow with the prompts.
    """
    entry = 2 * shape.kv_heads * shape.head_dim * item
    column = 2 * entry + REPLAY_TABLES * FP32 * shape.query_heads + STATE_BYTES * shape.kv_heads
    return (length + count) * column + ablations * count * shape.query_heads * shape.head_dim * item
