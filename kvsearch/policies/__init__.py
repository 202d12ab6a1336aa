"""Eviction patterns: which cached entries to keep. One file per pattern."""

from kvsearch.policies.base import Needs, Observation, Policy, QueryStatistics
from kvsearch.policies.ranking import keep_mask, rank_entries, rank_under
from kvsearch.policies.registry import create_policy, find_policy_class, list_policy_names

__all__ = [
    "Needs",
    "Observation",
    "Policy",
    "QueryStatistics",
    "create_policy",
    "find_policy_class",
    "keep_mask",
    "list_policy_names",
    "rank_entries",
    "rank_under",
]  # fmt: skip
