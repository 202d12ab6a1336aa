"""Policies of kvsearch as presses of kvpress, and where the two rank differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvsearch.errors import IncompatibleError
from kvsearch.plan import PolicySpec
from kvsearch.policies import Policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.keydiff import KeyDiff
from kvsearch.policies.knorm import Knorm
from kvsearch.policies.registry import policy_of
from kvsearch.policies.snapkv import SnapKV
from kvsearch.policies.streaming import StreamingLLM
from kvsearch.policies.tova import TOVA


class Press(NamedTuple):
    """A press as Python code, the entries that it always keeps, and what it does differently."""

    code: str
    sinks: int
    recent: int
    differs: tuple[str, ...]


def press_of(spec: PolicySpec) -> Press:
    """Return the press that ranks as a policy does; IncompatibleError if kvpress has none."""
    policy = policy_of(spec)
    for kind, make in _PRESSES.items():
        if isinstance(policy, kind):
            return make(policy)
    known = ", ".join(sorted(kind.name for kind in _PRESSES))
    raise IncompatibleError(f"kvpress has no press that ranks as {spec.name} does: plan with {known}")


def protection_losses(press: Press, policy: Policy) -> list[str]:
    """Say which entries a press does not protect by itself, though the policy does."""
    found = []
    if policy.sink_count > press.sinks:
        found.append(f"the press does not protect the first {policy.sink_count} entries")
    if policy.recent_count > press.recent:
        found.append(f"the press does not protect the last {policy.recent_count} entries")
    return found


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


def _expected_attention(policy: ExpectedAttention) -> Press:
    code = (
        f"ExpectedAttentionPress(n_future_positions={policy.future}, n_sink={policy.sinks}, "
        f"use_covariance={policy.covariance}, use_vnorm={policy.value_norm}, epsilon={policy.epsilon})"
    )
    return Press(code, policy.sinks, 0, ())


_PRESSES: dict[type[Policy], Callable[..., Press]] = {
    SnapKV: _snapkv,
    ExpectedAttention: _expected_attention,
    KeyDiff: lambda _: Press("KeyDiffPress()", 0, 0, ()),
    Knorm: lambda _: Press("KnormPress()", 0, 0, ()),
    StreamingLLM: lambda policy: Press(
        f"StreamingLLMPress(n_sink={policy.sinks})", policy.sinks, policy.recent_count, ()
    ),
    TOVA: lambda policy: Press("TOVAPress()", 0, 1, () if policy.protect_last else ("the press keeps the last token",)),
}
