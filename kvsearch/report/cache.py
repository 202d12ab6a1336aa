"""What `show` says of a compressed cache: what was read, in which numbers, and the plan that it was read under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.report.numbers import counted
from kvsearch.report.plan import PlanView
from kvsearch.report.screen import facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsearch.runtime.cache_file import CacheHeader


@dataclass(frozen=True)
class CacheView:
    """The header of a cache file; its entries are not read, and whether they are whole is not looked at."""

    path: Path
    header: CacheHeader

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        return self.header.model_dump(mode="json")

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        header = self.header
        written = (f"{name} {getattr(header, name)}" for name in ("kvsearch", "torch", "transformers"))
        yield from facts({
            "cache of": f"{counted(header.sequences, 'sequence')} of {counted(header.length, 'token')}",
            "numbers": header.dtype, "file": f"{self.path.stat().st_size / 2**20:.2f} MiB",
            "written by": ", ".join(written),
        })  # fmt: skip
        yield from PlanView(header.plan).parts()
