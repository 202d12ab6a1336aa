"""kvsearch generate: let a model answer from the small cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli.common import Common, checked_plan, command


@command
def generate(
    model: Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)],
    common: Common,
    plan: Annotated[
        Path | None, typer.Option(help="A plan file; without one the full cache is kept.", show_default=False)
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="The context, or @FILE; compressed before the prompt is read.", show_default=False),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The question or prompt, or @FILE.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest reply, in tokens.", min=1)] = 64,
    exact: Annotated[bool, typer.Option("--exact", help="Layers that lose nothing decode bit-identically.")] = False,
) -> None:
    """Read a context into the cache the plan allows, then answer a prompt from it (greedy).

    Without --context and --prompt the bundled model answers a question about a text of its own.
    """
    from kvsearch.evaluation.answer import answer, example_for, expected_reply, read_text

    loaded_plan = checked_plan(plan) if plan is not None else None
    text, question = (read_text(item) if item is not None else None for item in (context, prompt))
    text, question, plain = example_for(model, text, question, common.seed)
    if common.dry_run:
        common.print_json({"context": text, "prompt": question})
        return
    reply = answer(common.load(model), loaded_plan, text, question, plain, max_new_tokens, exact=exact)
    if common.as_json:
        common.print_json(reply.__dict__)
        return
    common.say(f"context: {reply.context_tokens} tokens; prompt: {question.strip() or '(none)'}")
    common.out.print(reply.text, markup=False, soft_wrap=True)
    if context is None and prompt is None:
        common.say(f"expected to begin with: {expected_reply(common.seed)}")
    common.say(
        f"cache: {reply.entries} of {reply.full_entries} entries ({reply.bytes / 2**20:.2f} MiB, "
        f"full {reply.full_bytes / 2**20:.2f} MiB) after the context, at most {reply.most} while answering"
    )
