"""kvsearch evaluate --tasks ppl:FILE: perplexity of a text after compressed contexts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.cli.common import Common
    from kvsearch.evaluation.compare import Settings
    from kvsearch.strategies.request import Contest
    from kvsearch.tasks.catalog import TaskOptions

PERPLEXITY = "ppl:"
CONTEXT, CONTINUATION = 1024, 128


def perplexity(
    model: str,
    common: Common,
    contest: Contest,
    spec: str,
    options: TaskOptions,
    how: Settings,
    continuation: int | None,
    stride: int | None,
) -> None:
    """Measure and print; `how.samples` windows of the text.

    Raises:
        UsageError: an option of tasks that perplexity does not read, and what `PerplexityText.load`, `check_totals` and
            `measure_perplexity` refuse.
    """
    from kvsearch.evaluation.identity import environment
    from kvsearch.evaluation.perplexity import measure_perplexity
    from kvsearch.evaluation.totals import check_totals
    from kvsearch.report.perplexity import SCHEMA, perplexity_json, perplexity_table
    from kvsearch.strategies.methods import FULL
    from kvsearch.tasks.perplexity import PerplexityText

    context = _context(options)
    text = PerplexityText.load(Path(spec.removeprefix(PERPLEXITY)))
    following = CONTINUATION if continuation is None else continuation
    if common.dry_run:
        common.print_json({"text": text.name, "context": context, "continuation": following, **contest.as_json()})
        return
    loaded = common.load(model)
    contenders = contest.contenders(loaded)
    check_totals(loaded, contenders, [context + len(loaded.tokenizer("")["input_ids"])])
    programs = {one.label: one.program for one in contenders if one.name != FULL}
    with common.progress("batches") as progress:
        result = measure_perplexity(
            loaded, programs, text, context, following, stride=stride, windows=how.samples, batch=how.batch,
            seed=how.seed, progress=progress,
        )  # fmt: skip
    phases = ", ".join(sorted({one.phases for one in contenders if one.name != FULL}))
    if common.as_json:
        told = {"phases": phases, "batch": how.batch, "environment": environment(loaded)}
        common.print_json({"schema": SCHEMA, **told, "perplexity": perplexity_json(result)})
    else:
        common.out.print(perplexity_table(result, phases))


def _context(options: TaskOptions) -> int:
    """Tokens of a context: the one length that may be given."""
    others = [name for name in options.given if name != "lengths"]
    if others:
        raise UsageError(f"ppl:FILE reads --length, --samples, --continuation and --stride, not --{others[0]}")
    lengths = options.lengths or (CONTEXT,)
    if len(lengths) > 1:
        raise UsageError("ppl:FILE takes one --length, the tokens of a context: measure one after the other")
    return lengths[0]


def refuse_unread(**given: object) -> None:
    """UsageError for an option, by its parameter's name, that has a value but is not read here."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"ppl:FILE takes no --{name.replace('_', '-')}: it prints its result, with --json as JSON")
