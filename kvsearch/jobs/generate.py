"""kvsearch generate: replies of a model from the cache that a plan leaves, made now or taken from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from kvsearch.config.options import Option, Repeated, Seeded
from kvsearch.errors import UsageError
from kvsearch.jobs.foretell import foretold
from kvsearch.jobs.groups import WithModel
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.evaluation.answer import Reply
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Plan


class Texts(NamedTuple):
    """What is read and asked: `plain` is how a prompt follows the context without a chat template."""

    plan: Plan | None
    context: str
    prompts: list[str]
    plain: str


class GenerateOptions(WithModel, Seeded):
    """What to read, what to ask, and under which plan."""

    job: ClassVar[str] = "generate"

    plan: Annotated[Path | None, Option("A plan file; without one the full cache is kept.")] = None
    context: Annotated[str | None, Option("The context, or @FILE; compressed before the prompt is read.")] = None
    cache: Annotated[Path | None, Option("In place of a context: a file that `kvsearch compress` wrote.")] = None
    prompt: Annotated[
        tuple[str, ...],
        Repeated,
        Option("The question or prompt, or @FILE; repeatable, and none sees another.", repeated=True),
    ] = ()
    max_new_tokens: Annotated[int, Field(ge=1), Option("Longest reply, in tokens.")] = 64
    chunk: Annotated[
        int | None,
        Field(ge=1),
        Option("Read the context so many tokens at a time, in less memory for what the model computes with."),
    ] = None
    exact: Annotated[bool, Option("Layers that lose nothing decode bit-identically.")] = False

    def read(self) -> Texts:
        """Return what is read and asked, and under which plan; UsageError if a file or a text is missing."""
        from kvsearch.jobs.plan_files import checked_plan
        from kvsearch.tasks.given import example_for, given_text

        if self.cache is not None and self.context is not None:
            raise UsageError("--cache holds a context already: leave --context out, or --cache")
        if self.cache is not None and self.chunk is not None:
            raise UsageError("--chunk is for reading a context, and --cache holds one that is read: leave it out")
        if len(self.prompt) > 1 and self.cache is None and self.context is None:
            raise UsageError("several prompts are asked of one context: give --context or --cache")
        plan = None if self.plan is None else checked_plan(self.plan)
        prompts = [given_text(text) for text in self.prompt]
        if self.cache is not None:
            from kvsearch.models.loading import BUNDLED
            from kvsearch.runtime.cache_file import read_header

            read_header(self.cache)  # what is wrong with the file is told before a model is loaded
            if not prompts and self.model not in BUNDLED:
                raise UsageError("there is nothing to ask: give a --prompt with --cache")
        # the text of a file is not known here: any stands for it, but where a bundled model asks of its own
        given = "" if self.cache is not None and prompts else self.context
        context = None if given is None else given_text(given)
        context, first, plain = example_for(self.model, context, prompts[0] if prompts else None, self.seed)
        return Texts(plan, context, [first, *prompts[1:]], plain)


@job(GenerateOptions, dry=True)
def dry_run(options: GenerateOptions, talk: Talk) -> dict[str, Any]:
    """Return what would be read and asked, and how long that takes, as JSON; errors as `generate`."""
    texts = options.read()
    from kvsearch.models.speed import Work
    from kvsearch.tasks.encode import counter

    prompt = texts.prompts[0] if len(texts.prompts) == 1 else texts.prompts
    source = {"context": texts.context} if options.cache is None else {"cache": str(options.cache)}
    loaded = _loaded(options, texts.plan, talk)
    count = counter(loaded.tokenizer)
    asked = sum(map(count, texts.prompts)) + (count(texts.context) if options.cache is None else 0)
    work = Work(1, asked, len(texts.prompts) * options.max_new_tokens)
    return {**source, "prompt": prompt, **foretold(loaded, work, talk)}


@job(GenerateOptions)
def generate(options: GenerateOptions, talk: Talk) -> list[Reply]:
    """Read a context into the cache that a plan allows, or take it from a file, then answer each prompt (greedy).

    Raises:
        UsageError: nothing to read, or a plan or file that cannot be used.
        IncompatibleError: the model and the plan, the file or the context do not fit.
    """
    plan, context, prompts, plain = options.read()  # what is wrong with them is told before anything large is imported
    from kvsearch.evaluation.answer import answer, answer_from

    loaded = _loaded(options, plan, talk)
    rest = (prompts, plain, options.max_new_tokens)
    if options.cache is not None:
        return answer_from(loaded, options.cache, plan, *rest, exact=options.exact)
    replies = answer(loaded, plan, context, *rest, exact=options.exact, chunk=options.chunk)
    if plan is not None and replies[0].entries == replies[0].full_entries:
        talk.warn(
            f"nothing was evicted: the plan {options.plan} keeps all {replies[0].context_tokens} tokens of this context"
        )
    return replies


def _loaded(options: GenerateOptions, plan: Plan | None, talk: Talk) -> LoadedModel:
    """Load the model; IncompatibleError if the plan is of another one."""
    loaded = options.load(options.model, talk)
    if plan is not None:
        plan.model.require(loaded.fingerprint, f"the plan {options.plan}")
    return loaded
