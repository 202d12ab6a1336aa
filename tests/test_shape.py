"""scripts/shape.py counts a package small enough to count by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "shape.py"

HELPERS = '''"""Hold a module docstring

of three lines."""
# a comment

import functools
from typing import (
    TYPE_CHECKING,
)

if TYPE_CHECKING:
    from pkg.deep.inner import Twice

TEXT = """first

# no comment"""


@functools.cache
def _once(value: int) -> int:
    """Count a decorator as code, but not into the length."""
    return value


def _often() -> int:
    return _once(1)


def _handed_on() -> None: "a docstring beside code"


def _recursive(depth: int) -> int:
    return _recursive(depth - 1) if depth else _often() + _often()


class Twice:
    def run(self) -> object:
        self._property = self._data = [_handed_on, _recursive(2), self._once]
        return self._own(), self._property, self._data, self._inherited(), self.__dunder()

    def _own(self) -> None:
        a = 1
        b = 2
        c = 3
        d = 4
        e = 5
        print(a, b, c, d, e)

    @property
    def _property(self) -> int:
        return 1

    def _unused(self) -> None: ...

    def __dunder(self) -> None: ...


class Other:
    def run(self) -> None:
        self._own()
        self._own()

    def _own(self) -> None: ...


class _Private: ...
'''

INNER = '''from ..helpers import Other
from . import sibling


class _Private: ...


class Twice:
    def _inherited(self) -> None:
        """Hold a docstring only."""

    def _data(self) -> None:
        """Share its name with data elsewhere."""
'''

SIBLING = """def late() -> None:
    import pkg.deep.inner
    from pkg.deep import inner, nothing

    async def inside() -> None: ...


def _handed_on() -> None: ...
"""

ROUND = """import pkg.turn
import pkg.round
"""

TURN = """from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pkg.deep.inner
else:
    from pkg import third, helpers
"""

THIRD = "import pkg.round\n"

FILES = {
    "__init__.py": "",
    "helpers.py": HELPERS,
    "round.py": ROUND,
    "third.py": THIRD,
    "turn.py": TURN,
    "deep/__init__.py": '"""Import one name."""\n\nfrom .sibling import late\n',
    "deep/inner.py": INNER,
    "deep/sibling.py": SIBLING,
    ".hidden/skipped.py": "import pkg.turn\n",
    "notes.txt": "no code\n",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shape") / "pkg"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def report(package: Path) -> dict[str, Any]:
    return figures(package)


def figures(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(SCRIPT, root, "--json").stdout)
    return found


def run(script: Path, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, *arguments], check=False, capture_output=True, text=True)


def test_helpers_called_from_one_place(report: dict[str, Any]) -> None:
    # not _often (two calls), _recursive (calls itself too), _unused, __dunder, Other._own (two calls), nor _data,
    # whose name is only read, in a file without such a method, nor the second _handed_on; `self._once` is no function
    assert report["each private helper called from one place: lines"] == {
        "helpers.py:20 _once": [3],
        "helpers.py:29 _handed_on": [1],
        "helpers.py:41 _own": [7],
        "helpers.py:50 _property": [2],
        "deep/inner.py:9 _inherited": [2],
    }
    lengths = report["length: number, lines, median, p90"]
    assert lengths["private helpers called from one place"] == [5, 15, 2, 7]
    assert lengths["  of these with 6 lines or fewer"] == [4, 8, 2, 3]


def test_import_circles(report: dict[str, Any]) -> None:
    assert report["import circles, all imports"] == {
        "deep/__init__.py": ["deep/inner.py", "deep/sibling.py"],
        "round.py": ["third.py", "turn.py"],
    }
    assert report["import circles, module-level imports"] == {"round.py": ["third.py", "turn.py"]}


GATED = """from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Pair(NamedTuple):
    left: int


class Plain:
    def say(self, some: bool) -> list[int]:
        \"\"\"See `Pair`.\"\"\"
        a, b = 1, 2
        c, d = self.say(some)
        return [a] * some + [b] * (c > d) + [c] * bool(d) + [d] * 2

    def refuse(self) -> None:
        import json

        raise UsageError(json)
"""


def test_figures_with_limits(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "jobs").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/jobs/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "pkg" / "jobs" / "one.py").write_text(GATED)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("pass\n" * 11)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "pkg"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1  # a list repeated by a condition is one too many
    figures = [int(line[52:60].replace(",", "")) for line in done.stdout.splitlines()]
    assert figures == [13, 3, 1, 0, 0, 0, 1, 1, 2, 1, 1, 0, 11]


@pytest.mark.slow
def test_the_package_keeps_its_limits() -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True, stdout=subprocess.DEVNULL)
