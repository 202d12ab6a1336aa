"""Every kind of file that kvsearch reads: valid ones to begin with, their format, and what reads them.

`check` does what the commands do that take such a file. It lets the `KvsearchError` through by which one is refused; of
one that is taken it makes sure that it is valid: written and read again it is the same, it can be shown, and what
follows from it at once can be computed.
"""

from __future__ import annotations

from tests.robustness.kinds import data, directories, models, plans, results, runs
from tests.robustness.kinds.kind import Kind

__all__ = ["KINDS", "Kind"]

KINDS: dict[str, Kind] = {
    kind.name: kind for module in (plans, runs, directories, results, data, models) for kind in module.kinds()
}
