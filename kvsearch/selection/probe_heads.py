"""Heads of a fitted probe that rank by one built-in score alone, where that keeps more of the measured importance.

A probe is fitted to the largest importance of an entry for any later token. What a head loses when entries leave is
another thing, which is measured on other contexts for every policy. So a head of the probe may rank by one score that
the probe reads anyway: policies of single heads, where a joint plan chooses them for whole layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.calibration.tables import floor_entries
from kvsearch.core.arrays import Bools, Ints
from kvsearch.plan import PolicySpec, Profile, Size
from kvsearch.plan.origin import record_change
from kvsearch.plan.saved import WEIGHTS, register_weights
from kvsearch.policies.probe import PROBE_METHOD, SCORE_POLICIES, columns_of
from kvsearch.policies.registry import build_policy, protect_like
from kvsearch.selection.joint import PolicyCurves, solve_joint_budgets

MIN_HEAD_GAIN = 0.003  # of the importance that is lost: for less no head has a ranking of its own


def rank_heads_by_scores(curves: PolicyCurves, size: Size) -> PolicyCurves:
    """Let heads of a probe rank by a built-in score alone, where that keeps more of their importance at `size`.

    A score is that of a measured policy which the probe reads, too. Heads go by the fit or by the score that is best
    for all of them, unless another one wins back `MIN_HEAD_GAIN` of what this loses. The curves of the probe are then
    taken by head; the weights are known to this process, and are written beside every plan that uses them. Curves
    without a probe, or for which its fit is best, stay as they are.
    """
    probe = next((number for number, name in enumerate(curves.names) if name == PROBE_METHOD), None)
    if probe is None or PROBE_METHOD not in curves.rankings:
        return curves
    spec = curves.policies[probe]
    scores = {number: name for number, name in enumerate(curves.names) if is_read_score(curves.policies[number], spec)}
    chosen = choose_head_policies(curves, [probe, *scores], size)
    if not chosen.any():
        return curves
    heads = {name: chosen == number for number, name in enumerate(scores.values(), 1) if (chosen == number).any()}
    profile = replace_head_fits(curves.rankings[PROBE_METHOD], heads)
    params = {**spec.params, WEIGHTS: register_weights(profile.to_bytes(), Path(PROBE_METHOD))}
    policies = list(curves.policies)
    policies[probe] = PolicySpec(name=PROBE_METHOD, params=params)
    kept = curves.kept.copy()
    kept[probe] = np.take_along_axis(curves.kept[[probe, *scores]], chosen[None, ..., None], 0)[0]
    rankings = {**curves.rankings, PROBE_METHOD: profile}
    return replace(curves, policies=tuple(policies), kept=kept, rankings=rankings)


def is_read_score(policy: PolicySpec, probe: PolicySpec) -> bool:
    """Tell whether a policy ranks by a score that a probe reads, and protects the same entries."""
    read = SCORE_POLICIES.get(policy.name)
    ranked = build_policy(probe)
    if read is None or read.sink_count != ranked.sink_count:  # a score depends on the sinks
        return False
    return build_policy(policy) == protect_like(read, ranked)


def choose_head_policies(curves: PolicyCurves, numbers: Sequence[int], size: Size) -> Ints:
    """Choose one of some policies for every kv head, [L, Hkv] indices of `numbers`, which are rows of the curves.

    It is decided at the budgets that all heads have together at `size`.
    """
    kept = curves.kept[list(numbers)]
    count, layers, heads, points = kept.shape
    pool = size.pool(curves.profile.metadata)
    floor = floor_entries(pool.length, build_policy(curves.policies[numbers[0]]), 0.0)
    # A joint plan has a policy for each layer: here every head is one.
    single_heads = kept.reshape(count, layers * heads, 1, points)
    return solve_joint_budgets(single_heads, pool, floor, MIN_HEAD_GAIN)[1].policies.reshape(layers, heads)


def replace_head_fits(profile: Profile, heads: Mapping[str, Bools]) -> Profile:
    """Return the profile of a probe with heads that rank by one feature alone, [L, Hkv] bool by the feature's name."""
    metadata = profile.metadata
    settings: dict[str, Any] = metadata.provenance.settings
    columns = columns_of(settings["features"], metadata.model.head_dim)
    arrays = {name: array.copy() for name, array in profile.arrays.items()}
    for name, of_score in heads.items():
        for part in ("linear", "hidden", "hidden_bias", "output"):
            arrays[part][of_score] = 0.0
        arrays["linear"][of_score, columns.index(name)] = 1.0  # of a standardised feature: the bias stays the mean
    counts = ", ".join(f"{int(of_score.sum())} by {name}" for name, of_score in heads.items())
    provenance = record_change(metadata.provenance, f"heads that rank by one score alone: {counts}")
    return Profile(metadata.model_copy(update={"provenance": provenance}), arrays)
