"""kvpress (https://github.com/NVIDIA/kvpress): LU-KV's curves, and shares per layer."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvsearch.arrays import Floats, Ints
from kvsearch.errors import UsageError
from kvsearch.exporters.base import (
    SINGLE,
    Budgets,
    Exported,
    Inputs,
    Loss,
    PlanExporter,
    ProfileExporter,
    common_losses,
    heads_lost,
    one_policy,
    same_for_heads,
)
from kvsearch.exporters.presses import press_of, protection_losses
from kvsearch.plan import ModelFingerprint, Plan, Profile, canonical_json
from kvsearch.plan.profile import EVICTED_RATIO, GRID
from kvsearch.policies.registry import policy_of


class KvpressLukv(ProfileExporter):
    """LU-KV's table for `LUKVPress`: a `.npy` [99, L, Hkv] of evicted shares, row i for a ratio of (i + 1)%.

    A layer that is not in the profile is not evicted. The press rounds to entries within each layer, so a layer may
    hold an entry more or less than in a plan of the same profile, which is rounded over all layers.
    """

    name: ClassVar[str] = "kvpress-lukv"
    tool: ClassVar[str] = "kvpress, LUKVPress"
    keeps: ClassVar[str] = "budgets of all heads at every ratio; one policy that kvpress has"

    def export(self, profile: Profile, inputs: Inputs = Inputs()) -> Exported:  # noqa: ARG002, B008 - frozen
        """Make the table and the lines that set it on a press."""
        metadata = profile.metadata
        if EVICTED_RATIO not in profile.arrays:
            raise UsageError(f"target {self.name} needs a table of ratios, and a {metadata.method} profile has none")
        curves = np.zeros((GRID, metadata.model.layers, metadata.model.kv_heads))
        curves[:, list(metadata.layers)] = profile.arrays[EVICTED_RATIO]
        policy, press = policy_of(metadata.policy), press_of(metadata.policy)
        file = io.BytesIO()
        np.save(file, curves)
        usage = (
            f"press = LUKVPress({press.code}, compression_ratio=0.8, sink={policy.sink_count}, "
            f"window={policy.recent_count})",
            "press._budget_curves = np.load({path!r})",
        )
        total = metadata.length * metadata.shape[0] * metadata.shape[1]
        return Exported({SINGLE: file.getvalue()}, tuple(map(Loss, press.differs)), total, usage)

    def read(self, files: Mapping[str, bytes]) -> Floats:
        """Return the evicted shares [99, L, Hkv]."""
        found: Floats = np.load(io.BytesIO(files[SINGLE]), allow_pickle=False)
        return found


class KvpressLayers(PlanExporter):
    """The list of L evicted shares for `PerLayerCompressionPress`, as JSON."""

    name: ClassVar[str] = "kvpress-layers"
    tool: ClassVar[str] = "kvpress, PerLayerCompressionPress"
    keeps: ClassVar[str] = "one budget per layer, as a share of the prompt; one policy that kvpress has"

    def export(self, plan: Plan, inputs: Inputs = Inputs()) -> Exported:  # noqa: B008 - frozen
        """Make the list; every share lies half an entry off, as the press cuts fractions of an entry off."""
        budgets = Budgets.of(plan, inputs.length)
        at, kept = budgets.known_length, budgets.per_layer
        evicted = [0.0 if entries >= at else 1 - (entries + 0.5) / at for entries in kept]
        press, policy = press_of(budgets.policy), policy_of(budgets.policy)
        losses = [
            *heads_lost(budgets),
            *one_policy(budgets),
            *map(Loss, (*press.differs, *protection_losses(press, policy))),
            *common_losses(budgets, proportional=True),
        ]
        usage = (f"press = PerLayerCompressionPress({press.code}, compression_ratios=json.load(open({{path!r}})))",)
        return Exported({SINGLE: canonical_json(evicted)}, tuple(losses), budgets.total, usage)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Cut fractions of an entry off, as a press does."""
        kept = [int(length * (1 - share)) for share in json.loads(files[SINGLE])]
        return same_for_heads(kept, model.kv_heads)
