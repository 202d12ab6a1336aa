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
from itertools import chain

import numpy as np

from kvsearch.calibration.data import find_default_data, load_calibration_data
from kvsearch.calibration.polykv.layer_sweep import make_batches
from kvsearch.calibration.polykv.measure import PolykvCalibration
from kvsearch.calibration.polykv.options import PolykvOptions, make_candidates
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadOptions, load
from kvsearch.runtime.attention import run_attention
from tests.calibration.polykv.naive import measure_naively

SIGNALS = ("cosine", "relative_error", "nll")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="questions, each after a context of 1,024 tokens")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    loaded = load("bundled", LoadOptions())
    data = load_calibration_data(find_default_data("bundled")).limit_questions(args.samples)
    options = PolykvOptions(budgets=(args.budget,), batch=args.batch)
    policies, _ = make_candidates(("paper",), {}, options.measured_phases, options.budgets)

    calibration = PolykvCalibration(loaded, data, policies, options)
    prompts = calibration.prepare()
    calibration.measure(prompts[:1])  # the first pass of a process is slow
    started = time.process_time()
    swept = calibration.measure(prompts).arrays
    fast = time.process_time() - started
    started = time.process_time()
    found = []
    with run_attention(loaded.model):
        for batch in make_batches(prompts, args.batch, loaded.device):
            samples = sorted(chain.from_iterable(batch.split_passes(args.batch)))
            after = batch.continuations(samples, loaded.device)
            padded = batch.repeat_prompts(samples).padded(loaded.device)
            results = measure_naively(loaded.model, calibration.ablations, *padded, after).arrays(options.signals)
            found += [
                ((batch.places[row], number), {name: results[name][at] for name in SIGNALS})
                for at, (row, number) in enumerate(samples)
            ]
    slow = time.process_time() - started
    naive = [arrays for _, arrays in sorted(found, key=lambda item: item[0])]
    layers = len(describe(loaded.model).full_layers)
    print(
        f"{args.samples} samples, {len(policies)} patterns, {len(options.measured_phases)} phases, {layers} layers, "
        f"budget {args.budget}: {fast:.1f} s in one pass, {slow:.1f} s naive: {slow / fast:.1f}x"
    )
    for name in SIGNALS:
        apart = np.abs(swept[name] - np.stack([arrays[name] for arrays in naive])).max()
        print(f"largest difference of {name}: {apart:.1e}")


if __name__ == "__main__":
    main()
