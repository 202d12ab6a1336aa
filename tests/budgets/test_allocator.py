from __future__ import annotations

import subprocess
import sys

STATIC = ("loss_curves", "lukv", "polykv", "pyramidkv", "uniform")


def test_importing_the_static_allocators_is_cheap() -> None:
    modules = ", ".join(f"kvsearch.budgets.{name}" for name in STATIC)
    code = f"import sys, {modules}; sys.exit(any(m in sys.modules for m in ('torch', 'sklearn', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
