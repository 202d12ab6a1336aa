"""What each part of DefensiveKV is worth: the table of its parts on the bundled models, at 20, 10 and 5% kept.

    python benchmarks/defensivekv_parts.py --output runs/parts     # some minutes on two cores

Scores with the paired difference to SnapKV, question-agnostic, all under the same 320 questions of each model. All keep
their last 8 entries, of contexts whose twentieth has little room for more. What is taken first (`mass`) decides nearly
all where attention is spread, so the other parts are switched without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import kvsearch

MODELS = ("bundled", "bundled-redundant")
METHODS = (
    "snapkv",
    "uniform:defensivekv:mass=0:aggregate=mean:floor=none",
    "uniform:defensivekv:mass=0:floor=none",
    "uniform:defensivekv:mass=0:aggregate=mean",
    "uniform:defensivekv:mass=0",
    "uniform:defensivekv",
    "defensivekv:mass=0",
    "defensivekv",
    "layer-defensivekv:mass=0",
    "layer-defensivekv",
)


def main() -> None:
    """Evaluate the methods on each model, and write a table beside its run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of a run and a table for each model")
    parser.add_argument("--samples", type=int, default=20, help="contexts of each task")
    options = parser.parse_args()
    for model in MODELS:
        table = options.output / f"{model}.md"
        kvsearch.evaluate(
            model,
            methods=METHODS,
            ratios=(0.8, 0.9, 0.95),
            settings=("protect=8",),
            samples=options.samples,
            output=options.output / model,
            table=table,
        )
        print(table.read_text())


if __name__ == "__main__":
    main()
