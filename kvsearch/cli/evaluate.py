"""kvsearch evaluate: score a plan against the full cache and equal-size baselines on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli.common import Common, command


@command
def evaluate(
    model: Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)],
    plan: Annotated[list[Path], typer.Option("--plan", help="A plan file; repeatable.", show_default=False)],
    common: Common,
    tasks: Annotated[
        str, typer.Option(help="synthetic, synthetic:NAME,NAME or jsonl:FILE (context, question, answers).")
    ] = "synthetic",
    samples: Annotated[int, typer.Option(help="Contexts per task.", min=1)] = 20,
    length: Annotated[int, typer.Option(help="Tokens of a synthetic context.", min=1)] = 1024,
    baselines: Annotated[
        str, typer.Option(help="What to compare with, at the plan's entries: uniform, snapkv, streaming, random.")
    ] = "uniform,snapkv,streaming",
    batch: Annotated[int, typer.Option(help="Contexts per forward pass.", min=1)] = 8,
    samples_file: Annotated[
        Path | None, typer.Option("--samples-file", help="Write every reply to this CSV file.", show_default=False)
    ] = None,
) -> None:
    """Score plans, question-agnostic: the context is compressed first, then the questions are asked.

    Example: kvsearch evaluate bundled --plan plan.json --samples 20
    """
    from kvsearch.evaluate.report import as_json, score_table, write_samples
    from kvsearch.evaluate.study import check_plans, study
    from kvsearch.plan import load_plan
    from kvsearch.plan.files import check_target
    from kvsearch.tasks.catalog import find_tasks

    names = tuple(name for name in baselines.split(",") if name)
    chosen = find_tasks(tasks, length)
    plans = check_plans({path.stem: load_plan(path) for path in plan}, plan, names)
    if samples_file is not None:
        check_target(samples_file)
    if common.dry_run:
        common.print_json({"tasks": [task.name for task in chosen], "plans": list(plans), "baselines": list(names)})
        return
    loaded = common.load(model)
    with common.progress("batches") as progress:
        result = study(loaded, plans, names, chosen, samples, common.seed, batch, progress)
    if result.doubt is not None:
        common.warn(result.doubt)
    if samples_file is not None:
        write_samples(result, samples_file)
    if common.as_json:
        common.print_json(as_json(result))
    else:
        for table in score_table(result):
            common.out.print(table)
