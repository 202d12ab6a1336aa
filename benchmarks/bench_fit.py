"""What it costs to fit a ranking for Llama-3.1-8B, by arithmetic: no weights are needed, and none are read.

    python benchmarks/bench_fit.py                     # 2,000 contexts of 1,000 to 16,000 tokens
    python benchmarks/bench_fit.py --tflops 400 --questions 0

The same is said of any model, and of texts of your own, by `kvsearch calibrate MODEL --method probe --data TEXTS
--dry-run`, which needs the configuration and the tokenizer of the model alone.
"""

from __future__ import annotations

import argparse

import torch
from fitted_policies import LLAMA_8B

from kvsearch.calibration.options import ProbeOptions, QueryBankOptions, RankingOptions
from kvsearch.calibration.probe.cost import cost_of_fit
from kvsearch.calibration.probe.reading import Asking, some_prompts
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation

QUESTION, ANSWER, REPEAT, CHUNK = 64, 32, 12, 256  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=2000)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1000, 16000), metavar=("FROM", "TO"))
    parser.add_argument("--questions", type=int, default=2, help="of every context, of two kinds in turn")
    parser.add_argument("--tflops", type=float, default=100.0)
    args = parser.parse_args()
    nothing, (first, last) = torch.zeros(1, 1, dtype=torch.long), args.lengths
    after = tuple(
        Continuation(nothing.expand(1, QUESTION + ANSWER), QUESTION, ANSWER, kind=f"kind {number % 2}")
        for number in range(args.questions)
    )
    lengths = [first + (last - first) * number // max(1, args.contexts - 1) for number in range(args.contexts)]
    prompts = [CalibrationPrompt(nothing.expand(1, length), number, after) for number, length in enumerate(lengths)]
    targets = (*(["answers"] if after else []), "reconstruction")
    options: tuple[RankingOptions, ...] = (ProbeOptions(), QueryBankOptions())
    for one in options:
        asking = Asking(targets, nothing.expand(1, REPEAT), CHUNK)
        cost = cost_of_fit(LLAMA_8B, some_prompts(prompts, one), asking, one, args.tflops)
        words = f"{cost.reading.flops / 1e15:.0f} PFLOP, {cost.reading.seconds / 3600:.2f} h at {args.tflops:g} TFLOP/s"
        print(f"{one.method}:", *cost.lines(words), sep="\n  ")


if __name__ == "__main__":
    main()
