"""kvsearch show: what is in a file or a directory that kvsearch wrote."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvsearch.config.options import JobOptions, Option
from kvsearch.core.errors import UsageError
from kvsearch.jobs.plan import checked_plan
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter

if TYPE_CHECKING:
    from kvsearch.report.screen import View


class ShowOptions(JobOptions):
    """What to show."""

    path: Annotated[
        Path,
        Option("A plan, a profile, the directory of a run, or any other file that kvsearch wrote.", argument=True),
    ]
    ratio: Annotated[float, Option("Global eviction ratio at which a profile is shown.")] = 0.8
    plan: Annotated[Path | None, Option("With a profile: what this plan loses, layer by layer.")] = None


@job(ShowOptions)
def show(options: ShowOptions, reporter: Reporter) -> View:  # noqa: ARG001 - there is nothing to say meanwhile
    """Read what kvsearch wrote, and return a view of it.

    Raises:
        UsageError: no such file, a damaged one, nothing of ours, or a plan for a profile that cannot judge it.
        IncompatibleError: the profile is of another model than the plan.
    """
    from kvsearch.report.artifacts import open_path

    opened = open_path(options.path)
    if opened.kind != "profile" and options.model_fields_set & {"plan", "ratio"}:
        raise UsageError(f"--plan and --ratio are for profiles: {options.path} is a {opened.kind}")
    if opened.kind == "plan":
        from kvsearch.budgets.plan_checks import check_plan

        check_plan(opened.content, str(options.path))
    if opened.kind == "profile":
        from kvsearch.report.profile import profile_parts

        plan = None if options.plan is None else checked_plan(options.plan)
        opened = replace(opened, view=partial(profile_parts, opened.content, options.ratio, plan))
    return opened
