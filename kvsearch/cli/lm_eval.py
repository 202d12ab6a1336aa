"""kvsearch lm-eval: tasks of lm-evaluation-harness under a plan."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsearch.cli.common import Common, checked_plan, command

if TYPE_CHECKING:
    from collections.abc import Iterator


@command
def lm_eval(
    model: Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)],
    plan: Annotated[Path, typer.Option(help="A plan file.", show_default=False)],
    tasks: Annotated[
        str, typer.Option(help="Tasks, groups and tags of the harness, with commas; wildcards too.", show_default=False)
    ],
    common: Common,
    limit: Annotated[
        int | None, typer.Option(help="Documents per task; by default all.", min=1, show_default=False)
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(help="Examples before each question; by default what the task says.", min=0, show_default=False),
    ] = None,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="A folder with tasks of your own; repeatable.", show_default=False)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and reply together; longer prompts lose their beginning. At most, and by "
            "default, what the model takes.",
            min=1,
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass.", min=1)] = 8,
    log_samples: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every document to this JSONL file.", show_default=False),
    ] = None,
) -> None:
    """Run tasks of lm-evaluation-harness on the cache that a plan leaves (needs the extra `lm-eval`).

    Example: kvsearch lm-eval bundled --plan plan.json --tasks arc_easy --limit 100
    """
    _prepare(common)
    from kvsearch.lm_eval.tasks import TaskNames, evaluate_tasks
    from kvsearch.plan.files import atomic_write, check_target

    loaded_plan = checked_plan(plan)
    if log_samples is not None:
        check_target(log_samples)
    names = TaskNames.find([name for name in tasks.split(",") if name], include_path or [])
    if common.dry_run:
        common.print_json({"tasks": list(names.names), "limit": limit, "num_fewshot": num_fewshot})
        return
    chosen = names.load()
    with common.progress("batches") as progress:
        results = evaluate_tasks(
            common.load(model), loaded_plan, chosen, limit=limit, num_fewshot=num_fewshot,
            chat_template=apply_chat_template, samples=log_samples is not None, seed=common.seed, batch=batch,
            max_length=max_length, progress=progress,
        )  # fmt: skip
    samples = results.pop("samples", {})
    if log_samples is not None:
        atomic_write(log_samples, "".join(_lines(samples)).encode())
    for doubt in _doubts(results):
        common.warn(doubt)
    if common.as_json:
        common.print_json(results)
    else:
        _show(results, common)


def _prepare(common: Common) -> None:
    """What the harness and its packages read once, when they are imported."""
    if common.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if common.quiet or not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.WARNING if common.verbose else logging.ERROR)


def _lines(samples: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    import json

    for task, rows in samples.items():
        for row in rows:
            yield json.dumps({"task": task, **row}, ensure_ascii=False, sort_keys=True) + "\n"


def _doubts(results: dict[str, Any]) -> Iterator[str]:
    """What a reader of the scores should know."""
    for task, held in results["kvsearch"]["held"].items():
        if held["truncated"]:
            yield f"{task}: {held['truncated']} of {held['prompts']} prompts lost their beginning, they were too long"
        if held["single_tokens"]:
            yield f"{task}: {held['single_tokens']} of {held['prompts']} contexts are one token, nothing to compress"


def _show(results: dict[str, Any], common: Common) -> None:
    from kvsearch.lm_eval.package import make_table

    for column in ("results", "groups"):
        if results.get(column):
            common.out.print(make_table(results, column), markup=False, soft_wrap=True)
    made = results["kvsearch"]
    common.out.print(f"plan {made['plan_sha256'][:12]}, {made['protocol']}; the cache held, mean per prompt:")
    for task, held in made["held"].items():
        share = held["entries"] / held["full_entries"]
        common.out.print(
            f"{task}: {held['entries']:.0f} of {held['full_entries']:.0f} entries ({share:.3f}), prompts of "
            f"{held['tokens']:.0f} tokens"
        )
