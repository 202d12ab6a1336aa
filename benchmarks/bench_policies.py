"""What every eviction pattern costs: prefill and decoding against the full cache, bytes held, scratch memory.

    python benchmarks/bench_policies.py                      # random Llama, 8 layers of width 512, 4,096 tokens
    python benchmarks/bench_policies.py --bundled            # the bundled model, 1,024 tokens
    python benchmarks/bench_policies.py --policies h2o,tova --rounds 7

A prefill under a pattern (prefill phase) is timed right after one with transformers' DynamicCache; the overhead is the
median of the ratios within these pairs. Decoding (both phases) is timed in the same way, step block by step block, at
the budget. Scratch is the most memory that gathering, scoring and starting one layer's pattern takes beyond what the
layer was given, from the allocator's own record. Fitted policies have random weights of the right shape; what their
scores take by arithmetic, as a share of the prefill of Llama-3.1-8B at 32,768 tokens, is the last column.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_decode import build
from fitted_policies import create, share_of_prefill
from torch import Tensor
from transformers import DynamicCache

from kvsearch.benchmark.speed import measure_peak_bytes, time_decode, time_prefill
from kvsearch.models.architecture import RotaryTables, describe
from kvsearch.policies import Policy, list_policy_names
from kvsearch.policies.ranking import find_limits, keep_at
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.collector import DensePrompt
from kvsearch.runtime.decode.rule import decode_needs
from kvsearch.runtime.logits import Logits, OutputProjection
from kvsearch.runtime.program import PhaseProgram


@dataclass
class Costs:
    """Ratios to the full cache, one per round, and what is held."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    scratch: float = float("nan")


def load(args: argparse.Namespace) -> Any:
    if not args.bundled:
        return build(args.length, args.device, getattr(torch, args.dtype))
    from kvsearch.models.loading import LoadOptions
    from kvsearch.models.loading import load as load_model

    return load_model("bundled", LoadOptions(device=args.device)).model


def phase(model: Any, policy: Policy, budget: int) -> PhaseProgram:
    program = Program.uniform(model, policy, lambda _: budget).prefill
    assert program is not None
    return program


def prefill(model: Any, ids: Tensor, cache: Any) -> float:
    """Seconds for the forward pass over a prompt."""
    model.set_attn_implementation(NAME if isinstance(cache, PlanCache) else "sdpa")
    return time_prefill(model, cache, ids)


def decode(model: Any, cache: Any, steps: int) -> float:
    """Seconds per decode step; what came in is forgotten again."""
    model.set_attn_implementation(NAME if isinstance(cache, PlanCache) else "sdpa")
    return time_decode(model, cache, 1, steps) / steps


def measure(model: Any, policy: Policy, ids: Tensor, args: argparse.Namespace) -> Costs:
    costs, rule = Costs(), phase(model, policy, args.budget)
    for _ in range(args.rounds):
        stock = DynamicCache(config=model.config)
        full = prefill(model, ids, stock)
        costs.prefill.append(prefill(model, ids, PlanCache(model, Program(rule))) / full)
    decodes = policy.no_decode_rule() is None
    cache = PlanCache(model, Program(rule, rule if decodes else None))
    prefill(model, ids, cache)
    decode(model, cache, 2)  # the first step may still evict, and warms up
    for _ in range(args.rounds):
        full = decode(model, stock, args.steps)
        took = decode(model, cache, args.steps)
        costs.decode.append(took / full)
        costs.milliseconds.append(1e3 * took)
    costs.megabytes = cache.nbytes() / 1e6
    needs = policy.needs()
    if needs.reread is None and needs.hidden is None:  # these are made of the whole model
        costs.scratch = scratch(model, policy, ids.shape[1], args.budget)
    return costs


@torch.no_grad()
def scratch(model: Any, policy: Policy, length: int, budget: int) -> float:
    """Peak MiB of gathering, scoring and starting a pattern in one layer, beyond the layer's own tensors (CPU only)."""
    if model.device.type != "cpu":
        return float("nan")
    shape = describe(model)
    query, key, value = (
        torch.randn(1, heads, length, shape.head_dim) for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )
    module = next(m for m in model.modules() if hasattr(m, "o_proj"))
    logits = Logits(shape.head_dim**-0.5, None, OutputProjection(module, shape.query_heads, shape.kv_heads))
    valid, positions = torch.ones(1, length, dtype=torch.bool), torch.arange(length)[None]
    budgets = torch.full((1, shape.kv_heads), budget)

    def work() -> None:
        prompt = DensePrompt([policy.needs(), decode_needs(policy)], RotaryTables(model, 0), layer=0)
        prompt.add(query, (key, value), positions, valid, logits)
        observation = prompt.observation()
        keep_at(policy, observation, find_limits(policy, budgets, [length]))
        policy.start(observation)

    return measure_peak_bytes(model.device, work) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundled", action="store_true", help="the bundled model instead of a random one")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt (1,024 with --bundled)")
    parser.add_argument("--budget", type=int, default=None, help="entries per kv head (default: a quarter)")
    parser.add_argument("--policies", default=",".join(list_policy_names()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    args.length = min(args.length, 1024) if args.bundled else args.length
    args.budget = args.budget or args.length // 4
    model = load(args)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, args.length), generator=generator).to(model.device)
    stock = DynamicCache(config=model.config)
    prefill(model, ids, stock)
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers) / 1e6
    shape = describe(model)
    print(f"{shape.layers} layers, {shape.query_heads}/{shape.kv_heads} heads of {shape.head_dim}, {model.dtype}, "
          f"{model.device}, {torch.get_num_threads()} threads; {args.length:,} tokens, budget {args.budget:,}; full "
          f"cache {full:.1f} MB; medians of {args.rounds} rounds, {args.steps} steps each")  # fmt: skip
    columns = f"{'pattern':20} {'prefill':>9} {'scratch MiB':>12} {'ms/token':>9} {'of full':>8} {'MB held':>8}"
    print(f"{columns} {'of 8B prefill':>14}")
    for name in args.policies.split(","):
        costs, share = measure(model, create(name, model), ids, args), share_of_prefill(name)
        print(f"{name:20} {statistics.median(costs.prefill) - 1:+9.1%} {costs.scratch:12.1f} "
              f"{statistics.median(costs.milliseconds):9.2f} {statistics.median(costs.decode):7.2f}x "
              f"{costs.megabytes:8.2f} {'' if share is None else f'{share:.2%}':>14}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
