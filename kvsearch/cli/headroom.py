"""kvsearch headroom: could any plan keep the score at this ratio, and can these tasks tell methods apart?"""

from __future__ import annotations

from typing import Annotated

import typer

from kvsearch.cli.common import Common, command


@command
def headroom(
    model: Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)],
    common: Common,
    ratio: Annotated[float, typer.Option(help="Share of the cache to evict.")] = 0.8,
    tasks: Annotated[str, typer.Option(help="As for evaluate.")] = "synthetic",
    samples: Annotated[int, typer.Option(help="Contexts per task.", min=1)] = 20,
    length: Annotated[int, typer.Option(help="Tokens of a synthetic context.", min=1)] = 1024,
) -> None:
    """Evict by true oracle importance, by simple policies and at random, and compare with the full cache.

    Example: kvsearch headroom bundled --length 1024
    """
    from kvsearch.errors import UsageError
    from kvsearch.tasks.catalog import find_tasks

    if not 0 < ratio < 1:
        raise UsageError(f"ratio {ratio} is outside (0, 1): it is the share to evict")
    chosen = find_tasks(tasks, length)
    if common.dry_run:
        common.print_json({"tasks": [task.name for task in chosen], "ratio": ratio, "samples": samples})
        return

    from kvsearch.evaluation.headroom import headroom as measure
    from kvsearch.evaluation.statistics import summarize
    from kvsearch.report.evaluation import plain_scores
    from kvsearch.tasks.encode import contexts_of, counter, encode

    loaded = common.load(model)
    count = counter(loaded.tokenizer)
    encoded = [encode(loaded.tokenizer, task, task.examples(samples, common.seed, count)) for task in chosen]
    with common.progress("contexts") as progress:
        results = measure(loaded, chosen, ratio, samples, common.seed, progress)
    rows = summarize(results, "full", common.seed, contexts_of(encoded))
    methods = list(rows[-1].scores)
    full = rows[-1].scores["full"].mean
    shares = {method: rows[-1].scores[method].mean / full if full else 0.0 for method in methods}
    if common.as_json:
        scores = {row.task: {method: row.scores[method].mean for method in methods} for row in rows}
        common.print_json({"model": model, "ratio": ratio, "scores": scores, "share_of_full": shares})
        return
    common.out.print(
        plain_scores(f"{model}: score with {100 * ratio:g}% evicted, {samples} contexts a task", methods, rows)
    )
    listed = "; ".join(f"{method} {share:.2f}" for method, share in shares.items())
    common.out.print(f"share of the full-cache score: {listed}", markup=False, soft_wrap=True)
