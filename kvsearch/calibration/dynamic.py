"""From dynamic to static: what a dynamic allocation decides for every calibration prompt, and the mean of that.

What a layer wishes for depends on the dense prompt alone, since what other layers lose at their end changes nobody's
prefill. So one pass over a prompt tells what is decided for it at all 99 global eviction ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.dynamic import Allocation, Wish, shared_budgets
from kvsearch.budgets.uniform import Uniform
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.observing import DensePass, ObservingLayer
from kvsearch.calibration.options import DynamicOptions
from kvsearch.calibration.prompts import Prompt, check_lengths, prompts_of
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.calibration.tables import Ints, RatioTables, grid_totals
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.policies import Observation, Policy
from kvsearch.runtime.attention import running
from kvsearch.runtime.collector import Rotary
from kvsearch.runtime.sharing import Wished


class WishLayer(ObservingLayer):
    """Takes down what its layer wishes for."""

    def __init__(self, index: int, rotary_tables: Rotary, allocation: Allocation, policy: Policy) -> None:
        super().__init__(index, [policy.needs(), allocation.needs(policy)], rotary_tables)
        self.allocation, self.policy = allocation, policy
        self.wished: Wished | None = None

    def observe(self, observation: Observation) -> None:
        if self.finite:
            self.wished = Wished(self.allocation, self.policy, observation)


def calibrate_dynamic(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    allocation: Allocation,
    options: DynamicOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Average what `allocation` decides over the prompts of `data`, at 99 global eviction ratios.

    The decisions are those of the runtime under even budgets of the same total. Besides the table of LU-KV's profiles
    there are "ratio_deviation", float32 [99, L, Hkv], the standard deviation over the prompts, and "question_length",
    int32 [M], the tokens of every prompt; "question_ratio" and "question_context" have a row per prompt.

    Raises:
        UsageError: a prompt is too short for the entries that are always kept, or the policy's scores cannot be shared
            like this (lava: they are negative).
        IncompatibleError: the model computes NaN, or a prompt does not fit its positions.
    """
    options = options or DynamicOptions()
    allocation.check(policy, f"method {allocation.name}")
    tables = RatioTables(policy, options.minimum)
    prompts = prompts_of(loaded, data, options.protocol)
    check_lengths(loaded, prompts, policy, tables.floor, followed=False)
    with running(loaded.model):
        for done, prompt in enumerate(prompts):
            wished = observe_wishes(loaded, prompt, policy, allocation)
            budgets = decisions(allocation, wished, prompt.length, tables.floor(prompt.length))
            tables.add(_ratios(budgets, prompt.length), prompt.length, prompt.context)
            if progress is not None:
                progress(done + 1, len(prompts))
    settings = {"data": data.name, **allocation.parameters(), **asdict(options)}
    seed, floor = settings.pop("seed"), tables.floor(tables.length)
    origin = profile_metadata(loaded, data, policy, allocation.name, seed, settings, tables.lengths, floor)
    spread = {
        "ratio_deviation": tables.deviation(),
        "question_length": np.array(tables.lengths, dtype=np.int32),
    }
    return Profile(origin, {**tables.arrays(), **spread})


def observe_wishes(loaded: LoadedModel, prompt: Prompt, policy: Policy, allocation: Allocation) -> list[Wished]:
    """What every full-attention layer wishes for on one prompt; the model must run the attention "kvsearch".

    Raises:
        UsageError, IncompatibleError: see `calibrate_dynamic`.
    """
    passed = DensePass(
        loaded.model,
        prompt.ids.to(loaded.device),
        [policy],
        lambda index, tables: WishLayer(index, tables, allocation, policy),
    )
    passed.require_numbers(loaded.name, prompt.context)
    return [layer.wished for layer in passed.observed if layer.wished is not None]


def decisions(allocation: Allocation, wished: Sequence[Wished], length: int, floor: int) -> Ints:
    """Budgets of one prompt of `length` tokens at the 99 global eviction ratios, int64 [99, L, Hkv].

    Every head keeps `floor` entries at least, and the rows whose totals do not reach that just those.
    """
    shape = (len(wished), wished[0].ordered.shape[1])
    floors, caps = np.full(shape, floor, dtype=np.int64), np.full(shape, length, dtype=np.int64)
    wish = _wishes(allocation, wished, floor, shape[1] * (length - floor))
    return np.stack(
        [
            shared_budgets(allocation, even_budgets(total, floors, caps), floors, caps, wish)
            for total in grid_totals(length, floors.size, floor).tolist()
        ]
    )


def even_budgets(total: int, floors: Ints, caps: Ints) -> Ints:
    """What is shared out: the budgets of a plan that gives all heads the same, int64 [L, Hkv]."""
    return Uniform().allocate(np.zeros(floors.shape), total, floors, caps)


def _wishes(allocation: Allocation, wished: Sequence[Wished], floor: int, most: int) -> Callable[[int, int], Wish]:
    """The wish of a layer for so many free entries; as a rule the order of `most` entries serves all that are fewer."""
    if isinstance(allocation, AdaKVAllocation) and allocation.normalize:  # scores depend on how many entries are free
        return lambda layer, free: wished[layer].wish(0, floor, free)
    longest = [said.wish(0, floor, most) for said in wished]
    return lambda layer, free: longest[layer]  # noqa: ARG005


def _ratios(budgets: Ints, length: int) -> NDArray[np.float32]:
    return (1.0 - budgets / length).astype(np.float32)
