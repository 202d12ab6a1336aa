from __future__ import annotations

import subprocess
import sys

import pytest

from kvsearch.budgets import dynamic
from kvsearch.budgets.allocator import BUILT_IN, allocator_names, create_allocator
from kvsearch.errors import UsageError


def test_every_name_builds_its_allocator() -> None:
    for name in allocator_names():
        assert create_allocator(name).name == name


def test_options_reach_the_allocator() -> None:
    assert create_allocator("marginal", {"split": "partial_block"}) != create_allocator("marginal")


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="unknown allocator 'margnal'; did you mean 'marginal'"):
        create_allocator("margnal")
    with pytest.raises(UsageError, match=r"unknown allocator 'zzz' \(known: .*uniform\)"):
        create_allocator("zzz")
    with pytest.raises(UsageError, match=r"allocator uniform: .*'slpit'"):
        create_allocator("uniform", {"slpit": 1})
    with pytest.raises(UsageError, match="unknown split rule 'bset'"):
        create_allocator("marginal", {"split": "bset"})


def test_importing_the_static_allocators_is_cheap() -> None:
    static = {name: target for name, target in BUILT_IN.items() if name not in dynamic.BUILT_IN}
    modules = ", ".join(sorted(target.partition(":")[0] for target in static.values()))
    code = f"import sys, {modules}; sys.exit(any(m in sys.modules for m in ('torch', 'sklearn', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
