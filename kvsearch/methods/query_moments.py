"""Mean and covariance of queries, which other tools load: no plan is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvsearch.calibration.options import QueryStatisticsOptions
from kvsearch.methods.base import CalibratedRun, CalibrationMethod
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import STATISTICS_ARRAYS

if TYPE_CHECKING:
    from kvsearch.report.figures import ReportPart


class QueryStatisticsMethod(CalibrationMethod):
    """Mean, covariance and moduli of the queries of every head."""

    name = "query_statistics"
    summary = "mean and covariance of queries, for other tools"
    options = QueryStatisticsOptions
    calibration = "kvsearch.calibration.query_statistics:QueryStatisticsCalibration"
    arrays = STATISTICS_ARRAYS
    makes_plans = False

    def describe(self, profile: Profile, ratio: float) -> Iterator[ReportPart]:  # noqa: ARG002
        from kvsearch.report.profile import list_query_parts

        yield from list_query_parts(profile)

    def next_commands(self, profile: Profile, run: CalibratedRun) -> Iterator[list[str]]:  # noqa: ARG002
        place = str(run.directory)
        yield ["export", place, "--to", "kvpress-ea", "-o", f"{place.rstrip('/')}-kvpress"]
