"""Which entries kvsearch and kvpress keep of the same prompt, pattern by pattern, and why where they differ.

    python benchmarks/compare_kvpress.py
    python benchmarks/compare_kvpress.py --length 1024 --ratios 0.5 0.75 0.9

kvpress needs older versions of other packages, so it runs in an environment of its own, made once (that needs the
network). Both sides load one small random Llama and one prompt. kvpress evicts by its ratio; then our runtime evicts
with the very number of entries that kvpress kept in each head. Where the two differ, the named differences are switched
off on our side one by one: each line shows the agreement with one fewer, and the last line must keep exactly what
kvpress keeps. Exit status 1: something differs, in entries or in their number, and no named reason accounts for it.
Patterns that kvpress does not have, or has for decoding or with learnt gates only, are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import kvpress_side as side
import torch
from environments import KVPRESS, TOOLS, ensure_environment
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from kvsearch.policies import Observation, Policy, QueryStatistics, create_policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.h2o import H2O
from kvsearch.policies.scoring import pool_positions, window_rows
from kvsearch.policies.snapkv import SnapKV
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram

MATCHED: dict[str, Any] = {"window": 64, "kernel": 5, "pooling": "avg"}  # kvpress's settings of window attention
TIED = 1e-5  # scores this close, relative to their size, tie: the two sides round differently


@dataclass(frozen=True)
class PooledFirst(SnapKV):
    """SnapKV that pools every query head before it averages the group, as kvpress does."""

    def score(self, observation: Observation) -> Tensor:
        keys = observation.keys
        attention = keys.new_zeros(len(keys), keys.shape[1] * observation.group, keys.shape[2], dtype=torch.float32)
        for part, probability in window_rows(observation, self.window):  # some kv heads at a time
            sums = probability.sum(-2) / self.window
            attention.view(len(keys), keys.shape[1], observation.group, -1)[part][..., : sums.shape[-1]] += sums
        pooled = pool_positions(attention, self.kernel, self.pooling, observation.candidates(0, self.window))
        return pooled.view(len(pooled), -1, observation.group, pooled.shape[-1]).mean(2)


@dataclass(frozen=True)
class MeanReceived(H2O):
    """H2O's sums divided by the number of queries that see an entry; no recent entry is set apart."""

    recent_share: float = 0.0

    @property
    def recent_count(self) -> int:
        return 0

    def score(self, observation: Observation) -> Tensor:
        return super().score(observation) / (observation.seen[:, None] - observation.index)[:, None]


@dataclass(frozen=True)
class CorpusAttention(ExpectedAttention):
    """ExpectedAttention with query statistics of another text, from a file."""

    file: str = ""

    def score(self, observation: Observation) -> Tensor:
        mean, covariance = (load_file(self.file)[name][observation.layer] for name in ("query_mean", "query_cov"))
        corpus = QueryStatistics(mean[None], covariance[None])
        return super().score(replace(observation, statistics={self.sinks: corpus}))


def pairs(statistics: Path) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """All comparisons: a press, our side in words, and policies with what sets them apart in between."""
    windowed = [("SnapKV", "snapkv", 64), ("PyramidKV", "pyramidkv", 64), ("PyramidKV, w=8, beta=4", "pyramidkv", 8)]
    for press, name, window in [*windowed, ("AdaKV(SnapKV)", "snapkv", 64), ("CriticalKV(SnapKV)", "criticalkv", 64)]:
        theirs, ours = create_policy(name, MATCHED | {"window": window}), create_policy(name)
        yield press, f"{name}, window {window}, mean of 5", (theirs,)
        chain = (create_policy(name, {"window": window}), "maximum of 7 positions, not mean of 5", theirs)
        windows = () if chain[0] == ours else (ours, f"window of {ours.recent_count}, not {window}")
        yield press, f"{name}, defaults", windows + chain
    one_stage = "no second half by norms behind the output projection"
    yield press, "snapkv, window 64, mean of 5", (create_policy("snapkv", MATCHED), one_stage, theirs)
    yield "SnapKV", "the same, pooled before the group's mean", (PooledFirst(**MATCHED),)
    base = create_policy("criticalkv", {"base": "expected_attention", "window": 0, "sinks": 4})
    yield "CriticalKV(ExpectedAttention)", "criticalkv, expected_attention, window 0, sinks 4", (base,)
    last = create_policy("tova", {"protect_last": True})
    yield "TOVA", "tova, protect_last", (last,)
    yield "TOVA", "tova, defaults", (create_policy("tova"), "the last token may go, too", last)
    h2o, recent = H2O(), "half of the budget is for the most recent entries"
    sums = "sums, not means over the queries that see an entry"
    yield side.EAGER, "h2o, defaults", (h2o, recent, replace(h2o, recent_share=0.0), sums, MeanReceived())
    same = {"StreamingLLM": "streaming", "Knorm": "knorm", side.TENS: "knorm", "KeyDiff": "keydiff"}
    for press, name in same.items():
        yield press, f"{name}, defaults", (create_policy(name),)
    for option in ({}, {"epsilon": 0.01}, {"covariance": False}, {"value_norm": False}):
        words = "".join(f", {name}={value}" for name, value in option.items())
        policy = create_policy("expected_attention", option)
        yield f"ExpectedAttention{words}", f"expected_attention{words or ', defaults'}", (policy,)
    expected, corpus = create_policy("expected_attention"), "query statistics of the prompt, not of a corpus"
    chain = (expected, corpus, CorpusAttention(file=str(statistics / "model.safetensors")))
    yield "ExpectedAttentionStats", "expected_attention, defaults", chain


