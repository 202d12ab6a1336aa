"""PolyKV: signals of every layer, phase and eviction pattern, from one full-cache pass over every prompt.

For each continuation of a prompt: how every pattern changes the attention output of every layer (cosine, relative
error), what it costs the continuation (loss), and how scattered attention is (entropy). Strategies are made of the
profile later, without running the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.polykv.ablations import Ablations
from kvsearch.calibration.polykv.checks import checked_prompts
from kvsearch.calibration.polykv.continuations import PromptBatch, batches_of
from kvsearch.calibration.polykv.cost import ModelSize, SweepWork, memory_of
from kvsearch.calibration.polykv.layer_sweep import LayerSweep
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

    What is finished is kept in `directory`, one continuation of all prompts of a batch at a time, and what is there is
    not measured again. `started` is called once all is checked, before what is there is read and anything is measured.

    Raises:
        UsageError: see `checked_prompts`; not enough memory; samples in `directory` are damaged, or of another model,
            other texts, options or policies.
        IncompatibleError: the model computes NaN, or see `checked_prompts`.
    """
    prompts = checked_prompts(loaded, data, options, policies)
    shape = describe(loaded.model)
    tried = Ablations(tuple(policies), options.budgets, options.measured_phases, shape.full_layers, shape.kv_heads)
    total, groups = sum(len(prompt.continuations) for prompt in prompts), _groups(loaded, prompts, policies, options)
    if started is not None:
        started()
    measurement = Measurement.of(loaded, data, prompts, options, policies)
    done = SampleFiles(None if directory is None else directory / SAMPLES, measurement)
    if progress is not None:
        progress(len(done.finished), total)
    with running(loaded.model):
        for batch in batches_of(prompts, options.batch):
            left = batch.left(done.finished)
            measure = _Measure(loaded, tried, batch, options, groups) if left else None
            for number in left:
                if measure is not None:
                    done.add(unfinished(measure(number), done.finished))
                if progress is not None:
                    progress(len(done.finished), total)
    return _profile(loaded, data, options, policies, done)


class _Measure:
    """All signals of one batch of prompts, one continuation of each at a time."""

    def __init__(
        self, loaded: LoadedModel, tried: Ablations, batch: PromptBatch, options: PolykvOptions, groups: int
    ) -> None:
        self.loaded, self.tried, self.batch, self.options = loaded, tried, batch, options
        swept = [signal for signal in options.signals if signal == "entropy" or not options.naive]
        self.sweep = None
        if swept:
            self.sweep = LayerSweep(loaded.model, tried, batch, swept, options.entropy_rows, groups)

    def __call__(self, number: int) -> Arrays:
        """Measure the continuation of that number, of the prompts that have one; errors: `calibrate_polykv`."""
        device, options = self.loaded.device, self.options
        some = self.batch.having(number)
        alone, after = some.continuations(0, device), self.batch.continuations(number, device)
        rows = after.real.cpu().numpy()
        contexts, lengths = zip(*((prompt.context, prompt.length) for prompt in some.prompts), strict=True)
        found: Arrays = places(some.places, number, contexts, lengths)
        found[TOKENS] = alone.predicting.sum(-1).cpu().numpy().astype(np.int32)
        wanted = {"outputs": "cosine" in options.signals, "losses": "ppl" in options.signals}
        measured = None if self.sweep is None else self.sweep.measure(after)
        if options.naive and any(wanted.values()):
            found |= Naive(self.loaded.model, self.tried, *some.padded(device)).measure(alone).arrays(**wanted)
        elif measured is not None:
            found |= {name: array[rows] for name, array in measured.arrays(**wanted).items()}
        if measured is not None and measured.entropy is not None and measured.attention is not None:
            found |= {ROWS_ENTROPY: measured.entropy[rows].astype(np.float32), ROWS: measured.attention[rows]}
        for array in found.values():
            bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))
            if bad.size:
                context = int(found[CONTEXT][bad[0]])
                raise IncompatibleError(f"{self.loaded.name}: the model computes NaN on calibration context {context}")
        return found


def _groups(
    loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], policies: Sequence[Policy], options: PolykvOptions
) -> int:
    """Return how many ablations the sweep can have at a time; UsageError if not one fits the memory that is allowed."""
    size, work = ModelSize.of(loaded.model), SweepWork.of(prompts, policies, options)
    if options.memory_bytes is not None:
        return memory_of(size, work, options.memory_bytes).groups
    free = default_memory(loaded.device, CPU_BYTES, GPU_SHARE)
    return memory_of(size, work, max(free, memory_of(size, work).minimum)).groups


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
