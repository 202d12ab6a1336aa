"""kvsearch generate: let a model answer from the small cache."""

from __future__ import annotations

from dataclasses import asdict

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.generate import GenerateOptions


@command(GenerateOptions, dry_run=True)
def generate(options: GenerateOptions, console: Console) -> None:
    """Read a context into the cache the plan allows, then answer a prompt from it (greedy).

    Without --context and --prompt a bundled model answers a question about a text of its own.
    """
    from kvsearch.evaluation.answer import expected_reply
    from kvsearch.jobs import generate as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    reply = jobs.generate(options, talk=console)
    if console.as_json:
        console.print_json(asdict(reply))
        return
    _, _, question, _ = options.read()
    console.say(f"context: {reply.context_tokens} tokens; prompt: {question.strip() or '(none)'}")
    console.out.print(reply.text, markup=False, soft_wrap=True)
    if options.context is None and options.prompt is None:
        console.say(f"expected to begin with: {expected_reply(options.seed)}")
    console.say(
        f"cache: {reply.entries} of {reply.full_entries} entries ({reply.bytes / 2**20:.2f} MiB, "
        f"full {reply.full_bytes / 2**20:.2f} MiB) after the context, at most {reply.most} while answering"
    )
