"""What runs say that a plan scores, in Markdown, for the card of its folder."""

from __future__ import annotations

from pathlib import Path

from kvsearch.core.canonical import sha256_of
from kvsearch.core.errors import UsageError
from kvsearch.plan import Plan, load_plan
from kvsearch.report import evaluation
from kvsearch.report.artifacts import open_path
from kvsearch.report.selections import report_table
from kvsearch.report.table import markdown
from kvsearch.results.base import telling_damage
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.results.selection import RunResult


def plan_scores(place: Path, plan: Plan) -> str:
    """Return what the directory of an evaluation or of a run says that a plan scores.

    Raises:
        UsageError: it is of another kind, is not finished, or is not of this plan.
        EnvironmentFault: it cannot be read.
    """
    opened = open_path(place)
    content = opened.content
    with telling_damage(place):
        if isinstance(content, EvaluationResult):
            methods = {} if opened.config is None else opened.config.content["methods"]
            if any(method.get("plan") == sha256_of(plan) for method in methods.values()):
                return "\n".join(map(markdown, evaluation.tables(content)))
            raise UsageError(f"{place} evaluates other plans than this one: evaluate --plan PLAN -o DIR")
        if isinstance(content, RunResult):
            for choice in content.choices:
                if load_plan(place / choice.plan) == plan:
                    return "\n".join([*(f"{line}\n" for line in choice.words), markdown(report_table(choice))])
            raise UsageError(f"{place} wrote other plans than this one: give one of its plans, or the run of this one")
    problem = opened.note or f"this is a {opened.kind}"
    raise UsageError(f"{place}: {problem}; scores are those of a directory that `evaluate -o` or `run` wrote")
