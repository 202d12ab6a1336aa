"""What judging one candidate costs: through the candidate bank, and by the procedure of the papers.

    python benchmarks/bench_search.py                      # bundled model, 30 samples of 1,024 tokens, populations of 8
    python benchmarks/bench_search.py --samples 8 --length 512 --naive 2
    python benchmarks/bench_search.py --shape llama-3.1-8b --device cuda --length 8192 --answer 64   # random weights

The papers (EvolKV, arXiv 2509.08315) prefill every sample and decode its reply for every candidate. Here the runtime
does so for a few candidates, in batches of 8 samples; their mean time is what any number of candidates would take each,
and a search of 200 candidates is extrapolated from it. The bank's prefill is counted separately and within the search.
Candidates are random budgets of groups of 2 layers. Both ways run in one process on the same samples, and the scores of
both must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.evaluation.runner import run_encoded
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel, LoadOptions, load
from kvsearch.models.shapes import make_random_model
from kvsearch.plan.schema import PROTOCOLS, Protocol
from kvsearch.policies import Policy, create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import PhaseProgram
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.samples import list_samples
from kvsearch.tasks.base import Example, TokenCount
from kvsearch.tasks.encode import TaskPrompts, encode_tasks
from kvsearch.tasks.synthetic.suite import SyntheticTask

SEARCH = 200  # candidates
T = TypeVar("T")


def timed(action: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return action(), time.perf_counter() - start


def population(shape: tuple[int, int], count: int, budget: int, least: int, rng: np.random.Generator) -> list[Ints]:
    """Random budgets that are the same in groups of 2 layers, `budget` entries per kv head on average."""
    groups = -(-shape[0] // 2)
    shares = rng.dirichlet(np.full(groups, 3.0), count) * groups
    layers = np.repeat(np.maximum(least, shares * budget).round().astype(np.int64), 2, axis=1)[:, : shape[0]]
    return [np.repeat(row[:, None], shape[1], axis=1) for row in layers]


def naive(loaded: LoadedModel, policy: Policy, task: TaskPrompts, protocol: Protocol, candidate: Ints) -> list[float]:
    """Prefill and greedy decode of every sample under one candidate: the scores."""
    policies = dict.fromkeys(describe(loaded.model).full_layers, policy)
    program = Program(PhaseProgram(policies, lambda _: candidate))
    return [sample.score for sample in run_encoded(loaded, {"candidate": program}, [task], protocol)]


@dataclass(frozen=True)
class OneQuestion(SyntheticTask):
    """A task with one question for every context, whose answer is as long as it is, or of so many words."""

    answer: int | None = None

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:
        return [self._asked(example) for example in super().examples(samples, seed, count)]

    def _asked(self, example: Example) -> Example:
        query = example.queries[0]
        if self.answer is not None:
            words = " ".join(example.context.split()[: self.answer])
            query = replace(query, answers=(words,), written=words, max_new_tokens=self.answer)
        return replace(example, queries=(query,))


def loaded_of(shape: str | None, layers: int | None, device: str) -> LoadedModel:
    """The bundled model, or one of a shape with random weights, which reads the tokens of the bundled one."""
    if shape is None:
        return load("bundled", LoadOptions(device=device))
    return replace(
        make_random_model(shape, layers, device), tokenizer=load("bundled", LoadOptions(device="cpu")).tokenizer
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=30, help="contexts, one question each")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--task", default="multikey")
    parser.add_argument("--budget", type=int, default=64, help="entries per kv head on average")
    parser.add_argument("--population", type=int, default=8)
    parser.add_argument("--naive", type=int, default=5, help="candidates judged by the papers' procedure")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="random weights of this shape, such as llama-3.1-8b, bfloat16")
    parser.add_argument("--layers", type=int, help="with --shape: its first layers only")
    parser.add_argument("--answer", type=int, help="tokens of every answer (default: the task's own)")
    args = parser.parse_args()
    loaded = loaded_of(args.shape, args.layers, args.device)
    policy = create_policy("snapkv", {"window": 8})
    question = OneQuestion(args.task, args.length, answer=args.answer)
    task = encode_tasks(loaded, [question], args.samples)[0]
    print(f"{loaded.name}, {args.samples} samples of {args.length:,} tokens ({args.task}), budget {args.budget}")
    for protocol in PROTOCOLS:
        compare(loaded, policy, task, protocol, args)


def compare(loaded: LoadedModel, policy: Policy, task: TaskPrompts, protocol: Protocol, args: Any) -> None:
    shape = (len(describe(loaded.model).full_layers), describe(loaded.model).kv_heads)
    candidates = population(shape, max(args.population, args.naive), args.budget, 9, np.random.default_rng(0))
    samples = list_samples([task], protocol)
    bank, prefill = timed(lambda: CandidateBank(loaded, policy, samples, cap=4 * args.budget))
    naive(loaded, policy, task, protocol, candidates[0])  # warm up
    scores, slow = timed(lambda: [naive(loaded, policy, task, protocol, one) for one in candidates[: args.naive]])
    slow /= args.naive
    print(f"\n{protocol}: papers' procedure {slow:.3f} s per candidate (mean of {args.naive}, "
          f"{SEARCH} extrapolated: {SEARCH * slow:,.0f} s); bank: prefill {prefill:.2f} s once")  # fmt: skip
    for objective in ("nll", "metric"):
        judge = bank.score_replies if objective == "metric" else bank.measure_losses
        fast = seconds_each(partial(judge, candidates[: args.population]), args.population)
        whole = prefill + SEARCH * fast
        print(f"  {objective:6s} {1000 * fast:8.2f} ms per candidate: {slow / fast:6.1f}x; with the prefill, "
              f"{SEARCH} candidates in {whole:.1f} s: {SEARCH * slow / whole:.1f}x (extrapolated)")  # fmt: skip
    apart = np.abs(bank.score_replies(candidates[: args.naive]).mean(1) - np.mean(scores, axis=1)).max()
    print(f"  scores of both ways differ by at most {apart:.4f}")


def seconds_each(action: Callable[[], Any], count: int, repeats: int = 5) -> float:
    """Seconds per candidate of a population, the best of some runs."""
    action()
    return min(timed(action)[1] for _ in range(repeats)) / count


if __name__ == "__main__":
    main()
