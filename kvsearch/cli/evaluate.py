"""kvsearch evaluate: score plans against the full cache and equal-size baselines on the same samples."""

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
    protocol: Annotated[
        str,
        typer.Option(
            help="question-agnostic: the context is compressed first, then the questions are asked; question-aware: "
            "context and question are compressed as one."
        ),
    ] = "question-agnostic",
    samples: Annotated[int, typer.Option(help="Contexts per task.", min=1)] = 20,
    length: Annotated[int, typer.Option(help="Tokens of a synthetic context.", min=1)] = 1024,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and reply together; the middle of longer contexts is cut out. At most, and by "
            "default, what the model takes.",
            min=1,
            show_default=False,
        ),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="What to compare with, at the plan's entries: uniform, snapkv, streaming, random.")
    ] = "uniform,snapkv,streaming",
    subject: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The plan that the tables compare with all other methods, by its file's name without suffix; by "
            "default the first.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass.", min=1)] = 8,
    samples_file: Annotated[
        Path | None,
        typer.Option("--samples-file", help="Write every reply to this .csv or .parquet file.", show_default=False),
    ] = None,
) -> None:
    """Score plans on the same questions as the full cache and baselines of the same size.

    Example: kvsearch evaluate bundled --plan plan.json --samples 20
    """
    from kvsearch.evaluate.protocol import find_protocol
    from kvsearch.evaluate.report import as_json, score_table
    from kvsearch.evaluate.samples import check_samples_file, write_samples
    from kvsearch.evaluate.study import check_plans, study
    from kvsearch.plan import load_plan
    from kvsearch.tasks.catalog import find_tasks

    names, asked = tuple(name for name in baselines.split(",") if name), find_protocol(protocol)
    chosen = find_tasks(tasks, length)
    plans = check_plans({path.stem: load_plan(path) for path in plan}, plan, names, subject)
    if samples_file is not None:
        check_samples_file(samples_file)
    if common.dry_run:
        request = {"tasks": [task.name for task in chosen], "plans": list(plans), "baselines": list(names)}
        common.print_json({**request, "protocol": asked, "subject": subject or next(iter(plans))})
        return
    loaded = common.load(model)
    with common.progress("batches") as progress:
        result = study(
            loaded, plans, names, chosen, samples, common.seed, batch, progress,
            protocol=asked, max_length=max_length, subject=subject,
        )  # fmt: skip
    if result.doubt is not None:
        common.warn(result.doubt)
    if samples_file is not None:
        write_samples(result.samples, samples_file)
    if common.as_json:
        common.print_json(as_json(result))
    else:
        for table in score_table(result):
            common.out.print(table)
