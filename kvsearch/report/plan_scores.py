"""What runs say that a plan scores, in Markdown, for the card of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.errors import UsageError
from kvsearch.plan import Plan, load_plan
from kvsearch.plan.canonical import sha256_of
from kvsearch.report import evaluation
from kvsearch.report.reader import Opened, open_path
from kvsearch.report.selection import report_table
from kvsearch.report.table import markdown

if TYPE_CHECKING:
    from kvsearch.report.files.evaluation import StoredEvaluation
    from kvsearch.report.files.selection import StoredRun


def plan_scores(place: Path, plan: Plan) -> str:
    """Return what the directory of an evaluation or of a run says that a plan scores.

    Raises:
        UsageError: it is of another kind, is not finished, or is not of this plan.
        EnvironmentFault: it cannot be read.
    """
    from kvsearch.report.files.evaluation import StoredEvaluation
    from kvsearch.report.files.selection import StoredRun

    found = open_path(place)
    if isinstance(found.content, StoredEvaluation):
        return _evaluated(found, found.content, plan)
    if isinstance(found.content, StoredRun):
        return _chosen(found, found.content, plan)
    raise UsageError(
        f"{place}: {found.note or f'this is a {found.kind}'}; scores are those of a directory that `evaluate -o` or "
        "`run` wrote"
    )


def _evaluated(found: Opened, content: StoredEvaluation, plan: Plan) -> str:
    """Return the scores and the differences of an evaluation."""
    methods = {} if found.config is None else found.config.content["methods"]
    if not any(one.get("plan") == sha256_of(plan) for one in methods.values()):
        raise UsageError(f"{found.path} evaluates other plans than this one: evaluate --plan PLAN -o DIR")
    return "\n".join(map(markdown, evaluation.tables(content)))


def _chosen(found: Opened, content: StoredRun, plan: Plan) -> str:
    """Return what a run says of the size that the plan is of, and its table of the report split."""
    for choice in content.choices:
        if load_plan(found.path / choice.plan) == plan:
            return "\n".join([*(f"{line}\n" for line in choice.words), markdown(report_table(choice.selection))])
    raise UsageError(f"{found.path} wrote other plans than this one: give one of its plans, or the run of this one")