def kept_by(model: Any, prompt: Tensor, policy: Policy, budgets: Tensor) -> Tensor:
    """What a policy keeps under `budgets` [L, Hkv] in the real runtime, bool [L, Hkv, T]."""
    layers, heads = map(range, budgets.shape)
    program = Program(prefill=PhaseProgram(dict.fromkeys(layers, policy), lambda _: budgets.numpy()))
    cache = PlanCache(model, program)
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    kept = torch.zeros(*budgets.shape, prompt.shape[1], dtype=torch.bool)
    for layer, head in product(layers, heads):
        kept[layer, head, cache.kept_positions(layer, 0, head)] = True
    return kept


def equality(theirs: Tensor, ours: Tensor, scores: Tensor, window: int) -> str:
    """What sets two rankings apart that should be equal."""
    differ, before = theirs ^ ours, ours.shape[-1] - window
    if not differ.any():
        return "[green]exact"
    if not differ[..., :before].any() and (theirs.sum(-1)[differ.any(-1)] < window).all():
        return "window beyond the budget: kvpress keeps any part of it, kvsearch the newest"
    cut = scores.masked_fill(~theirs, torch.inf).amin(-1, keepdim=True)
    if (differ & ((scores - cut).abs() > TIED * cut.abs())).any():
        return side.UNEXPLAINED
    return f"{int(differ.sum()) // 2} ties: what differs scores as the last entry that kvpress keeps"


def compare(console: Console, model: Any, prompt: Tensor, folder: Path, ratio: float) -> bool:
    """Print the table of one ratio; whether everything in it is explained."""
    table = Table("kvpress and kvsearch", "kept", "agree", "least", "what differs", title=f"ratio {ratio}")
    found, reasons, shown = load_file(folder / "kvpress.safetensors"), [], ""
    for press, label, chain in sorted(pairs(folder / "statistics"), key=itemgetter(0)):
        theirs, scores = (found[f"{what}/{press}/{ratio}"] for what in ("kept", "scores"))
        budgets = theirs.sum(-1)
        if press != shown:
            shown, count = press, side.count_reason(press, theirs, ratio)
            table.add_section()
            table.add_row(f"[bold]{press}", f"{budgets.double().mean():g}", "", "", count)
            reasons.append(count)
        for policy, reason in zip_longest(chain[::2], chain[1::2]):
            ours = kept_by(model, prompt[:, : theirs.shape[-1]], policy, budgets)
            share, held = (theirs & ours).sum(-1) / budgets, ours.sum(-1)
            known = reason or equality(theirs, ours, scores, policy.recent_count)
            reasons.append(known if torch.equal(held, budgets) else side.UNEXPLAINED)
            numbers = (f"{held.double().mean():g}", f"{share.mean():.1%}", f"{share.min():.1%}")
            table.add_row(f"  {label}", *numbers, reasons[-1])
            label = "  without that"
    console.print(table)
    return side.UNEXPLAINED not in reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt (more than 64)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8], help="shares of the prompt to evict")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the prompt")
    parser.add_argument("--environment", type=Path, default=KVPRESS, help="where kvpress is installed")
    parser.add_argument("--torch-index", help="package index with CPU builds of torch, for the installation")
    args = parser.parse_args()
    if args.length <= 64 or not all(0 < ratio < 1 - (side.SINKS + 1) / args.length for ratio in args.ratios):
        parser.error("the prompt must be longer than 64 tokens, and ratios above 0 and leave more than the sinks")
    python = ensure_environment(args.environment, TOOLS[KVPRESS], args.torch_index)
    disable_progress_bar()
    torch.set_grad_enabled(False)
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as name:
        side.run_in(python, folder := Path(name), args.length, args.seed, *args.ratios)
        model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation=NAME).eval()
        prompt = load_file(folder / "tokens.safetensors")["prompt"]
        with safe_open(folder / "kvpress.safetensors", "pt") as file:
            both = (file.metadata(), side.package_versions("kvsearch"))
        for versions in both:
            console.print(", ".join(f"{name} {number}" for name, number in sorted(versions.items())))
        explained = True
        for ratio in args.ratios:
            explained = compare(console, model, prompt, folder, ratio) and explained
    console.print("Every difference is explained." if explained else f"{side.UNEXPLAINED}: see the tables")
    raise SystemExit(not explained)


if __name__ == "__main__":
    main()
