"""Which entries kvsearch and kvpress keep of the same prompt, pattern by pattern, and why where they differ.

    python benchmarks/compare_kvpress.py
    python benchmarks/compare_kvpress.py --length 1024 --ratios 0.5 0.75 0.9
    python benchmarks/compare_kvpress.py --model smollm2 --layers 6

kvpress needs older versions of other packages, so it runs in an environment of its own, made once (that needs the
network). Both sides load one Llama and one prompt: a small random model, or the first layers of a real one, which reads
the story that is shipped. kvpress evicts by its ratio; then our runtime evicts
with the very number of entries that kvpress kept in each head. Where the two differ, the named differences are switched
off on our side one by one: each line shows the agreement with one fewer, and the last line must keep exactly what
kvpress keeps. Exit status 1: something differs, in entries or in their number, and no named reason accounts for it.
Patterns that kvpress does not have, or has for decoding or with learnt gates only, are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
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
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.policies import Observation, Policy, QueryStatistics, create_policy
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.h2o import H2O
from kvsearch.policies.scoring import iterate_window_rows, pool_positions
from kvsearch.policies.snapkv import SnapKV
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from kvsearch.runtime.stock import CACHE
from kvsearch.tasks.ruler.needles import read_haystack

MATCHED: dict[str, Any] = {"window": 64, "kernel": 5, "pooling": "avg"}  # kvpress's settings of window attention
TIED = 1e-5  # scores this close, relative to their size, tie: the two sides round differently


@dataclass(frozen=True)
class PooledFirst(SnapKV):
    """SnapKV that pools every query head before it averages the group, as kvpress does."""

    def score(self, observation: Observation) -> Tensor:
        keys = observation.keys
        attention = keys.new_zeros(len(keys), keys.shape[1] * observation.group, keys.shape[2], dtype=torch.float32)
        for part, probability in iterate_window_rows(observation, self.window):  # some kv heads at a time
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
    model(input_ids=prompt, logits_to_keep=1, **{CACHE: cache})
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


def random_model(length: int, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A model with sharp attention, unequal values and a query mean that is not zero; a prompt and a text [1, T]."""
    torch.manual_seed(seed)
    kv_heads, head_dim = 4, 32
    config = LlamaConfig(
        vocab_size=2 * length, hidden_size=8 * head_dim, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=2 * length + 1024, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.normal_().add_(0.7 * torch.randn(config.hidden_size))
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.normal_(std=0.09)
        layer.self_attn.v_proj.weight.normal_(std=0.06).mul_(torch.randn(kv_heads * head_dim, 1).exp())
    # no token comes twice: the keys of two would have the same norm, and ties are broken by chance
    return model, {name: torch.randperm(config.vocab_size)[None, :length].clone() for name in ("prompt", "text")}


def first_layers(loaded: LoadedModel, layers: int, length: int) -> tuple[Any, dict[str, Tensor]]:
    """The first layers of a Llama in float32, with the beginning of a story as prompt and the rest as text [1, T]."""
    config = deepcopy(loaded.model.config)
    config.num_hidden_layers = layers
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: loaded.model.state_dict()[name] for name in model.state_dict()})
    story = loaded.tokenizer(read_haystack(None), return_tensors="pt")["input_ids"]
    return model, {"prompt": story[:, :length].clone(), "text": story[:, length : 2 * length].clone()}


def compare_all(console: Console, python: Path, model: Any, tokens: dict[str, Tensor], ratios: Sequence[float]) -> bool:
    """Print the versions of both sides and the table of every ratio; whether everything in them is explained."""
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        model.save_pretrained(folder / "model")
        save_file(tokens, folder / "tokens.safetensors")
        side.run_in(python, folder, *ratios)
        model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation=NAME).eval()
        with safe_open(folder / "kvpress.safetensors", "pt") as file:
            both = (file.metadata(), side.package_versions("kvsearch"))
        for versions in both:
            console.print(", ".join(f"{name} {number}" for name, number in sorted(versions.items())))
        explained = [compare(console, model, tokens["prompt"], folder, ratio) for ratio in ratios]
    console.print("Every difference is explained." if all(explained) else f"{side.UNEXPLAINED}: see the tables")
    return all(explained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Llama in place of the random one, as kvsearch takes it")
    parser.add_argument("--layers", type=int, default=6, help="of --model, from the first")
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt (more than 64)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8], help="shares of the prompt to evict")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and their prompt")
    parser.add_argument("--environment", type=Path, default=KVPRESS, help="where kvpress is installed")
    parser.add_argument("--torch-index", help="package index with CPU builds of torch, for the installation")
    args = parser.parse_args()
    if args.length <= 64 or not all(0 < ratio < 1 - (side.SINKS + 1) / args.length for ratio in args.ratios):
        parser.error("the prompt must be longer than 64 tokens, and ratios above 0 and leave more than the sinks")
    python = ensure_environment(args.environment, TOOLS[KVPRESS], args.torch_index)
    disable_progress_bar()
    torch.set_grad_enabled(False)
    if args.model is None:
        model, tokens = random_model(args.length, args.seed)
    else:
        model, tokens = first_layers(load(args.model, LoadOptions(dtype="float32")), args.layers, args.length)
    console = Console(width=None if sys.stdout.isatty() else 140)
    raise SystemExit(not compare_all(console, python, model, tokens, args.ratios))


if __name__ == "__main__":
    main()
