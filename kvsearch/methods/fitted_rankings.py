"""Methods that fit a ranking of entries: their profiles are the weights of the policy of the same name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from kvsearch.calibration.options import ProbeOptions, QueryBankOptions
from kvsearch.methods.base import CalibratedRun, CalibrationMethod
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import ArraySpec
from kvsearch.policies.probe import ARRAYS, PROBE_METHOD
from kvsearch.policies.query_bank import EVEN_ARRAY, QUERIES_ARRAY, QUERY_BANK_METHOD

if TYPE_CHECKING:
    from kvsearch.report.figures import ReportPart

# T texts, J judged rankings, V rankings, B sizes; a bank in the making has none of them
QUALITY_ARRAYS = {
    "recall": ArraySpec(("V", "B", "L", "H"), 0, 1),
    "text_loss": ArraySpec(("T", "J", "B"), 0),
    "middle_loss": ArraySpec(("V or J",), 0),
}


class RankingMethod(CalibrationMethod):
    """A method whose profiles are weights of a policy: they rank entries, and make no plan on their own."""

    makes_plans = False
    fits_policy = True

    def describe(self, profile: Profile, ratio: float) -> Iterator[ReportPart]:  # noqa: ARG002
        from kvsearch.report.profile import list_ranking_parts

        yield from list_ranking_parts(profile)

    def remarks(self, profile: Profile) -> Iterator[str]:
        from kvsearch.report.profile import list_ranking_remarks

        yield from list_ranking_remarks(profile)

    def next_commands(self, profile: Profile, run: CalibratedRun) -> Iterator[list[str]]:
        """Yield the command that measures budgets for the ranking, or for a better one."""
        from kvsearch.report.profile import TextLosses

        place = str(run.directory)
        # the fit may have lost to a built-in policy: then budgets are suggested for that one
        preferred = TextLosses(profile).preferred
        flags = list(run.flags)
        if run.on_tasks:  # where it was fitted, a ranking looks better than it is
            flags += ["--split", "select"]
        elif not profile.metadata.provenance.settings.get("without_questions"):
            flags += run.data_flags
        output = f"{place.rstrip('/')}-budgets"
        yield ["calibrate", run.model, "--policy", preferred or f"{self.name}={place}", "-o", output, *flags]


class ProbeMethod(RankingMethod):
    """Regressions of the importance of entries, see `kvsearch.policies.probe`."""

    name = PROBE_METHOD
    summary = "a ranking by regressions of the importance of entries on their features"
    options = ProbeOptions
    calibration = "kvsearch.calibration.probe.measure:ProbeCalibration"
    arrays: ClassVar[Mapping[str, ArraySpec]] = {
        # a linear fit has no hidden units
        **{name: ArraySpec(("L", "H", *tail), needed=True, may_be_empty=True) for name, tail in ARRAYS.items()},
        **QUALITY_ARRAYS,
    }


class QueryBankMethod(RankingMethod):
    """Stored queries of questions, see `kvsearch.policies.query_bank`."""

    name = QUERY_BANK_METHOD
    summary = "a ranking by attention from stored queries of questions"
    options = QueryBankOptions
    calibration = "kvsearch.calibration.probe.bank:QueryBankCalibration"
    arrays: ClassVar[Mapping[str, ArraySpec]] = {
        QUERIES_ARRAY: ArraySpec(("L", "H", "G", "N", "D"), needed=True),
        EVEN_ARRAY: ArraySpec(("L", "H"), 0, 1),
        **QUALITY_ARRAYS,
    }
