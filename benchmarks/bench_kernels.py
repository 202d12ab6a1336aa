"""Kernels, waits and copies of every eviction pattern on an accelerator, per layer: no GPU is needed.

    python benchmarks/bench_kernels.py
    python benchmarks/bench_kernels.py --policies snapkv,h2o
    python benchmarks/bench_kernels.py --policies h2o --phases both --budgets ragged --lines 20

A fake accelerator (tests/torture/device) on host memory counts what torch launches, what the host would wait for, and
copies to the device. The model is a Llama of two layers, 8 query heads and 8 kv heads; a count is of a whole forward
pass, embedding, rotary tables and head included, divided by the layers. "kernels" are those of the usual decode step,
"most" those of the dearest of twelve (policies score anew now and then), and so are waits and copies. Attention is one
kernel; a sort is one, too, though it is several on a GPU. Budgets "flat" are the ragged ones, of plans without a decode
phase, stored as where Triton's kernels serve; the others are what every other device runs. `--lines` adds the source
lines of kvsearch that most of the last step comes from, and all that wait or copy.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from fitted_policies import create
from torch import Tensor

from kvsearch.policies import Policy, list_policy_names
from kvsearch.runtime import PlanCache
from kvsearch.runtime.attention import NAME, use_attention
from tests.families import build
from tests.torture.device import counting
from tests.torture.device.accelerator import device

BUDGETS = {"even": counting.even, "ragged": counting.ragged, "flat": counting.ragged}


def kinds(model: Any, args: argparse.Namespace) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """Yield (name, phases, budgets, how to make the cache)."""
    for name, static in (("DynamicCache", False), ("StaticCache", True)):
        yield name, "", "", partial(counting.stock, model, static=static)
    for name, phases, budgets in product(args.policies.split(","), args.phases.split(","), args.budgets.split(",")):
        policy = create(name, model)
        if phases == "both" and (budgets == "flat" or policy.no_decode_rule() is not None):
            continue
        yield name, phases, budgets, maker(model, policy, phases, budgets)


def maker(model: Any, policy: Policy, phases: str, budgets: str) -> Callable[[], Any]:
    program = counting.program(model, policy, BUDGETS[budgets](model), decode=phases == "both")
    return lambda: PlanCache(model, program)


@torch.no_grad()
def print_lines(model: Any, make: Callable[[], Any], ids: Tensor, shown: int) -> None:
    """Print where what happens in a prompt, and in the last of the steps after it, comes from."""
    cache = make()
    with use_attention(model, NAME if isinstance(cache, PlanCache) else "sdpa"):
        prompt = lines_of(lambda: counting.read_prompt(model, cache, ids))
        for _ in range(counting.STEPS - 1):
            model(input_ids=ids[:, :1], past_key_values=cache)
        last = lines_of(lambda: model(input_ids=ids[:, :1], past_key_values=cache))
    for title, found in (("the prompt", prompt), ("a step", last)):
        print(f"  {title}:")
        for kind in counting.KINDS:
            ours = [(key, times) for key, times in found.items() if key[0] == kind and key[2]]
            mine = Counter({(where, what): times for (_, what, where), times in ours})
            for (where, what), times in mine.most_common(shown if kind == "kernel" else None):
                print(f"    {times:4} {kind:7} {where} {what}")


def lines_of(action: Callable[[], object]) -> Counter[tuple[str, str, str]]:
    with counting.by_line() as lines:
        action()
    return lines.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(list_policy_names()))
    parser.add_argument("--phases", default="prefill,both", help="prefill, both, or both of these")
    parser.add_argument("--budgets", default="even,ragged,flat")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lines", type=int, default=0, help="source lines to show")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = (
        build("llama", num_hidden_layers=2, num_key_value_heads=8).to(device(), getattr(torch, args.dtype)).eval()
    )
    ids = torch.randint(3, 97, (args.batch, counting.LENGTH), generator=torch.Generator().manual_seed(0)).to(device())
    print(f"per layer: 2 layers, 8/8 heads, {args.dtype}, batch {args.batch}, {counting.LENGTH} tokens, "
          f"{counting.ENTRIES} entries per head\n{'':38} | {'prompt':>22} | {'decode step':>30}\n"
          f"{'policy':20} {'phases':9} {'budgets':7} | {'kernels':>8} {'waits':>6} {'copies':>6} | "
          f"{'kernels':>8} {'most':>7} {'waits':>6} {'copies':>6}")  # fmt: skip
    for name, phases, budgets, make in kinds(model, args):
        with counting.flat() if budgets == "flat" else nullcontext():
            found = counting.costs(model, make, ids)
            print(f"{name:20} {phases:9} {budgets:7} | {found.prefill.kernels:8.1f} {found.prefill.waits:6.1f} "
                  f"{found.prefill.copies:6.1f} | {found.step.kernels:8.1f} {found.most.kernels:7.1f} "
                  f"{found.most.waits:6.1f} {found.most.copies:6.1f}", flush=True)  # fmt: skip
            if args.lines and phases:
                print_lines(model, make, ids, args.lines)


if __name__ == "__main__":
    main()
