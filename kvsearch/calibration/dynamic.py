"""From dynamic to static: the budgets of a dynamic allocation for every calibration prompt, and their mean.

What a layer demands depends on the dense prompt alone, since what other layers lose at their end changes nobody's
prefill. So one pass over a prompt tells what is decided for it at all 99 global eviction ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import Allocation, LayerDemand, share_budgets
from kvsearch.budgets.lukv import compute_grid_totals
from kvsearch.calibration.base import Calibration
from kvsearch.calibration.options import DynamicOptions
from kvsearch.calibration.prompts import CalibrationPrompt, check_lengths, encode_prompts
from kvsearch.calibration.tables import HELD_OUT, RatioTables, assign_folds, has_enough_contexts
from kvsearch.core.arrays import Ints
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import Work
from kvsearch.plan import Profile
from kvsearch.policies import Policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.sharing import LayerDemands
from kvsearch.runtime.speed import scale_to_first


class DynamicCalibration(Calibration[DynamicOptions]):
    """Averages the budgets of a dynamic allocation over prompts, at 99 global eviction ratios.

    It decides as the runtime does under even budgets of the same total. Besides the table of LU-KV's profiles there are
    "ratio_deviation", float32 [99, L, Hkv], the standard deviation over the prompts, and "question_length", int32 [M],
    the tokens of every prompt; "question_ratio" and "question_context" have a row per prompt.
    """

    @cached_property
    def allocation(self) -> Allocation:
        """The allocation whose budgets are averaged."""
        return self.options.make_allocation(self.loaded.name)

    def prepare(self) -> list[CalibrationPrompt]:
        (policy,) = self.policies
        prompts = encode_prompts(self.loaded, self.data, self.options.protocol, max_length=self.options.max_length)
        check_lengths(prompts, policy, RatioTables(policy, self.options.minimum).floor)
        return prompts

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        work = self._make_work(RatioTables(self.policies[0], self.options.minimum))
        works = [prompt.work() for prompt in prompts]
        return scale_to_first(self.loaded.model, works, partial(work, self.loaded, prompts[0]))

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        """Measure the budgets of all prompts and return their profile.

        Raises:
            UsageError: the policy's scores cannot be shared like this (lava: they are negative).
            IncompatibleError: the model computes NaN.
        """
        (policy,) = self.policies
        options = self.options
        tables = RatioTables(policy, options.minimum)
        decided = with_progress(self.loaded.map(self._make_work(tables), prompts), len(prompts), progress)
        for prompt, table in zip(prompts, decided, strict=True):
            tables.add(table, prompt.length, prompt.text)
        settings = {**options.texts(self.data), **options.settings(), **self.allocation.parameters()}
        floor = tables.floor(tables.length)
        metadata = self.describe(policy.spec, settings, tables.lengths, floor)
        spread = {
            "ratio_deviation": tables.deviation(),
            "question_length": np.array(tables.lengths, dtype=np.int32),
        }
        if options.check and has_enough_contexts(self.data):
            spread[HELD_OUT] = tables.held_out(assign_folds(self.data))
        return Profile(metadata, {**tables.arrays(), **spread})

    def _make_work(self, tables: RatioTables) -> Callable[[LoadedModel, CalibrationPrompt], NDArray[np.float32]]:
        """Make the function that decides the ratios of a prompt."""
        (policy,) = self.policies
        return partial(decide_ratios, policy=policy, allocation=self.allocation, floor=tables.floor)


def decide_ratios(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    policy: Policy,
    allocation: Allocation,
    floor: Callable[[int], int],
) -> NDArray[np.float32]:
    """Decide the local eviction ratios of one prompt, [99, L, Hkv]."""
    with run_attention(loaded.model):
        demands = observe_demands(loaded, prompt, policy, allocation)
    budgets = decide_budgets(allocation, demands, prompt.length, floor(prompt.length))
    return (1.0 - budgets / prompt.length).astype(np.float32)


def observe_demands(
    loaded: LoadedModel, prompt: CalibrationPrompt, policy: Policy, allocation: Allocation
) -> list[LayerDemands]:
    """Observe the demands of every full-attention layer on one prompt; the model must run the attention "kvsearch".

    Raises:
        UsageError, IncompatibleError: see `DynamicCalibration.measure`.
    """
    check_rotary(loaded.model, [policy])
    needs = dict.fromkeys(describe(loaded.model).full_layers, (policy.needs(), allocation.needs(policy)))
    look = partial(LayerDemands, allocation, policy)
    ids = prompt.ids.to(loaded.device)
    return DensePass(loaded.model, needs, look, ids, refusal=prompt.refusal(loaded.name)).noted


def decide_budgets(allocation: Allocation, demands: Sequence[LayerDemands], length: int, floor: int) -> Ints:
    """Decide the budgets of one prompt of `length` tokens at the 99 global eviction ratios, int64 [99, L, Hkv].

    Every head keeps at least `floor` entries; rows with a smaller total keep exactly the floors.
    """
    shape = (len(demands), demands[0].ordered.shape[1])
    floors = np.full(shape, floor, dtype=np.int64)
    caps = np.full(shape, length, dtype=np.int64)

    def demand(layer: int, free: int) -> LayerDemand:  # noqa: ARG001
        # the order of the most entries that can be free serves all that are fewer
        return demands[layer].of(0, floor, shape[1] * (length - floor))

    return np.stack(
        [
            share_budgets(allocation, Uniform().allocate(np.zeros(shape), total, floors, caps), floors, caps, demand)
            for total in np.maximum(compute_grid_totals(length * floors.size), floor * floors.size).tolist()
        ]
    )
