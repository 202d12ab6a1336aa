"""The plan files of jobs: reading one, and the options of jobs that write one."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvsearch.config.options import JobOptions, Option
from kvsearch.jobs.groups import BUDGET
from kvsearch.jobs.talk import Talk
from kvsearch.plan.files import PLAN_FILE, check_output

if TYPE_CHECKING:
    from kvsearch.plan import Plan, Size


class Sized(JobOptions):
    """How much a plan keeps."""

    ratio: Annotated[float | None, Option("Share of the prompt to evict, between 0 and 1.")] = None
    budget: Annotated[int | None, Field(ge=1), BUDGET] = None
    length: Annotated[int | None, Field(ge=1), Option("Prompt length that a ratio's integer budgets are for.")] = None

    @property
    def size(self) -> Size:
        """The size of the plan; UsageError if there is none, or two, or one out of range."""
        from kvsearch.plan import Size

        return Size(self.budget, self.ratio, self.length)


class PlanOptions(JobOptions):
    """Where a plan is written to."""

    output: Annotated[Path, Option("The plan file.", short="-o", recorded=False)]
    force: Annotated[bool, Option("Replace the plan file.", recorded=False)] = False

    @abstractmethod
    def make(self, talk: Talk) -> Plan:
        """Make the plan, which is what a dry run does."""

    def write(self, talk: Talk) -> Plan:
        """Make the plan and write it; EnvironmentFault if it cannot be written."""
        from kvsearch.plan import save_plan

        plan = self.make(talk)
        save_plan(plan, self.output, overwrite=self.force)
        return plan

    def check_output(self) -> None:
        """Raise UsageError if no plan can be written, found out before there is one."""
        check_output(self.output, self.force, PLAN_FILE)

    def checked(self, plan: Plan) -> Plan:
        """Return the plan; UsageError if its parts do not fit together."""
        from kvsearch.budgets.plan_checks import check_plan

        check_plan(plan, f"the plan for {self.output}")
        return plan


def checked_plan(path: Path) -> Plan:
    """Read a plan file and check its policies; what is wrong with the file is told before torch is loaded.

    Raises:
        UsageError: the file, a policy or a budget of it cannot be used.
    """
    from kvsearch.plan import load_plan

    plan = load_plan(path)
    from kvsearch.budgets.plan_checks import check_plan

    check_plan(plan, str(path))
    return plan
