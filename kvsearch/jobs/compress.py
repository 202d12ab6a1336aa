"""kvsearch compress: compress a context once under a plan, and save it to a file that can be queried any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvsearch.config.options import QUESTIONS, RESULT, SIZE, Option, Seeded
from kvsearch.core.errors import UsageError
from kvsearch.core.files import CACHE_FILE, check_output
from kvsearch.jobs.groups import Loading, WithModel, flags_of, following
from kvsearch.jobs.plan import checked_plan
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.models.loading import BUNDLED
from kvsearch.models.speed import StageCost, Work
from kvsearch.plan import Plan
from kvsearch.report.costs import Forecast
from kvsearch.tasks.given import example_for, given_text
from kvsearch.tasks.prompts import PromptFormat


@dataclass(frozen=True)
class SavedContext:
    """A context in a file: tokens read, entries of all full-attention layers, and bytes in memory and on disk."""

    path: str
    context_tokens: int
    entries: int
    full_entries: int
    bytes: int
    full_bytes: int
    file_bytes: int

    def remarks(self, options: CompressOptions) -> Iterator[str]:
        """Say what was written, and how to ask it."""
        share = 100 * self.file_bytes / self.full_bytes
        yield (
            f"wrote {self.path}: {self.context_tokens} tokens, {self.entries} of {self.full_entries} entries; "
            f"{self.file_bytes / 2**20:.2f} MiB on disk, {share:.1f}% of the full cache's "
            f"{self.full_bytes / 2**20:.2f} MiB"
        )
        how = flags_of(options, Loading.model_fields)
        yield following("generate", options.model, "--cache", self.path, "--prompt", "...", *how)


class CompressOptions(WithModel, Seeded):
    """What to read, under which plan, and where to."""

    plan: Annotated[Path, Option("A plan file.", SIZE)]
    context: Annotated[
        str | None, Option("The context, or @FILE.", QUESTIONS, shown="of bundled models a text of their own")
    ] = None
    output: Annotated[Path, Option("The file for the compressed cache.", RESULT, short="-o", recorded=False)]
    chunk: Annotated[
        int | None,
        Field(ge=1),
        Option("Read the context so many tokens at a time, in less memory for what the model computes with."),
    ] = None
    force: Annotated[bool, Option("Replace the file.", recorded=False)] = False

    def read(self) -> tuple[Plan, str]:
        """Return plan and context; UsageError if a file is missing, or there is nothing to read."""
        check_output(self.output, self.force, CACHE_FILE)
        plan = checked_plan(self.plan)
        if self.context is not None:
            return plan, given_text(self.context)
        if self.model not in BUNDLED:
            raise UsageError("there is nothing to compress: give --context TEXT or @FILE")
        return plan, example_for(self.model, None, None, self.seed)[0]


@job(CompressOptions, dry=True)
def dry_run(options: CompressOptions, reporter: Reporter) -> Forecast:
    """Return what would be read and written, and what that costs; UsageError if something is missing."""
    _, context = options.read()
    loaded = options.load(options.model, reporter)
    work = Work.over([PromptFormat(loaded.tokenizer).context(context).shape[-1]])
    content = {"context": context, "output": str(options.output)}
    return Forecast(content, [StageCost("read and compress", 1, 0, work)], loaded.speed)


@job(CompressOptions)
def compress(options: CompressOptions, reporter: Reporter) -> SavedContext:
    """Read a context into the cache that a plan allows, and write that to a file: see `PlanCache.save`.

    `kvsearch generate --cache` and `PlanCache.load` answer from it with the tokens that follow without the detour.

    Raises:
        UsageError: nothing to read, a plan that cannot be used, or a file that is there already.
        IncompatibleError: the model and the plan or the context do not fit.
        EnvironmentFault: the file cannot be written; one that was there stays as it was.
    """
    plan, context = options.read()  # what is wrong with them is told before anything large is imported
    from kvsearch.evaluation.answer import CompressedContext

    loaded = options.load(options.model, reporter)
    ids = PromptFormat(loaded.tokenizer).context(context)
    held = CompressedContext.read(loaded, plan, ids, chunk=options.chunk)
    size = held.save(options.output, overwrite=options.force)
    sizes = (held.entries, held.full_entries, held.bytes, held.full_bytes, size)
    return SavedContext(str(options.output), held.ids.shape[1], *sizes)
