"""Write a policy: a class with a score, an entry point with its name, then commands know it like the built-in ones.

    python write_policy.py

CONTRIBUTING.md has the rules of a score, and the package that `pip` installs. Here its one file of metadata is written
by hand, so that the script runs without an installation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

import kvsearch
from kvsearch.policies import Observation, Policy


@dataclass(frozen=True)
class ValueNorm(Policy):
    """Keeps the entries whose values are longest: score[i] = |v_i|_p with p = `order`."""

    name: ClassVar[str] = "value_norm"
    source: ClassVar[str] = "an example"

    order: int = 2
    sinks: int = 4  # first and last entries that are always kept, by these names
    window: int = 16

    def __post_init__(self) -> None:
        self._require(self.order in (1, 2), f"order is 1 or 2, got {self.order}")

    def score(self, observation: Observation) -> Tensor:
        """Return what stays first: norms of the values, [B, Hkv, T] fp32."""
        return observation.value_norms(self.order)


def register(folder: Path) -> None:
    """Write to a folder what `pip install` writes for a package with this entry point, and put it on the path."""
    metadata = folder / "value_norm-0.1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: value-norm\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[kvsearch.policies]\nvalue_norm = write_policy:ValueNorm\n")
    sys.path.append(str(folder))


def main() -> None:
    """Compare the policy with SnapKV at the same number of entries."""
    register(Path.cwd())
    result = kvsearch.evaluate(
        "bundled", methods=["value_norm", "snapkv"], ratios=[0.8], tasks=["synthetic:single"], length=512, samples=5
    )
    [size] = result.as_json()["blocks"]
    for method in size["methods"]:
        score = method["scores"]["averages"]["macro"]
        print(f"{method['name']:<10} {method['held']['entries']:6.0f} entries, score {100 * score['mean']:.1f}")


if __name__ == "__main__":
    main()
