"""kvsearch generate: one reply of a model from the cache that a plan leaves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from kvsearch.config.options import Option, Seeded
from kvsearch.jobs.groups import WithModel
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

if TYPE_CHECKING:
    from kvsearch.evaluation.answer import Reply
    from kvsearch.plan import Plan


class GenerateOptions(WithModel, Seeded):
    """What to read, what to ask, and under which plan."""

    job: ClassVar[str] = "generate"

    plan: Annotated[Path | None, Option("A plan file; without one the full cache is kept.")] = None
    context: Annotated[str | None, Option("The context, or @FILE; compressed before the prompt is read.")] = None
    prompt: Annotated[str | None, Option("The question or prompt, or @FILE.")] = None
    max_new_tokens: Annotated[int, Field(ge=1), Option("Longest reply, in tokens.")] = 64
    exact: Annotated[bool, Option("Layers that lose nothing decode bit-identically.")] = False

    def read(self) -> tuple[Plan | None, str, str, str]:
        """Return plan, context, prompt and plain prompt format; UsageError if a file or a text is missing."""
        from kvsearch.evaluation.answer import example_for, read_text
        from kvsearch.jobs.plan_files import checked_plan

        plan = None if self.plan is None else checked_plan(self.plan)
        context, prompt = (None if text is None else read_text(text) for text in (self.context, self.prompt))
        return plan, *example_for(self.model, context, prompt, self.seed)


@job(GenerateOptions)
def dry_run(options: GenerateOptions, talk: Talk) -> dict[str, Any]:  # noqa: ARG001 - as others have it
    """Return what would be read and asked, as JSON; UsageError if something is missing."""
    _, context, prompt, _ = options.read()
    return {"context": context, "prompt": prompt}


@job(GenerateOptions)
def generate(options: GenerateOptions, talk: Talk) -> Reply:
    """Read a context into the cache that a plan allows, then answer a prompt from it (greedy).

    Raises:
        UsageError: nothing to read, or a plan that cannot be used.
        IncompatibleError: the model and the plan or the context do not fit.
    """
    from kvsearch.evaluation.answer import answer

    plan, context, prompt, plain = options.read()
    loaded = options.load(options.model, talk)
    return answer(loaded, plan, context, prompt, plain, options.max_new_tokens, exact=options.exact)
