"""kvsearch evaluate --tasks ppl:FILE: perplexity of a text after compressed contexts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.errors import UsageError
from kvsearch.jobs.groups import PERPLEXITY
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.evaluation.window_loss import Perplexity
    from kvsearch.jobs.evaluate import EvaluateOptions
    from kvsearch.strategies.request import Request
    from kvsearch.tasks.perplexity import PerplexityText

CONTEXT, CONTINUATION = 1024, 128
UNREAD = (
    "subject", "protocol", "max_length", "max_memory", "output", "force", "reuse", "samples_file", "table", "columns",
    "losses",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredPerplexity:
    """Perplexities of a text; `phases` are those in which the methods evict, `environment` is model and code."""

    result: Perplexity
    phases: str
    batch: int
    environment: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return everything but the losses of single tokens."""
        from kvsearch.report.perplexity import SCHEMA, perplexity_json

        told = {"phases": self.phases, "batch": self.batch, "environment": self.environment}
        return {"schema": SCHEMA, **told, "perplexity": perplexity_json(self.result)}


def dry_run(options: EvaluateOptions) -> dict[str, Any]:
    """Return what would be measured, as JSON; errors as `measure` before a model is loaded."""
    request, text, context, continuation = _checked(options)
    return {"text": text.name, "context": context, "continuation": continuation, **request.as_json()}


def measure(options: EvaluateOptions, talk: Talk) -> MeasuredPerplexity:
    """Measure `options.samples` windows of a text under every method.

    Raises:
        UsageError: an option that perplexity does not read, and what `PerplexityText.load`, `check_totals` and
            `measure_perplexity` refuse.
    """
    request, text, context, continuation = _checked(options)

    from kvsearch.evaluation.identity import environment
    from kvsearch.evaluation.perplexity import measure_perplexity
    from kvsearch.evaluation.totals import check_totals
    from kvsearch.strategies.compared import different_settings
    from kvsearch.strategies.names import FULL

    loaded = options.load(options.model, talk)
    ready = request.ready(loaded)
    if told := different_settings(ready):
        talk.say(told)
    check_totals(loaded, ready, [context + len(loaded.tokenizer("")["input_ids"])])
    programs = {one.label: one.program for one in ready if one.name != FULL}
    with talk.progress("batches") as progress:
        result = measure_perplexity(
            loaded, programs, text, context, continuation, stride=options.stride, windows=options.samples,
            batch=options.batch, seed=options.seed, progress=progress,
        )  # fmt: skip
    phases = ", ".join(sorted({one.phases for one in ready if one.name != FULL}))
    return MeasuredPerplexity(result, phases, options.batch, environment(loaded))


def _checked(options: EvaluateOptions) -> tuple[Request, PerplexityText, int, int]:
    """Return what is compared, the text, and tokens of a context and of its continuation."""
    from kvsearch.tasks.perplexity import PerplexityText

    for name in UNREAD:
        if getattr(options, name) != type(options).model_fields[name].default:
            raise UsageError(f"ppl:FILE takes no --{name.replace('_', '-')}: it prints its result, with --json as JSON")
    request = options.request()
    others = [name for name in options.task_options(options.split).given if name != "lengths"]
    if others:
        raise UsageError(f"ppl:FILE reads --length, --samples, --continuation and --stride, not --{others[0]}")
    lengths = options.length or (CONTEXT,)
    if len(lengths) > 1:
        raise UsageError("ppl:FILE takes one --length, the tokens of a context: measure one after the other")
    text = PerplexityText.load(Path(str(options.tasks).removeprefix(PERPLEXITY)))
    return request, text, lengths[0], CONTINUATION if options.continuation is None else options.continuation
