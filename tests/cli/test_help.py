"""The two helps of a verb, completion, and the catalog of flags that both read.

`python -m tests.cli.test_help` writes the catalog anew, after an option was changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple
from pkgutil import resolve_name

import pytest

from kvsearch.cli.command import CATALOG, MAIN_VERBS, PLAN_VERBS, describe_flags
from tests.cli.conftest import Run

ALL = {verb.options: verb for verb in (*MAIN_VERBS.values(), *PLAN_VERBS.values())}


def catalog() -> str:
    """What the file has to hold: a line for every flag."""
    entries = []
    for options in ALL:
        rows = ",\n".join(json.dumps(astuple(flag)) for flag in describe_flags(resolve_name(options)))
        entries.append(f'"{options}": [\n{rows}\n]')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def test_the_catalog_is_what_the_options_are() -> None:
    assert CATALOG.read_text() == catalog(), "write it anew: python -m tests.cli.test_help"


ORDER = "MODEL --tasks --samples --budget --budgets --output --confidence --device --dry-run".split()


@pytest.mark.parametrize("verb", ["run", "plan uniform"])
def test_the_short_help_is_the_essentials_in_the_order_of_use(run: Run, verb: str) -> None:
    _, out, _ = run(*verb.split(), "-h")
    lines = [line for line in out.partition("Options:")[2].splitlines() if line.startswith(("  -", "  MODEL"))]
    assert 8 <= len(lines) <= 14
    named = [word for word in (line.split()[0].rstrip(",") for line in lines) if word in ORDER]
    assert named == sorted(named, key=ORDER.index)
    assert f"All options: kvsearch {verb} --help-all" in out
    assert f"Usage: kvsearch {verb} MODEL [OPTIONS]" in out
    assert "--json   " in out
    _, out, _ = run(*verb.split(), "--help-all")
    assert all(f"\n{panel}:\n" in out for panel in ("Options", "The model", "General"))


def test_the_options_of_a_method_are_shown_with_it(run: Run) -> None:
    for words in (["-h"], ["--help-all"]):
        _, out, _ = run("calibrate", *words)
        assert "--rivals" not in out
        assert "Options of one method: kvsearch calibrate --method NAME -h" in out
        assert "--rivals" in run("calibrate", "--method", "lukv", *words)[1]
        assert "--rivals" not in run("calibrate", "--method=cake", *words)[1]


COMPLETED = {
    "eval": "evaluate",
    "run --lose": "--lose-at-most",
    "run ./m --policies snapkv,key": "snapkv,keydiff",
    "run bundled --tasks ruler:vt+ruler:no": "ruler:vt+ruler:no-qa",
    "run --recipe run/b": "run/bundled",
    "calibrate bundled --normalization err": "error",
    "evaluate bundled --methods lava-e": "lava-equal-heads",
    "export runs/x --to kvpress-l": "kvpress-lukv",
    "evolve bundled-r": "bundled-redundant",
}
ONE_BY_ONE = """
import os, sys
from contextlib import suppress
from kvsearch.cli import main
sys.argv = ["kvsearch"]
for typed in COMPLETED:
    os.environ |= {"COMP_WORDS": f"kvsearch {typed}", "COMP_CWORD": str(len(typed.split()))}
    print(f"> {typed}")
    with suppress(SystemExit):
        main()
assert "torch" not in sys.modules
"""


def test_the_shell_completes() -> None:
    code = f"COMPLETED = {list(COMPLETED)}{ONE_BY_ONE}"
    shell = {"_KVSEARCH_COMPLETE": "complete_bash", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=shell, capture_output=True, text=True, check=True)
    for part in done.stdout.split("> ")[1:]:
        typed, *found = part.splitlines()
        assert COMPLETED[typed] in found


if __name__ == "__main__":
    CATALOG.write_text(catalog())
