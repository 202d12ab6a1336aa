"""What a job says while it runs: remarks, doubts and how far it is. The command line has a console for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from kvsearch.errors import KvsearchWarning
from kvsearch.progress import Progress


class Talk(Protocol):
    """Hears of what a job does; it decides nothing."""

    def say(self, text: str) -> None:
        """Tell something that is not a result."""
        ...

    def warn(self, text: str) -> None:
        """Tell of something doubtful, on one line."""
        ...

    def progress(self, what: str) -> AbstractContextManager[Progress]:
        """Show how far something is, in units of `what`."""
        ...

    def live(self, title: str) -> AbstractContextManager[Callable[[Sequence[str]], None]]:
        """Show facts that change, the first of which says where they are from."""
        ...

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Be told that a model is loaded, by libraries that print."""
        ...


class Silent:
    """Says nothing; doubts become a `KvsearchWarning`. For callers of the Python API."""

    def say(self, text: str) -> None:
        """See `Talk.say`."""

    def warn(self, text: str) -> None:
        """See `Talk.warn`."""
        warnings.warn(text, KvsearchWarning, stacklevel=4)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:  # noqa: ARG002 - as `Talk` has it
        """See `Talk.progress`."""
        yield lambda *_: None

    @contextmanager
    def live(self, title: str) -> Iterator[Callable[[Sequence[str]], None]]:  # noqa: ARG002 - as `Talk` has it
        """See `Talk.live`."""
        yield lambda _: None

    def loading(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002 - as `Talk` has it
        """See `Talk.loading`."""
        return nullcontext()
