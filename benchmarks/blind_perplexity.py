"""Perplexity in the pass that fills the cache beside the loss on what follows the compressed context.

    python benchmarks/blind_perplexity.py MODEL --dtype bfloat16

In the pass that fills a cache every token still attends to all before it: entries go once the layer has read them. So
the loss of a context's own tokens is that of the full cache whatever a policy evicts, and a perplexity that is taken
there says nothing. What is taken afterwards, on tokens that follow, is what `kvsearch evaluate --tasks ppl:FILE` shows.
Both are measured on the same windows: of a text, or else of the documentation of numpy as it is installed.
"""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from kvsearch import attach
from kvsearch.evaluation.compare import Evaluation, Split, prepare
from kvsearch.evaluation.methods import parse_methods
from kvsearch.evaluation.ready_methods import prepare_methods
from kvsearch.models.loading import LoadOptions, load
from kvsearch.plan import Size
from kvsearch.report.table import Cell, Table, to_markdown
from kvsearch.results.evaluation import EvaluationResult
from kvsearch.runtime import Program
from kvsearch.signals.predictions import token_losses
from kvsearch.tasks.user_files import TextTask

POLICIES = "h2o,snapkv,streaming"


def numpy_text() -> str:
    """Return the docstrings of numpy's public functions, by name."""
    functions = (getattr(np, name) for name in sorted(np.__all__))
    return "\n\n".join(filter(None, (inspect.getdoc(one) for one in functions if inspect.isroutine(one))))


def prefill_losses(evaluation: Evaluation, program: Program) -> list[float]:
    """Return the mean loss of each context's own tokens in the pass that fills its cache, in nats per token."""
    losses = []
    for prompt in evaluation.encoded[0].prompts:
        ids = prompt.context[None].to(evaluation.loaded.device)
        with torch.inference_mode(), attach(evaluation.loaded.model, program) as planned:
            logits = planned(input_ids=ids).logits[0]
        losses.append(float(token_losses(logits[:-1], ids[0, 1:]).mean()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name, a directory or a GGUF file")
    parser.add_argument("--text", type=Path, help="a text file (default: numpy's docstrings)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512, help="tokens of a context")
    parser.add_argument("--ratio", type=float, default=0.9, help="share that is evicted")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8") if args.text else numpy_text()
    task = TextTask(args.text.stem if args.text else "numpy", text, args.length)
    loaded = load(args.model, LoadOptions(dtype=args.dtype))
    methods = prepare_methods(loaded, parse_methods(POLICIES, []), [Size(ratio=args.ratio)], "prefill")
    evaluation = prepare(loaded, methods, POLICIES.partition(",")[0], Split([task], samples=args.windows, batch=1))
    result = EvaluationResult.of(evaluation.run())
    after = {"full": result.full, **{one.name: one for one in result.blocks[0].methods}}
    rows = [
        [
            method.name, Cell.number(after[method.name].held.entries, ".0f"),
            Cell.number(math.exp(fmean(prefill_losses(evaluation, method.program))), ".4f"),
            Cell.number(math.exp(after[method.name].nats["tasks"][task.name].loss.mean), ".4f"),
            Cell.nats(after[method.name].nats["tasks"][task.name].excess),
        ]
        for method in methods
    ]  # fmt: skip
    title = f"{loaded.name}, {args.windows} windows of {args.length} tokens of {task.name}, {args.ratio:.0%} evicted"
    header = ["", "entries", "perplexity as the cache fills", "of what follows", "nats per token above full"]
    print(to_markdown(Table.plain(title, header, rows)))


if __name__ == "__main__":
    main()
