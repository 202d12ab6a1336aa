"""kvsearch generate: replies of a model from the cache that a plan leaves, made now or taken from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from kvsearch.config.options import QUESTIONS, RULE, SIZE, Option, Repeated, Seeded
from kvsearch.core.errors import UsageError
from kvsearch.jobs.groups import WithModel
from kvsearch.jobs.plan import checked_plan
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.models.loading import BUNDLED
from kvsearch.models.speed import StageCost, Work
from kvsearch.plan import Plan
from kvsearch.report.costs import Forecast
from kvsearch.tasks.given import example_for, given_text

if TYPE_CHECKING:
    from kvsearch.evaluation.answer import Reply


class Texts(NamedTuple):
    """What is read and asked: `plain` is how a prompt follows the context without a chat template."""

    plan: Plan | None
    context: str
    prompts: list[str]
    plain: str


class GenerateOptions(WithModel, Seeded):
    """What to read, what to ask, and under which plan."""

    plan: Annotated[Path | None, Option("A plan file; without one the full cache is kept.", SIZE)] = None
    context: Annotated[
        str | None, Option("The context, or @FILE; compressed before the prompt is read.", QUESTIONS)
    ] = None
    cache: Annotated[
        Path | None, Option("In place of a context: a file that `kvsearch compress` wrote.", QUESTIONS)
    ] = None
    prompt: Annotated[
        tuple[str, ...],
        Repeated,
        Option("The question or prompt, or @FILE; repeatable, and none sees another.", QUESTIONS, repeated=True),
    ] = ()
    max_new_tokens: Annotated[int, Field(ge=1), Option("Longest reply, in tokens.", RULE)] = 64
    chunk: Annotated[
        int | None,
        Field(ge=1),
        Option("Read the context so many tokens at a time, in less memory for what the model computes with."),
    ] = None
    exact: Annotated[bool, Option("Layers that lose nothing decode bit-identically.")] = False

    def read(self) -> Texts:
        """Return what is read and asked, and under which plan; UsageError if a file or a text is missing."""
        for name in ("context", "chunk"):
            if self.cache is not None and getattr(self, name) is not None:
                raise UsageError(f"--cache holds a context that is read already: leave --{name} out, or --cache")
        if len(self.prompt) > 1 and self.cache is None and self.context is None:
            raise UsageError("several prompts are asked of one context: give --context or --cache")
        plan = None if self.plan is None else checked_plan(self.plan)
        prompts = [given_text(text) for text in self.prompt]
        if self.cache is not None:
            from kvsearch.runtime.store.cache_file import read_header

            read_header(self.cache)  # what is wrong with the file is told before a model is loaded
            if not prompts and self.model not in BUNDLED:
                raise UsageError("there is nothing to ask: give a --prompt with --cache")
        # the text of a file is not known here: any stands for it, but where a bundled model asks of its own
        given = "" if self.cache is not None and prompts else self.context
        context = None if given is None else given_text(given)
        context, first, plain = example_for(self.model, context, prompts[0] if prompts else None, self.seed)
        return Texts(plan, context, [first, *prompts[1:]], plain)


@job(GenerateOptions, dry=True)
def dry_run(options: GenerateOptions, reporter: Reporter) -> Forecast:
    """Return what would be read and asked, and what that costs; errors as `generate`."""
    plan, context, prompts, _ = options.read()
    from kvsearch.tasks.encode import counter

    source = {"context": context} if options.cache is None else {"cache": str(options.cache)}
    loaded = options.load(options.model, reporter)
    if plan is not None:
        plan.model.require(loaded.fingerprint, f"the plan {options.plan}")
    texts = prompts if options.cache is not None else [context, *prompts]
    steps = len(prompts) * options.max_new_tokens  # one prompt after the other: a pass for each token
    work = Work.over(map(counter(loaded.tokenizer), texts)) + Work(steps, steps)
    content = {**source, "prompt": prompts[0] if len(prompts) == 1 else prompts}
    return Forecast(content, [StageCost("read and reply", 1, len(prompts), work)], loaded.speed)


@job(GenerateOptions)
def generate(options: GenerateOptions, reporter: Reporter) -> list[Reply]:
    """Read a context into the cache that a plan allows, or take it from a file, then answer each prompt (greedy).

    Raises:
        UsageError: nothing to read, or a plan or file that cannot be used.
        IncompatibleError: the model and the plan, the file or the context do not fit.
    """
    plan, context, prompts, plain = options.read()  # what is wrong with them is told before anything large is imported
    from kvsearch.evaluation.answer import answer

    loaded = options.load(options.model, reporter)
    if plan is not None:
        plan.model.require(loaded.fingerprint, f"the plan {options.plan}")
    source = options.cache or context
    replies = answer(
        loaded, plan, source, prompts, plain, options.max_new_tokens, exact=options.exact, chunk=options.chunk
    )
    if options.cache is None and plan is not None and replies[0].entries == replies[0].full_entries:
        reporter.warn(
            f"nothing was evicted: the plan {options.plan} keeps all {replies[0].context_tokens} tokens of this context"
        )
    return replies
