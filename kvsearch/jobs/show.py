"""kvsearch show: what is in a plan or a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvsearch.config.options import JobOptions, Option
from kvsearch.errors import UsageError
from kvsearch.jobs.plan_files import checked_plan
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.report.screen import View


class ShowOptions(JobOptions):
    """What to show."""

    job: ClassVar[str] = "show"

    path: Annotated[Path, Option("A plan, a profile, or the directory of one.", argument=True)]
    ratio: Annotated[float, Option("Global eviction ratio at which a profile is shown.")] = 0.8
    plan: Annotated[Path | None, Option("With a profile: what this plan loses, layer by layer.")] = None


@job(ShowOptions)
def show(options: ShowOptions, talk: Talk) -> View:  # noqa: ARG001 - there is nothing to say meanwhile
    """Read a plan or a profile, and return a view of it.

    Raises:
        UsageError: no such file, a damaged one, or a plan for a profile that cannot judge it.
        IncompatibleError: the profile is of another model than the plan.
    """
    from kvsearch.calibration.directory import profile_file
    from kvsearch.plan.profile import load_profile
    from kvsearch.plan.saved import plan_of_folder

    file = plan_of_folder(options.path) or profile_file(options.path)
    if file.suffix == ".json":
        if options.model_fields_set & {"plan", "ratio"}:
            raise UsageError("--plan and --ratio are for profiles: this is a plan")
        plan = checked_plan(file)
        from kvsearch.report.plan import PlanView

        return PlanView(plan)
    profile = load_profile(file)
    from kvsearch.report.profile import profile_view

    return profile_view(profile, options.ratio, None if options.plan is None else checked_plan(options.plan))
