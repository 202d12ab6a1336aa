"""Install a wheel of kvsearch into a fresh environment and try it there: every verb's help, recipes, a plan, a reply.

python -m pip wheel . --no-deps -w dist
python scripts/try_wheel.py dist/kvsearch-*.whl

The packages that it needs are those of this environment, which are looked up by path; kvsearch itself is the wheel's.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

HELP = """
import sys
from typer.testing import CliRunner
import kvsearch
from kvsearch.cli import app
from kvsearch.cli.command import MAIN_VERBS
assert kvsearch.__file__.startswith(sys.argv[1]), kvsearch.__file__
for verb in MAIN_VERBS:
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0, (verb, done.output)
print(len(MAIN_VERBS), "verbs have their help")
"""


def fresh(wheel: Path, folder: Path) -> Path:
    """Make an environment with the wheel, and the packages of this one; return its Python."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # all that an installer does to a wheel of Python files alone
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


def main(wheel: Path) -> None:
    """Try the wheel; CalledProcessError if something does not work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        python = fresh(wheel, folder / "environment")

        def run(*words: str) -> None:
            subprocess.run([python, *words], cwd=folder, check=True)

        run("-c", HELP, str(folder))
        run("-m", "kvsearch", "recipes", "run/bundled")
        run("-m", "kvsearch", "plan", "uniform", "bundled", "--policy", "snapkv", "--budget", "64", "-o", "plan.json")
        run("-m", "kvsearch", "show", "plan.json")
        run("-m", "kvsearch", "generate", "bundled", "--plan", "plan.json", "--max-new-tokens", "3")
    print(f"{wheel.name} works in an environment of its own")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
