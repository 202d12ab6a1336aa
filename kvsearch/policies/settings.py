"""Settings that mean the same in all policies: which entries of a prompt are always kept."""

from __future__ import annotations

from dataclasses import fields

from kvsearch.errors import UsageError
from kvsearch.policies.base import Policy
from kvsearch.policies.registry import create_policy

SINKS = "sinks"
RECENT = ("protect", "recent", "window")  # whichever a policy has first


def protecting_like(policy: Policy, other: Policy) -> Policy:
    """Return a policy that protects as many sinks and recent entries as another one.

    Raises:
        UsageError: it cannot.
    """
    known = {field.name for field in fields(policy)}
    recent = next((name for name in RECENT if name in known), "")
    wanted = {SINKS: other.sink_count, recent: other.recent_count}
    alike = {name: value for name, value in wanted.items() if name in known}
    found = create_policy(policy.name, {**policy.parameters(), **alike})
    if (found.sink_count, found.recent_count) != (other.sink_count, other.recent_count):
        raise UsageError(
            f"policy {policy.name} cannot keep the {other.sink_count} first and {other.recent_count} last entries that "
            f"{other.name} always keeps, so the two cannot be compared: leave one out"
        )
    return found
