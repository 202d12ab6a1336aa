"""Decoding speed on a cache of 8,192 tokens: transformers' DynamicCache against full, ragged and uniform budgets.

    python benchmarks/bench_decode.py --batch 4
    python benchmarks/bench_decode.py --device cuda --dtype bfloat16 --length 32768

The model is a random Llama, the prompt's keys and values are random too and go straight into the caches, so that no
prefill is run: only decode steps are timed. The caches take turns within every round and forget the round's tokens
after it, so that each round sees the same lengths. The table shows medians over the rounds; the speed is the median of
the ratios within a round, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from operator import truediv
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvsearch.benchmark.speed import make_skewed_budgets, time_decode
from kvsearch.policies import keep_mask
from kvsearch.policies.full import FullKV
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.store.storage import RaggedStore

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 8, 4, 64
Budgets = Callable[[int], list[int]]


def build(length: int, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=QUERY_HEADS * HEAD_DIM, intermediate_size=1376, num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=2 * length, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device, dtype)


def draw_prompt(batch: int, length: int, device: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [B, Hkv, T, D] of every layer."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, batch, KV_HEADS, length, HEAD_DIM)
    drawn = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(LAYERS))
    return [(keys, values) for keys, values in drawn]


def stock_cache(model: Any, prompt: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(prompt):
        cache.update(keys, values, index)
    return cache


def planned_cache(model: Any, prompt: list[tuple[torch.Tensor, torch.Tensor]], budgets: Budgets) -> PlanCache:
    """A cache as eviction to `budgets(layer)` leaves it; which entries stay is random."""
    cache = PlanCache(model, Program.uniform(model, FullKV(), lambda length: length))
    generator = torch.Generator().manual_seed(2)
    for index, layer in cache.planned.items():
        keys, values = prompt[index]
        batch, heads, length, _ = keys.shape
        ranks = torch.rand(batch, heads, length, generator=generator).argsort(-1).to(keys.device)
        valid = torch.ones(batch, length, dtype=torch.bool, device=keys.device)
        keep = keep_mask(ranks, torch.tensor(budgets(index)).expand(batch, -1), valid)
        layer.lazy_initialization(keys, values)
        layer.seen = length
        places = torch.arange(length, device=keys.device).expand(batch, -1)
        layer.holder = RaggedStore.pack(keys, values, keep, places, keep.sum(-1).cpu().numpy(), [length] * batch)
    return cache


def kept(cache: Any) -> float:
    """Entries per layer and kv head."""
    if isinstance(cache, PlanCache):
        return float(cache.entries().double().mean())
    return float(cache.get_seq_length())


def megabytes(cache: Any) -> float:
    if isinstance(cache, PlanCache):
        return cache.nbytes() / 1e6
    held: int = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return held / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--kept", type=int, default=1024, help="entries per kv head under a plan, on average")
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded together")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    dtype = getattr(torch, args.dtype)
    model = build(args.length, args.device, dtype)
    prompt = draw_prompt(args.batch, args.length, args.device, dtype)
    ragged = make_skewed_budgets(LAYERS, KV_HEADS, args.kept).tolist()
    caches = {
        "DynamicCache, full": ("sdpa", stock_cache(model, prompt)),
        "kvsearch, full": (NAME, planned_cache(model, prompt, lambda _: [args.length] * KV_HEADS)),
        "kvsearch, ragged": (NAME, planned_cache(model, prompt, ragged.__getitem__)),
        "kvsearch, uniform": (NAME, planned_cache(model, prompt, lambda _: [args.kept] * KV_HEADS)),
    }
    del prompt
    times: dict[str, list[float]] = {name: [] for name in caches}
    for round_index in range(args.rounds + 1):
        for name, (implementation, cache) in caches.items():
            model.set_attn_implementation(implementation)
            seconds = time_decode(model, cache, args.batch, args.steps)
            if round_index > 0:  # the first round allocates and warms up
                times[name].append(seconds / args.steps)

    budgets = [entries for layer in ragged for entries in layer]
    print(f"{LAYERS} layers, {QUERY_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, {args.dtype}, {args.device}, "
          f"{args.threads} threads, batch {args.batch}; {args.length:,} tokens, ragged budgets {min(budgets):,} to "
          f"{max(budgets):,}; median of {args.rounds} rounds of {args.steps} steps")  # fmt: skip
    print(f"{'cache':20} {'kept':>7} {'MB':>7} {'ms/step':>9} {'tokens/s':>9} {'speed':>7}")
    baseline = times["DynamicCache, full"]
    for name, (_, cache) in caches.items():
        median = statistics.median(times[name])
        print(f"{name:20} {kept(cache):7.0f} {megabytes(cache):7.1f} {1e3 * median:9.2f} {args.batch / median:9.1f} "
              f"{statistics.median(map(truediv, baseline, times[name])):6.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()
