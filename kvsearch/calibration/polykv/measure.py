"""PolyKV: signals of every layer, phase and eviction pattern, from one full-cache pass over every prompt.

For each continuation of a prompt: how every pattern changes the attention output of every layer (cosine, relative
error), what it costs the continuation (loss), and how scattered attention is (entropy). Strategies are made of the
profile later, without running the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.ablations import Ablations
from kvsearch.calibration.polykv.checks import checked_prompts
from kvsearch.calibration.polykv.continuations import PromptBatch, Sample, batches_of
from kvsearch.calibration.polykv.cost import ModelSize, SweepWork, memory_of
from kvsearch.calibration.polykv.layer_sweep import AtOnce, LayerSweep
from kvsearch.calibration.polykv.measurement import Measurement
from kvsearch.calibration.polykv.naive import Naive
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.polykv.samples import PROMPT, QUESTION, ROW_SUM, ROWS, SampleFiles, places, unfinished
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.calibration.sample_files import SAMPLES
from kvsearch.errors import IncompatibleError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import default_memory
from kvsearch.plan import Profile
from kvsearch.plan.signals import CONTEXT, LENGTH, MEAN_ENTROPY, ROWS_ENTROPY, TOKENS, SignalAxes
from kvsearch.policies import Policy
from kvsearch.progress import Progress
from kvsearch.runtime.attention import running
from kvsearch.signals.entropy import mean_entropy

CPU_BYTES, GPU_SHARE = 4 * 2**30, 0.8  # of memory besides the weights

Arrays = dict[str, NDArray[Any]]


def calibrate_polykv(
    loaded: LoadedModel,
    data: CalibrationData,
    options: PolykvOptions,
    policies: Sequence[Policy],
    progress: Progress | None = None,
    directory: Path | None = None,
    started: Callable[[], None] | None = None,
) -> Profile:
    """Measure the signals of every layer, phase and pattern (arXiv 2606.15157, Eq. 2 to 5) on all prompts of `data`.

    What is finished is kept in `directory`, some continuations of a batch of prompts at a time, and what is there is
    not measured again. `started` is called once all is checked, before what is there is read and anything is measured.

    Raises:
        UsageError: see `checked_prompts`; not enough memory; samples in `directory` are damaged, or of another model,
            other texts, options or policies.
        IncompatibleError: the model computes NaN, or see `checked_prompts`.
    """
    prompts = checked_prompts(loaded, data, options, policies)
    shape = describe(loaded.model)
    tried = Ablations(tuple(policies), options.budgets, options.measured_phases, shape.full_layers, shape.kv_heads)
    total, at_once = sum(len(prompt.continuations) for prompt in prompts), _at_once(loaded, prompts, policies, options)
    if started is not None:
        started()
    measurement = Measurement.of(loaded, data, prompts, options, policies)
    done = SampleFiles(None if directory is None else directory / SAMPLES, measurement)
    if progress is not None:
        progress(len(done.finished), total)
    items = [
        (batch, passes)
        for batch in batches_of(prompts, options.batch)
        if (passes := batch.passes(options.batch, done.finished))
    ]
    for parts in loaded.map(partial(_measured, tried=tried, options=options, at_once=at_once), items):
        for part in parts:
            done.add(unfinished(part, done.finished))
            if progress is not None:
                progress(len(done.finished), total)
    return _profile(loaded, data, options, policies, done)


def _measured(
    loaded: LoadedModel,
    item: tuple[PromptBatch, Sequence[Sequence[Sample]]],
    tried: Ablations,
    options: PolykvOptions,
    at_once: AtOnce,
) -> Iterator[Arrays]:
    """Measure a batch of prompts; the `item` is it, and the continuations of each pass that is wanted."""
    batch, passes = item
    with running(loaded.model):
        measure = _Measure(loaded, tried, batch, options, at_once)
        for samples in passes:
            yield measure(samples)


class _Measure:
    """All signals of one batch of prompts, some continuations at a time."""

    def __init__(
        self, loaded: LoadedModel, tried: Ablations, batch: PromptBatch, options: PolykvOptions, at_once: AtOnce
    ) -> None:
        self.loaded, self.tried, self.batch, self.options = loaded, tried, batch, options
        swept = [signal for signal in options.signals if signal == "entropy" or not options.naive]
        self.sweep = None
        if swept:
            self.sweep = LayerSweep(loaded.model, tried, batch, swept, options.entropy_rows, at_once)

    def __call__(self, samples: Sequence[Sample]) -> Arrays:
        """Measure these continuations; errors: `calibrate_polykv`."""
        device, options, after = self.loaded.device, self.options, self.batch.continuations(samples, self.loaded.device)
        read = self.batch.repeated(samples)
        contexts, lengths = zip(*((prompt.context, prompt.length) for prompt in read.prompts), strict=True)
        found: Arrays = places(read.places, (sample.number for sample in samples), contexts, lengths)
        found[TOKENS] = after.predicting.sum(-1).cpu().numpy().astype(np.int32)
        wanted = {"outputs": "cosine" in options.signals, "losses": "ppl" in options.signals}
        measured = None if self.sweep is None else self.sweep.measure(after)
        if options.naive and any(wanted.values()):
            found |= Naive(self.loaded.model, self.tried, *read.padded(device)).measure(after).arrays(**wanted)
        elif measured is not None:
            found |= measured.arrays(**wanted)
        if measured is not None and measured.entropy is not None and measured.attention is not None:
            found |= {ROWS_ENTROPY: measured.entropy.astype(np.float32), ROWS: measured.attention}
        for array in found.values():
            bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))
            if bad.size:
                context = int(found[CONTEXT][bad[0]])
                raise IncompatibleError(f"{self.loaded.name}: the model computes NaN on calibration context {context}")
        return found


def _at_once(
    loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], policies: Sequence[Policy], options: PolykvOptions
) -> AtOnce:
    """Return how much can be computed at a time; UsageError if the least of it does not fit the memory allowed."""
    size, work = ModelSize.of(loaded.model), SweepWork.of(prompts, policies, options)
    if options.memory_bytes is not None:
        found = memory_of(size, work, options.memory_bytes)
    else:
        free = default_memory(loaded.device, CPU_BYTES, GPU_SHARE)
        found = memory_of(size, work, max(free, memory_of(size, work).minimum))
    return AtOnce(found.groups, found.layers)


def _profile(
    loaded: LoadedModel,
    data: CalibrationData,
    options: PolykvOptions,
    policies: Sequence[Policy],
    done: SampleFiles,
) -> Profile:
    arrays = done.gathered()
    if ROW_SUM in arrays:
        rows = arrays.pop(ROW_SUM) / len(arrays[PROMPT])
        arrays[MEAN_ENTROPY] = np.array(
            [[mean_entropy(torch.from_numpy(row)) for row in layers] for layers in rows], dtype=np.float32
        )
    base = next(policy for policy in policies if policy.name == options.policy)
    settings: dict[str, Any] = {
        **options.texts(data), "protocol": options.protocol, "answer_tokens": options.answer_tokens,
        "entropy_rows": options.entropy_rows, "naive": options.naive, **options.for_strategies,
    }  # fmt: skip
    lengths = arrays[LENGTH].tolist()
    origin = profile_metadata(loaded, data, base.spec, "polykv", options.seed, settings, lengths, base.floor)
    axes = SignalAxes(
        patterns=tuple(policy.spec for policy in policies),
        phases=options.measured_phases,
        budgets=options.budgets,
        protocol=options.protocol,
    )
    kept = {name: array for name, array in arrays.items() if name not in (PROMPT, QUESTION)}
    return Profile(origin.model_copy(update={"signals": axes}), kept)
