"""Part 1, about 7 minutes: kernels against fp64 on this device, step rules, compute-sanitizer, tests that need CUDA.

    python benchmarks/gpu/correctness.py

Errors are the largest, against the largest number expected. Rules: the replies and the entries of a small model in fp32
against the same model in fp64 on the CPU, without kernels.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from steps import ROOT, Settings, Step, main, run, said_by

from kvsearch.kernels.attention import attend
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.stock import CACHE
from tests.families import build
from tests.kernels.reference import Case, relative_error
from tests.kernels.test_rows import Prompt

# a policy for every step rule: position, mass, stored, row, persistence, pooled; and scoring anew
RULES = (
    "streaming", "h2o", "keydiff", "tova", "scissorhands", "scissorhands:drop=8", "cake:window=8",
    "snapkv:window=8:refresh=8",
)  # fmt: skip
BUDGETS = np.array([[40, 56], [56, 40]])  # by layer and kv head
TOKENS = 64  # of a prompt
TOOLS = ("memcheck", "racecheck")  # of compute-sanitizer
Tensors = TypeVar("Tensors", Case, Prompt)


def moved(case: Tensors, device: str) -> Tensors:
    """The same case with its tensors on a device."""
    for name, value in vars(case).items():
        if isinstance(value, torch.Tensor):
            setattr(case, name, value.to(device))
    return case


def attention_cases(small: bool) -> list[Case]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    sizes = (64,) if small else (64, 96, 128, 256)
    columns = 150 if small else 3000
    more: dict[str, Any] = {"holes": True, "sinks": True, "softcap": 30.0}
    cases = []
    for dtype, dim in product(dtypes, sizes):
        cases += [
            Case(8, 4, dim, dim, columns, dtype=dtype, ragged=True),
            Case(8, 4, dim, dim, columns, dtype=dtype, **more),
        ]
        cases += [Case(4, 8, dim, dim, columns, rows=rows, dtype=dtype) for rows in ((2,) if small else (2, 8))]
    return cases


def attention(where: Settings) -> list[dict[str, Any]]:
    """The largest errors of attention and of its row, of blocks and of segments behind one another."""
    worst: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for case in attention_cases(where.small):
        errors = worst[str(case.dtype).removeprefix("torch."), case.dim]
        for name, error in attention_errors(case, where).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return [{"dtype": dtype, "size": dim, **errors} for (dtype, dim), errors in worst.items()]


def attention_errors(case: Case, where: Settings) -> dict[str, float]:
    expected, expected_row = case.expected()
    case = moved(case, where.kernels)
    given = case.scaling, case.softcap, case.sink, case.rows
    with where.serving():
        behind, row = attend(case.query, case.flat(), *given)
        errors = {"flat": relative_error(behind.cpu(), expected)}
        if case.lengths is None:
            output, row = attend(case.query, case.block(), *given, want_row=case.rows == 1)
            errors["block"] = relative_error(output.cpu(), expected)
    return errors if row is None else {**errors, "row": relative_error(row.cpu(), expected_row)}


def scoring(where: Settings) -> list[dict[str, Any]]:
    """What entries receive from the last rows of a prompt, and from all."""
    length = 64 if where.small else 1024
    found = []
    for dtype, rows in product((torch.bfloat16, torch.float32), (32, length)):
        prompt = Prompt(2, 4, rows, length, 128, dtype=dtype, pads=5)
        expected = prompt.expected().sum(-2).mean(2)
        with where.serving():
            received = moved(prompt, where.kernels).given(rows == length).received("mean")
        found.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "rows": rows,
                "error": relative_error(received.cpu(), expected),
            }
        )
    return found


def rules(where: Settings) -> list[dict[str, Any]]:
    """Steps of every rule: the largest error of logits, and heads that hold other entries than in fp64."""
    found = []
    for name in RULES:
        policy = create_policy(*parse_policy(name))
        logits, kept = steps_of(policy, where, where.kernels, torch.float32)
        expected, expected_kept = steps_of(policy, where, "cpu", torch.float64)
        other = sum(mine != theirs for mine, theirs in zip(kept, expected_kept, strict=True))
        found.append(
            {"rule": name, "error": relative_error(logits, expected), "other_heads": other, "heads": len(kept)}
        )
    return found


@torch.no_grad()
def steps_of(policy: Policy, where: Settings, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[list[int]]]:
    """The logits of forced tokens after a prompt, and what every head holds at the end."""
    model = build("llama", head_dim=64, num_hidden_layers=2).to(device, dtype)
    reply = 2 if where.small else 24
    ids = torch.randint(3, 97, (2, TOKENS + reply), generator=torch.Generator().manual_seed(0)).to(device)
    program = Program.of_policy(model, policy, dict.fromkeys(("prefill", "decode"), lambda _: BUDGETS))
    cache = PlanCache(model, program)
    with where.serving(), run_attention(model):
        model(ids[:, :TOKENS], **{CACHE: cache})
        logits = [model(ids[:, [at]], **{CACHE: cache}).logits for at in range(TOKENS, TOKENS + reply)]
    kept = [sorted(cache.kept_positions(layer, row, head)) for layer in (0, 1) for row in (0, 1) for head in (0, 1)]
    return torch.cat(logits, 1).double().cpu(), kept


def sanitizer(where: Settings) -> dict[str, str]:
    """What compute-sanitizer says of a small case of every kernel; tools side by side, as they take minutes."""
    command = [sys.executable, __file__, "--small", "--device", where.device]
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        checks = {}
        for tool, step in product(TOOLS, ("attention", "scoring", "rules")):
            words = ("compute-sanitizer", "--tool", tool, *command, "--only", step, "--out", folder)
            checks[f"{tool}, {step}"] = pool.submit(said_by, *words, seconds=160)
        return {name: check.result() for name, check in checks.items()}


def tests(where: Settings) -> dict[str, Any]:
    """The tests that need CUDA."""
    chosen = ("runtime/test_steps.py",) if where.small else ("kernels", "runtime")
    folders = [str(ROOT / "tests" / folder) for folder in chosen]
    workers = "0" if where.small else "8"  # most of the time kernels are compiled
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", "--tb=short"]
    code, said = run([*command, "--rootdir", str(ROOT), "-m", "cuda", *folders], 140)
    return {"exit code": code, "said": said}


if __name__ == "__main__":
    main(
        __doc__,
        8,
        {
            "attention": Step(attention, 150),
            "scoring": Step(scoring, 60),
            "rules": Step(rules, 60),
            "tests": Step(tests, 150),
            "sanitizer": Step(sanitizer, 170),
        },
    )
