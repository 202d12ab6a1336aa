"""What a kind of file is, and what every file that is taken is put through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from kvsearch.cli.console import Screen
from kvsearch.core.errors import KvsearchError
from kvsearch.jobs import report as report_job
from kvsearch.plan import saved as weights
from kvsearch.policies import fitted, kvzap, probe, query_bank
from kvsearch.report.artifacts import open_path
from kvsearch.report.integrity import Verification
from kvsearch.report.page import group_by_model, render
from tests.robustness.forms import Form

Bases = Callable[[], Sequence[bytes]]


@dataclass(frozen=True)
class Kind:
    """A kind of file, in a folder under its `file` name; `beside` are the files that lie there with it."""

    name: str
    file: str
    bases: Bases
    form: Form
    check: Callable[[Path], None]
    beside: Callable[[], dict[str, bytes]] = dict

    def furnish(self, folder: Path) -> None:
        """Write what lies beside the file."""
        for name, data in self.beside().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    def forget(self) -> None:
        """Forget the weights that this process has read: one file does not help another."""
        weights._known.clear()
        fitted.load_fitted_profile.cache_clear()
        for read in (probe._weights, query_bank._bank, kvzap._layers):
            read.__wrapped__.cache_clear()


@contextmanager
def taken(what: str) -> Iterator[None]:
    """Whatever is refused here was taken before, which is a failure."""
    try:
        yield
    except KvsearchError as error:
        raise AssertionError(f"{what} refuses what was taken: {error}") from error


def same(one: Any, other: Any, what: str) -> None:
    """Raise AssertionError unless two things are equal."""
    if one != other:
        raise AssertionError(f"{what}: {str(one)[:200]} became {str(other)[:200]}")


def show(path: Path, **options: Any) -> None:
    """Do what `kvsearch show` does, as a table and as JSON, and what `verify` and `report` do; raises as `show`."""
    with suppress(KvsearchError):  # as of what is none of our files
        verify(path)
    view = report_job.show(report_job.ShowOptions(path=path, **options))
    screen = Screen(file=StringIO(), width=100)
    screen.print_parts(view.parts())
    json.dumps(view.as_json(), sort_keys=True, allow_nan=False).encode()
    _page(path)


def verify(path: Path) -> None:
    """Do what `kvsearch verify` does; what is damaged is told, not raised."""
    found = Verification([path])
    json.dumps(found.as_json(), allow_nan=False).encode()
    assert list(found.parts())


def _page(path: Path) -> None:
    """Do what `kvsearch report` does but for writing the page."""
    groups = group_by_model([open_path(path)])
    with taken("the page"):
        render(groups)
