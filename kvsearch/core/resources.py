"""What is installed: where files shipped with kvsearch are (in a wheel, or a source checkout), versions of packages."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Self

from kvsearch.core.errors import EnvironmentFault

_PACKAGE = Path(__file__).resolve().parent.parent


def find_resource(relative: str) -> Path:
    """Return the path of a shipped file or folder, such as "data/bundled"; EnvironmentFault if it is missing."""
    for root in (_PACKAGE / "_resources", _PACKAGE.parent):
        path = root / relative
        if path.exists():
            return path
    raise EnvironmentFault(f"{relative} is missing from this installation of kvsearch: reinstall it")


@cache  # a search makes many plans, which all name the versions
def read_version(package: str) -> str:
    """Return the version of an installed package; PackageNotFoundError if it is not installed."""
    return metadata.version(package)


def read_package_version() -> str:
    """Return the version of kvsearch, with the commit that it was installed from where that is known."""
    source = json.loads(metadata.distribution("kvsearch").read_text("direct_url.json") or "{}")
    commit = source.get("vcs_info", {}).get("commit_id")
    return f"kvsearch {read_version('kvsearch')}" + (f", commit {commit}" if commit else "")


class Closing(ABC):
    """A resource that a with statement closes, however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; to do so again changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
