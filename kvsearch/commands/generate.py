"""kvsearch generate and compress: read a context under a plan, then answer prompts or save the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsearch.commands.groups import LOADING, MODEL, ModelOptions, format_command, list_changed_flags
from kvsearch.commands.model_loader import ModelLoader
from kvsearch.commands.plan import load_checked_plan
from kvsearch.commands.public import job
from kvsearch.commands.reporter import Reporter
from kvsearch.config.options import QUESTIONS, RESULT, RULE, SIZE, Option, Repeated, Seeded, option
from kvsearch.core.errors import UsageError
from kvsearch.core.files import check_output
from kvsearch.models.loading import BUNDLED
from kvsearch.models.work import StageCost, Work
from kvsearch.plan import Plan
from kvsearch.plan.saved import MODEL_KEY, plan_beside
from kvsearch.report.costs import Forecast
from kvsearch.report.plans import describe_guarantee
from kvsearch.tasks.given import read_text_argument, resolve_example
from kvsearch.tasks.prompts import PromptFormat

if TYPE_CHECKING:
    from kvsearch.evaluation.answer import CompressedContext, Reply
    from kvsearch.models.loading import LoadedModel


CHUNK = Option("Read the context so many tokens at a time, in less memory for what the model computes with.")


class GenerateOptions(ModelOptions, Seeded):
    """Options of `generate`: the context, prompts and plan."""

    model: str = option(..., MODEL)
    plan: Path | None = option(None, "A plan file.", SIZE, shown="beside the model, or the full cache")
    context: str | None = option(None, "The context, or @FILE; compressed before the prompt is read.", QUESTIONS)
    cache: Path | None = option(None, "In place of a context: a file that `kvsearch compress` wrote.", QUESTIONS)
    prompt: Annotated[tuple[str, ...], Repeated] = option(
        (), "The question or prompt, or @FILE; repeatable, and none sees another.", QUESTIONS, repeated=True
    )
    max_new_tokens: int = option(64, "Longest reply, in tokens.", RULE, ge=1)
    chunk: int | None = option(None, CHUNK, ge=1)

    @cached_property
    def inputs(self) -> tuple[Plan | None, str, list[str], str]:
        """The plan, the context, the prompts, and how one follows the context without a chat template: read once.

        Raises:
            UsageError: a file or a text is missing.
        """
        for name in ("context", "chunk"):
            if self.cache is not None and getattr(self, name) is not None:
                raise UsageError(f"--cache holds a context that is read already: leave --{name} out, or --cache")
        if len(self.prompt) > 1 and self.cache is None and self.context is None:
            raise UsageError("several prompts are asked of one context: give --context or --cache")
        plan = None if self.plan is None else load_checked_plan(self.plan)
        prompts = [read_text_argument(text) for text in self.prompt]
        if self.cache is not None:
            from kvsearch.runtime.store.cache_file import read_header

            read_header(self.cache)  # what is wrong with the file is told before a model is loaded
            if not prompts and self.model not in BUNDLED:
                raise UsageError("there is nothing to ask: give a --prompt with --cache")
        # the text of a file is not known here: any stands for it, but where a bundled model asks of its own
        given = "" if self.cache is not None and prompts else self.context
        context = None if given is None else read_text_argument(given)
        context, first, plain = resolve_example(self.model, context, prompts[0] if prompts else None, self.seed)
        return plan, context, [first, *prompts[1:]], plain

    def plan_for(self, loaded: LoadedModel, plan: Plan | None) -> Plan | None:
        """Return the plan that is read, else the one beside the model, None: the full cache; errors as `load_plan`."""
        if plan is None and self.cache is None and getattr(loaded.model.config, MODEL_KEY, None):
            plan = load_checked_plan(plan_beside(loaded.model))
        if plan is not None:
            plan.model.require(loaded.fingerprint, f"the plan {self.plan or 'beside the model'}")
        return plan


def dry_run(options: GenerateOptions, reporter: Reporter, models: ModelLoader) -> Forecast:  # noqa: ARG001 - as others
    """Forecast `generate`; errors as `generate`."""
    plan, context, prompts, _ = options.inputs
    from kvsearch.tasks.encode import make_token_counter

    source = {"context": context} if options.cache is None else {"cache": str(options.cache)}
    loaded = models.load(options.model)
    options.plan_for(loaded, plan)
    texts = prompts if options.cache is not None else [context, *prompts]
    steps = len(prompts) * options.max_new_tokens  # one prompt after the other: a pass for each token
    work = Work.over(map(make_token_counter(loaded.tokenizer), texts)) + Work(steps, steps)
    content = {**source, "prompt": prompts[0] if len(prompts) == 1 else prompts}
    return Forecast(content, [StageCost("read and reply", 1, len(prompts), work)], loaded.model)


@job(GenerateOptions)
def generate(options: GenerateOptions, reporter: Reporter, models: ModelLoader) -> list[Reply]:
    """Read a context into the cache that a plan allows, or take it from a file, then answer each prompt (greedy).

    Raises:
        UsageError: nothing to read, or a plan or file that cannot be used.
        IncompatibleError: the model and the plan, the file or the context do not fit.
    """
    plan, context, prompts, plain = options.inputs  # what is wrong with them is told before anything large is imported
    from kvsearch.evaluation.answer import answer
    from kvsearch.runtime.decode.next_tokens import describe_generation_settings

    loaded = models.load(options.model)
    plan = options.plan_for(loaded, plan)
    if plan is not None and (guarantee := describe_guarantee(plan)):
        reporter.say(f"the plan {options.plan or 'beside the model'}: {guarantee}")
    if settings_note := describe_generation_settings(loaded.model):
        reporter.say(settings_note)
    source = options.cache or context
    replies = answer(loaded, plan, source, prompts, plain, options.max_new_tokens, chunk=options.chunk)
    if options.cache is None and plan is not None and replies[0].entries == replies[0].full_entries:
        reporter.warn(
            f"nothing was evicted: the plan {options.plan or 'beside the model'} keeps all "
            f"{replies[0].context_tokens} tokens of this context"
        )
    shown = None if plan is None else plan.guarantee
    mass = replies[0].evicted_mass
    if shown is not None and shown.evicted_mass is not None and mass is not None and mass > shown.evicted_mass[1]:
        reporter.warn(
            f"this context is beyond those that the plan was shown on: {100 * mass:.1f}% of the attention at its end "
            f"goes to entries that left, and {100 * shown.evicted_mass[1]:.1f}% at most there: it may lose more here"
        )
    return replies


# --- a context in a file ----------------------------------------------------------------------------------------------


class CompressOptions(ModelOptions, Seeded):
    """Options of `compress`: the context, plan and output."""

    model: str = option(..., MODEL)
    plan: Path = option(..., "A plan file.", SIZE)
    context: str | None = option(
        None, "The context, or @FILE.", QUESTIONS, shown="of bundled models a text of their own"
    )
    output: Path = option(..., "The file for the compressed cache.", RESULT, short="-o", recorded=False)
    chunk: int | None = option(None, CHUNK, ge=1)
    force: bool = option(False, "Replace the file.", recorded=False)

    def read(self) -> tuple[Plan, str]:
        """Return plan and context; UsageError if a file is missing, or there is nothing to read."""
        check_output(self.output, self.force)
        plan = load_checked_plan(self.plan)
        if self.context is not None:
            return plan, read_text_argument(self.context)
        if self.model not in BUNDLED:
            raise UsageError("there is nothing to compress: give --context TEXT or @FILE")
        return plan, resolve_example(self.model, None, None, self.seed)[0]


def estimate_compression(options: CompressOptions, reporter: Reporter, models: ModelLoader) -> Forecast:  # noqa: ARG001
    """Forecast `compress`; UsageError if something is missing."""
    _, context = options.read()
    loaded = models.load(options.model)
    work = Work.over([PromptFormat(loaded.tokenizer).context(context).shape[-1]])
    content = {"context": context, "output": str(options.output)}
    return Forecast(content, [StageCost("read and compress", 1, 0, work)], loaded.model)


@job(CompressOptions)
def compress(options: CompressOptions, reporter: Reporter, models: ModelLoader) -> CompressedContext:  # noqa: ARG001
    """Read a context into the cache that a plan allows, and write that to a file: see `PlanCache.save`.

    `kvsearch generate --cache` and `PlanCache.load` answer from it with the tokens that follow without the detour.

    Raises:
        UsageError: nothing to read, a plan that cannot be used, or a file that is there already.
        IncompatibleError: the model and the plan or the context do not fit.
        EnvironmentFault: the file cannot be written; one that was there stays as it was.
    """
    plan, context = options.read()  # what is wrong with them is told before anything large is imported
    from kvsearch.evaluation.answer import CompressedContext

    loaded = models.load(options.model)
    ids, rest = PromptFormat(loaded.tokenizer).open_context(context)
    held = CompressedContext.read(loaded, plan, ids, rest=rest, chunk=options.chunk)
    held.save(options.output, overwrite=options.force)
    return held


def summarize_saved(options: CompressOptions, held: CompressedContext) -> dict[str, Any]:
    """Summarise a saved cache as JSON: entries are counted over all full-attention layers."""
    return {
        "path": str(options.output), "context_tokens": held.ids.shape[1], "entries": held.entries,
        "full_entries": held.full_entries, "bytes": held.bytes, "full_bytes": held.full_bytes,
        "file_bytes": options.output.stat().st_size,
    }  # fmt: skip


def describe_written(options: CompressOptions, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of the saved cache, and the command to query it."""
    on_disk = f"{saved['file_bytes'] / 2**20:.2f} MiB on disk, {100 * saved['file_bytes'] / saved['full_bytes']:.1f}%"
    yield (
        f"wrote {options.output}: {saved['context_tokens']} tokens, {saved['entries']} of {saved['full_entries']} "
        f"entries; {on_disk} of the full cache's {saved['full_bytes'] / 2**20:.2f} MiB"
    )
    how = list_changed_flags(options, LOADING)
    yield format_command("generate", options.model, "--cache", options.output, "--prompt", "...", *how)
