"""kvsearch generate: let a model answer from the small cache."""

from __future__ import annotations

from dataclasses import asdict

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.generate import GenerateOptions


@command(GenerateOptions, dry_run=True)
def generate(options: GenerateOptions, console: Console) -> None:
    """Read a context into the cache the plan allows, then answer a prompt from it (greedy).

    With --cache the context is one that `kvsearch compress` has read before. Several prompts are asked one by one, and
    none sees another. Without --context and --prompt a bundled model answers a question about a text of its own.
    """
    from kvsearch.jobs import generate as jobs
    from kvsearch.tasks.given import expected_reply

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    replies = jobs.generate(options, talk=console)
    if console.as_json:
        found = [asdict(reply) for reply in replies]
        console.print_json(found if len(options.prompt) > 1 else found[0])
        return
    for prompt, reply in zip(options.read().prompts, replies, strict=True):
        console.say(f"context: {reply.context_tokens} tokens; prompt: {prompt.strip() or '(none)'}")
        console.print_reply(reply.text)
    if options.context is None and not options.prompt:
        console.say(f"expected to begin with: {expected_reply(options.seed)}")
    last, most = replies[-1], max(reply.most for reply in replies)
    console.say(
        f"cache: {last.entries} of {last.full_entries} entries ({last.bytes / 2**20:.2f} MiB, "
        f"full {last.full_bytes / 2**20:.2f} MiB) after the context, at most {most} while answering"
    )
