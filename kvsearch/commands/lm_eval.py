"""kvsearch lm-eval: tasks of lm-evaluation-harness under a plan."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsearch.commands.groups import MODEL, ModelOptions
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.plan import load_checked_plan
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import QUESTIONS, SIZE, Commas, Repeated, Seeded, option
from kvsearch.core.files import check_output, write_atomically
from kvsearch.models.work import StageCost, Work
from kvsearch.plan import Plan
from kvsearch.report.costs import Forecast

if TYPE_CHECKING:
    from lm_eval.tasks.manager import TaskManager


class LmEvalOptions(ModelOptions, Seeded):
    """Options of `lm-eval`: tasks of the harness and the plan."""

    model: str = option(..., MODEL)
    plan: Path = option(..., "A plan file.", SIZE)
    tasks: Commas = option(..., "Tasks, groups and tags of the harness, with commas; wildcards too.", QUESTIONS)
    limit: int | None = option(None, "Documents per task; by default all.", QUESTIONS, ge=1)
    num_fewshot: int | None = option(None, "Examples before each question; by default what the task says.", ge=0)
    include_path: Annotated[tuple[Path, ...], Repeated] = option(
        (), "A folder with tasks of your own; repeatable.", repeated=True
    )
    apply_chat_template: bool = option(False, "Put prompts into the tokenizer's chat template.")
    max_length: int | None = option(
        None,
        "Most tokens of prompt and reply together; longer prompts lose their beginning. At most, and by default, "
        "what the model takes.",
        ge=1,
    )
    batch: int = option(8, "Prompts per forward pass.", ge=1)
    log_samples: Path | None = option(None, "Write every document to this JSONL file.", metavar="FILE")
    force: bool = option(False, "Replace the file of --log-samples.", recorded=False)


def dry_run(options: LmEvalOptions, reporter: Reporter, models: ModelLoader) -> Forecast:  # noqa: ARG001 - as others have it
    """Forecast the run; errors as `run_lm_eval` before a model is loaded."""
    _, _, names = _check(options)
    content = {"tasks": names, "limit": options.limit, "num_fewshot": options.num_fewshot}
    stages = [StageCost(name, options.limit or 0, options.limit or 0, Work()) for name in names]
    return Forecast(content, stages)


@job(LmEvalOptions)
def run_lm_eval(options: LmEvalOptions, reporter: Reporter, models: ModelLoader) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on the cache that a plan leaves, and return the report of the harness.

    Raises:
        UsageError: unknown tasks, a plan that cannot be used, or a file that cannot be written.
        EnvironmentFault: the extra `lm-eval` is missing.
    """
    plan, manager, names = _check(options)
    from kvsearch.lm_eval.tasks import evaluate_tasks, load_tasks

    tasks = load_tasks(manager, names)
    loaded = models.load(options.model)
    with reporter.progress("asking: batch") as progress:
        results: dict[str, Any] = evaluate_tasks(
            loaded, plan, manager, tasks, limit=options.limit, num_fewshot=options.num_fewshot,
            chat_template=options.apply_chat_template, samples=options.log_samples is not None, seed=options.seed,
            batch=options.batch, max_length=options.max_length, progress=progress,
        )  # fmt: skip
    samples = results.pop("samples", {})
    if options.log_samples is not None:
        rows = ({"task": task, **row} for task, documents in samples.items() for row in documents)
        lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        write_atomically(options.log_samples, "".join(lines).encode())
    for task, held in results["kvsearch"]["held"].items():
        prompts = held["prompts"]
        if held["truncated"]:
            reporter.warn(f"{task}: {held['truncated']} of {prompts} prompts lost their beginning, they were too long")
        if held["single_tokens"]:
            reporter.warn(f"{task}: {held['single_tokens']} of {prompts} contexts are one token, nothing to compress")
    return results


def _check(options: LmEvalOptions) -> tuple[Plan, TaskManager, list[str]]:
    """Return the plan, what has the tasks, and their names, once all is checked that can be without a model."""
    os.environ["TQDM_DISABLE"] = "1"  # read when the harness is imported: progress is shown here
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from kvsearch.lm_eval.tasks import find_names, open_manager

    plan = load_checked_plan(options.plan)
    if options.log_samples is not None:
        check_output(options.log_samples, options.force)
    manager = open_manager(options.include_path)
    return plan, manager, find_names(manager, [name for name in options.tasks.split(",") if name])
