"""Where the files shipped with kvsearch are: inside an installed wheel, or at the root of a source checkout."""

from __future__ import annotations

from pathlib import Path

from kvsearch.errors import EnvironmentFault

_PACKAGE = Path(__file__).resolve().parent


def resource(relative: str) -> Path:
    """Return the path of a shipped file or folder, such as "data/bundled"; EnvironmentFault if it is missing."""
    for root in (_PACKAGE / "_resources", _PACKAGE.parent):
        path = root / relative
        if path.exists():
            return path
    raise EnvironmentFault(f"{relative} is missing from this installation of kvsearch: reinstall it")
