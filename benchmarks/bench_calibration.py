"""What PolyKV's signals cost: one pass and a sweep against one run of the model for everything that is tried.

    python benchmarks/bench_calibration.py                  # bundled model, 9 patterns, 2 phases, 16 samples
    python benchmarks/bench_calibration.py --samples 4

Both measure the same: the largest difference between them is printed beside the ratio of their seconds of the
processor, which is that of one run of this script and hardly depends on what else the machine does. The naive procedure
reads every prompt anew for each layer, phase and pattern, as papers do, but in batches and with the answers
teacher-forced in one pass.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from kvsearch.calibration.data import default_data, load_calibration_data
from kvsearch.calibration.polykv.measure import PolykvCalibration
from kvsearch.calibration.polykv.options import PolykvOptions, candidates
from kvsearch.calibration.steps import StepCache
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadOptions, load
from kvsearch.plan import Profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="questions, each after a context of 1,024 tokens")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    loaded = load("bundled", LoadOptions())
    data = load_calibration_data(default_data("bundled")).limited(args.samples)
    options = PolykvOptions(budgets=(args.budget,), batch=args.batch)
    policies, _ = candidates(("paper",), {}, options.measured_phases, options.budgets)

    def timed(naive: bool, questions: int = args.samples) -> tuple[Profile, float]:
        started = time.process_time()
        chosen = options.model_copy(update={"naive": naive})
        some = data.limited(questions)
        calibration = PolykvCalibration(loaded, some, policies, chosen, steps=StepCache())
        profile = calibration.measure(calibration.prepare())
        return profile, time.process_time() - started

    timed(naive=False, questions=1)  # the first pass of a process is slow
    swept, fast = timed(naive=False)
    naive, slow = timed(naive=True)
    layers = len(describe(loaded.model).full_layers)
    print(
        f"{args.samples} samples, {len(policies)} patterns, {len(options.measured_phases)} phases, {layers} layers, "
        f"budget {args.budget}: {fast:.1f} s in one pass, {slow:.1f} s naive: {slow / fast:.1f}x"
    )
    for name in ("cosine", "relative_error", "nll"):
        print(f"largest difference of {name}: {np.abs(swept.arrays[name] - naive.arrays[name]).max():.1e}")


if __name__ == "__main__":
    main()
