"""kvpress (https://github.com/NVIDIA/kvpress): LU-KV's curves, and shares per layer."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.exporters.base import (
    SINGLE_FILE,
    BudgetExporter,
    ExportedFiles,
    ExportInputs,
    PrefillBudgets,
    ProfileExporter,
    measure_head_loss,
)
from kvsearch.plan import Profile, canonical_json
from kvsearch.plan.profile_arrays import EVICTED_RATIO, GRID_SIZE
from kvsearch.policies import Policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.knorm import Knorm
from kvsearch.policies.registry import build_policy
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.streaming import StreamingLLM
from kvsearch.policies.tova import TOVA


class KvpressLukv(ProfileExporter):
    """LU-KV's table for `LUKVPress`: a `.npy` [99, L, Hkv] of evicted shares, row i for a ratio of (i + 1)%.

    A layer that is not in the profile is not evicted. The press rounds to entries within each layer, so a layer may
    hold an entry more or less than in a plan of the same profile, which is rounded over all layers.
    """

    name: ClassVar[str] = "kvpress-lukv"

    def export(self, profile: Profile, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Make the table and the lines that set it on a press."""
        metadata = profile.metadata
        if EVICTED_RATIO not in profile.arrays:
            raise UsageError(f"target {self.name} needs a table of ratios, and a {metadata.method} profile has none")
        curves = np.zeros((GRID_SIZE, metadata.model.layers, metadata.model.kv_heads))
        curves[:, list(metadata.layers)] = profile.arrays[EVICTED_RATIO]
        policy = build_policy(metadata.policy)
        press = find_press(policy)
        file = io.BytesIO()
        np.save(file, curves)
        usage = (
            f"press = LUKVPress({press.code}, compression_ratio=0.8, sink={policy.sink_count}, "
            f"window={policy.recent_count})",
            "press._budget_curves = np.load({path!r})",
        )
        total = metadata.length * metadata.shape[0] * metadata.shape[1]
        return ExportedFiles({SINGLE_FILE: file.getvalue()}, usage, dict.fromkeys(press.differs), total)


class KvpressLayers(BudgetExporter):
    """The list of L evicted shares for `PerLayerCompressionPress`, as JSON."""

    proportional: ClassVar[bool | None] = True

    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Write the list; every share lies half an entry off, as the press cuts fractions of an entry off."""
        at = budgets.known_length
        evicted = [0.0 if entries >= at else 1 - (entries + 0.5) / at for entries in budgets.per_layer]
        spec = budgets.policy
        policy = build_policy(spec)
        press = find_press(policy)
        losses = {
            **measure_head_loss(budgets),
            **budgets.measure_policy_loss(
                f"layers that do not rank by {spec.name} do so there", lambda other: other != spec
            ),
            **dict.fromkeys(press.differs),
        }
        if policy.sink_count > press.sinks:
            losses[f"the press does not protect the first {policy.sink_count} entries"] = None
        if policy.recent_count > press.recent:
            losses[f"the press does not protect the last {policy.recent_count} entries"] = None
        usage = (f"press = PerLayerCompressionPress({press.code}, compression_ratios=json.load(open({{path!r}})))",)
        return ExportedFiles({SINGLE_FILE: canonical_json(evicted)}, usage, losses)


class Press(NamedTuple):
    """A press as Python code, the entries that it always keeps, and what it does differently."""

    code: str
    sinks: int
    recent: int
    differs: tuple[str, ...]


def find_press(policy: Policy) -> Press:
    """Find the press that ranks like a policy; IncompatibleError if kvpress has none."""
    for kind, make in _PRESSES.items():
        if isinstance(policy, kind):
            return make(policy)
    known = ", ".join(sorted(kind.name for kind in _PRESSES))
    raise IncompatibleError(f"kvpress has no press that ranks as {policy.name} does: plan with {known}")


def _snapkv(policy: SnapKV) -> Press:
    differs = []
    if policy.pooling != "avg":
        differs.append(f"the press pools by the mean, the policy by {policy.pooling}")
    if policy.group != "mean":
        differs.append("the press takes the mean over the query group, the policy the largest")
    if 0 <= policy.protect < policy.window:
        differs.append(f"the press protects all {policy.window} queries that it looks at, the policy {policy.protect}")
    code = f"SnapKVPress(window_size={policy.window}, kernel_size={policy.kernel})"
    return Press(code, 0, policy.window, tuple(differs))


_PRESSES: dict[type[Policy], Callable[..., Press]] = {
    SnapKV: _snapkv,
    ExpectedAttention: lambda policy: Press(
        f"ExpectedAttentionPress(n_future_positions={policy.future}, n_sink={policy.sinks}, "
        f"use_covariance={policy.covariance}, use_vnorm={policy.value_norm}, epsilon={policy.epsilon})",
        policy.sinks,
        0,
        (),
    ),
    KeyDiff: lambda _: Press("KeyDiffPress()", 0, 0, ()),
    Knorm: lambda _: Press("KnormPress()", 0, 0, ()),
    StreamingLLM: lambda policy: Press(
        f"StreamingLLMPress(n_sink={policy.sinks})", policy.sinks, policy.recent_count, ()
    ),
    TOVA: lambda policy: Press("TOVAPress()", 0, 1, () if policy.protect_last else ("the press keeps the last token",)),
}
