"""Which view of a profile there is: by what was measured, or by what its method decides."""

from __future__ import annotations

from kvsearch.errors import UsageError
from kvsearch.plan import Plan, Profile
from kvsearch.plan.profile import QUERIES
from kvsearch.policies.registry import FITTED
from kvsearch.report.dynamic import DynamicView, is_dynamic
from kvsearch.report.lukv import LukvView
from kvsearch.report.query_statistics import QueryStatisticsView
from kvsearch.report.ranking import RankingView
from kvsearch.report.screen import View
from kvsearch.report.signals import SignalsView
from kvsearch.signals.table import SignalTable


def profile_view(profile: Profile, ratio: float, plan: Plan | None = None) -> View:
    """Return the view of a profile at a global eviction ratio, which signals do not depend on.

    Raises:
        UsageError: a plan is to be judged by a profile without the importance of entries.
    """
    metadata = profile.metadata
    if metadata.method in FITTED:
        if plan is not None:
            raise UsageError("--plan needs a LU-KV profile: this is a fitted ranking")
        return RankingView(profile)
    if metadata.method == QUERIES and plan is None:
        return QueryStatisticsView(profile)
    has_signals = metadata.signals is not None
    if plan is not None and (has_signals or is_dynamic(profile) or metadata.method == QUERIES):
        raise UsageError(
            f"--plan needs a LU-KV profile: a {metadata.method} profile does not say what entries are worth"
        )
    if has_signals:
        return SignalsView(SignalTable(profile))
    return DynamicView(profile, ratio) if is_dynamic(profile) else LukvView(profile, ratio, plan)
