"""What commands cost on a real model, in plain readings of the same contexts (P), by processor time of one thread.

    python scripts/real_models.py smollm2
    python benchmarks/bench_readings.py                       # SmolLM2, half an hour of one core
    python benchmarks/bench_readings.py --only "whole run"    # a run with all its contexts: an hour more
    python benchmarks/bench_readings.py --only lukv,evaluate
    PYTHONPATH=OTHER python benchmarks/bench_readings.py      # the same of another copy of kvsearch

A plain reading is a forward pass over a context that keeps all entries. It is timed before and after each command, and
the mean counts, so that P holds on a machine that has other work, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kvsearch
from kvsearch.commands.calibrate import OPTIONS
from kvsearch.commands.evaluate import EvaluateOptions, HeadroomOptions
from kvsearch.commands.reporter import NullReporter
from kvsearch.commands.run import RunOptions
from kvsearch.models.loading import LoadedModel, LoadOptions, load

TASKS = "ruler:niah_single_2,niah_multikey_1,niah_multivalue"
METHODS = (
    "snapkv", "h2o", "tova", "vatp", "keydiff", "knorm", "expected_attention", "uniform:cake", "criticalkv",
    "streaming", "cam", "adakv", "pyramid", "lava", "cake",
)  # fmt: skip
LENGTH = 1024  # tokens, with the longest question and its reply
READ = 870  # tokens of a context of that length
USUAL = "lukv,probe,query_bank,evaluate,headroom,run"  # all but a whole run


class Readings:
    """Plain readings, against which commands are timed."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.ids = torch.randint(100, loaded.model.config.vocab_size, (1, READ), generator=torch.manual_seed(0))

    def seconds(self) -> float:
        """Return the processor seconds of one reading, a mean of three."""
        with torch.no_grad():
            started = time.process_time()
            for _ in range(3):
                self.loaded.model(self.ids, use_cache=True, logits_to_keep=1)
            return (time.process_time() - started) / 3

    def count(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Return how many readings some work takes, and its processor seconds."""
        before = self.seconds()
        started = time.process_time()
        work()
        taken = time.process_time() - started
        return 2 * taken / (before + self.seconds()), taken


def commands(loaded: LoadedModel, directory: Path) -> Iterator[tuple[str, Callable[[], Any], int, str]]:
    """Yield the name of a measurement, what it does, and by how many of what it is divided."""
    shared: dict[str, Any] = {"model": loaded.name, "dtype": "bfloat16", "length": (LENGTH,)}

    def calibrate(method: str, tasks: str, samples: int, **more: Any) -> Callable[[], Any]:
        output = directory / f"{method}-{len(more)}-{samples}"
        options = OPTIONS[method].of(method=method, tasks=tasks, samples=samples, output=output, **shared, **more)
        return lambda: kvsearch.calibrate(options, loaded=loaded, reporter=NullReporter())

    yield "lukv, one policy", calibrate("lukv", TASKS, 2, policy="snapkv", check=False), 6, "context"
    rivals = ("keydiff", "expected_attention", "cake")
    yield "lukv, four policies", calibrate("lukv", TASKS, 2, policy="snapkv", rivals=rivals, check=False), 6, "context"
    for method in ("probe", "query_bank"):  # 3, 1 and 1 contexts to fit, to choose and to report on
        yield f"{method}, 5 contexts", calibrate(method, "ruler:niah_single_2", 5), 5, "context"
    asked = EvaluateOptions.of(
        methods=",".join(METHODS), ratios=(0.8,), tasks=TASKS, samples=2, output=directory / "evaluation", **shared
    )
    work = lambda: kvsearch.evaluate(asked, loaded=loaded, reporter=NullReporter())  # noqa: E731
    yield "evaluate, 15 methods", work, 6 * 15, "context and method"
    bound = HeadroomOptions.of(ratio=0.8, tasks=TASKS, samples=4, **shared)
    yield "headroom", lambda: kvsearch.headroom(bound, loaded=loaded, reporter=NullReporter()), 12, "context"
    quick = RunOptions.of(ratio=0.8, effort="quick", tasks=TASKS, output=directory / "run", **shared)
    yield "run --effort quick", lambda: kvsearch.run(quick, loaded=loaded, reporter=NullReporter()), 1, "run"
    whole = RunOptions.of(ratio=0.9, tasks=TASKS, output=directory / "whole", **shared)
    yield "whole run", lambda: kvsearch.run(whole, loaded=loaded, reporter=NullReporter()), 1, "run"


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default=USUAL, help="what names begin with, joined by commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(args.model, LoadOptions(dtype="bfloat16"))
    readings = Readings(loaded)
    readings.seconds()
    wanted = tuple(args.only.split(","))
    with tempfile.TemporaryDirectory() as directory:
        for name, work, parts, what in commands(loaded, Path(directory)):
            if name.startswith(wanted):
                count, seconds = readings.count(work)
                print(f"{name:<24}{seconds:8.1f} s {count:8.1f} P {count / parts:8.2f} P per {what}", flush=True)


if __name__ == "__main__":
    main()
