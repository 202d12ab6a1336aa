"""Plan files that jobs are given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsearch.plan import Plan


def checked_plan(path: Path) -> Plan:
    """Read a plan file and check its policies; what is wrong with the file is told before torch is loaded.

    Raises:
        UsageError: the file, a policy or a budget of it cannot be used.
    """
    from kvsearch.plan import load_plan

    plan = load_plan(path)
    from kvsearch.runtime.plan_checks import check_plan

    check_plan(plan, str(path))
    return plan
