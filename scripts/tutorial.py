"""Run the commands of docs/tutorial.md, and write below them what they print.

    python scripts/tutorial.py            # docs/tutorial.md with the outputs of today
    python scripts/tutorial.py smollm2    # those of the blocks ```console smollm2, on a model that was fetched
    python scripts/tutorial.py --check    # nothing is written; exit 1 where an output differs

Commands are the lines of `console` blocks that begin with "$ "; they run one after the other in a directory of
their own, and what they print to both streams follows them. The directory holds the files of the page: blocks such as
```python questions.py. Other scripts are those of the repository. How long each command took is printed, not written.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```console ?(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROMPT = "$ "
FILE = re.compile(r"^```\w+ (\w+\.\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRESS = re.compile(r"^.*: (\d+ of \d+|\d+%) in \d+:\d\d\b.*\n", re.MULTILINE)
TIMES = re.compile(r" \(about [^)]* left\)$|^(stage \d+ of \d+: [^\n(]*?) \([^)\n]*; [^)\n]*\)$", re.MULTILINE)
TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)

Run = Callable[[list[str]], str]


def rendered(page: str, run: Run, model: str = "") -> str:
    """Return a page with the output of `run` below every command of its blocks, or of those that name a `model`."""

    def block(found: re.Match[str]) -> str:
        if found[1] != model:
            return found[0]
        commands = [line for line in found[2].splitlines() if line.startswith(PROMPT)]
        parts = [f"{command}\n{_shown(run(shlex.split(command.removeprefix(PROMPT))))}" for command in commands]
        return found[0].partition("\n")[0] + "\n" + "\n".join(parts) + "```"

    return BLOCK.sub(block, page)


def _shown(output: str) -> str:
    """Return an output without what says how far a slow machine is, and how long stages take."""
    output = TIMES.sub(lambda found: found[1] or "", PROGRESS.sub("", output))
    text = TRAILING.sub("", output).strip("\n")
    return f"{text}\n" if text else ""


def run_here(words: list[str]) -> str:
    """Return what a command prints, `kvsearch ...` or `python FILE`; RuntimeError if it fails."""
    from typer.testing import CliRunner

    from kvsearch.cli import app

    started = time.process_time()
    if words[0] == "python":
        script = Path(words[1]) if Path(words[1]).exists() else ROOT / words[1]
        with contextlib.redirect_stdout(io.StringIO()) as printed, patch.object(sys, "argv", words[1:]):
            runpy.run_path(str(script), run_name="__main__")
        output = printed.getvalue()
    else:
        result = CliRunner().invoke(app, words[1:])
        if result.exit_code:
            raise RuntimeError(f"{shlex.join(words)} fails with {result.exit_code}: {result.output}")
        output = result.output
    print(f"{time.process_time() - started:6.1f} s of processor time  {shlex.join(words)}")
    return output


@contextlib.contextmanager
def directory_of(page: str) -> Iterator[None]:
    """Work in a directory of its own, which holds the files of the page, and be back afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for name, content in FILE.findall(page):
            Path(name).write_text(content)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> int:
    """Write the page, or tell whether it is that of today."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="run the blocks that name this model, and no others")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where an output differs")
    options = parser.parse_args()
    there = PAGE.read_text()
    with directory_of(there):
        here = rendered(there, run_here, options.model)
    if not options.check:
        PAGE.write_text(here)
    elif here != there:
        sys.stdout.writelines(difflib.unified_diff(there.splitlines(True), here.splitlines(True), "page", "today"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
