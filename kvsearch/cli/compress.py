"""kvsearch compress: read once, ask for ever."""

from __future__ import annotations

from dataclasses import asdict

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.compress import CompressOptions


@command(CompressOptions, dry_run=True)
def compress(options: CompressOptions, console: Console) -> None:
    """Read a context once, and write the cache that a plan leaves of it to a file, to be asked for ever.

    `kvsearch generate MODEL --cache FILE --prompt ...` answers from the file with the tokens that follow without the
    detour, on the same kind of device; another one rounds otherwise. Without --context a bundled model reads a text
    of its own.
    """
    from kvsearch.jobs import compress as jobs

    if console.dry_run:
        console.print_json(jobs.dry_run(options, talk=console))
        return
    saved = jobs.compress(options, talk=console)
    if console.as_json:
        console.print_json(asdict(saved))
        return
    console.say(
        f"wrote {saved.path}: {saved.context_tokens} tokens, {saved.entries} of {saved.full_entries} entries; "
        f"{saved.file_bytes / 2**20:.2f} MiB on disk, {100 * saved.file_bytes / saved.full_bytes:.1f}% of the full "
        f"cache's {saved.full_bytes / 2**20:.2f} MiB"
    )
    console.next("generate", options.model, "--cache", saved.path, "--prompt", "...")
