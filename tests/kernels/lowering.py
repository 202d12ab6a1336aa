"""Compile every launch of the kernels to machine code for GPUs, without one: a program, run without the interpreter.

The launchers run as they are on CPU tensors; what they would launch is compiled with the same arguments and blocks.
Writes a line of JSON for each launch: kernel, architecture, numbers, head size, shared memory, registers, spills, and
how often the threads of a program add up what they have in its inner loop. With `--all`: every number at every head
size, in place of the most common.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvsearch.kernels.attention import attend
from kvsearch.kernels.step import Rule, Slots, step
from tests.kernels.reference import Case
from tests.kernels.test_rows import Prompt

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def compiled(kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any], architecture: int) -> Any:
    given = {p.name: p.default for p in kernel.params} | dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(place,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i64" if value >= 2**31 else "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def assembled(made: Any, architecture: int) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills, as the assembler says."""
    ptx = made.asm["ptx"]
    [target] = re.findall(r"\.target (\w+)", ptx)
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    return {name: int(re.findall(pattern, said)[0]) for name, pattern in patterns.items()}


@contextmanager
def compiling(architecture: int) -> Iterator[list[dict[str, Any]]]:
    """Compile in place of launching."""
    found: list[dict[str, Any]] = []

    def launch(kernel: JITFunction[Any], _: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            made = compiled(kernel, args, kwargs, architecture)
            sizes = {"kernel": made.metadata.name, "arch": architecture, "shared": made.metadata.shared}
            dtype = TYPES[next(value.dtype for value in args if isinstance(value, torch.Tensor))]
            dim = kwargs.get("D", kwargs.get("DV"))
            # of numbers between programs' threads, in the last of the innermost loops
            loop, _, _ = made.asm["ttir"].split("scf.for")[-1].partition("scf.yield")
            numbers = {"dtype": dtype, "dim": dim, "reductions": loop.count("tt.reduce")}
            found.append({**sizes, **numbers, **assembled(made, architecture)})

        return run

    before = JITFunction.__getitem__
    JITFunction.__getitem__ = launch  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        JITFunction.__getitem__ = before  # type: ignore[method-assign]


# of which the test compiles all launches; the page has those of every one
COMMON = [
    *((torch.bfloat16, dim) for dim in (64, 128, 256)),
    *((dtype, 128) for dtype in (torch.float16, torch.float32)),
]
EVERY = [(dtype, dim) for dim in (64, 96, 128, 256) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
NUMBERS = EVERY if "--all" in sys.argv else COMMON
# the decode step of a flat store, which is what CUDA runs by default, and several tokens at once
ATTENTION = [
    *(Case(8, 4, dim, dim, 4096, dtype=dtype) for dtype, dim in NUMBERS),
    Case(2, 4, 80, 96, 4096, dtype=torch.float16, holes=True, softcap=30.0, sinks=True),
    *(Case(2, 8, dim, dim, 4096, rows=8, dtype=torch.bfloat16) for dim in (128, 256)),
]
BLOCKS = [
    Case(8, 4, 128, 128, 4096, dtype=torch.bfloat16, holes=True),
    Case(1, 4, 64, 64, 128, dtype=torch.float16),
]
SCORING = [
    *(Prompt(8, 4, 32, 4096, dim, dtype=dtype) for dtype, dim in NUMBERS),
    Prompt(1, 2, 256, 256, 256, softcap=30.0),
]


def main() -> None:
    rules: tuple[Rule, ...] = ("position", "mass", "stored", "row", "persistence", "pooled")
    for architecture in (80, 89, 90):
        with compiling(architecture) as found:
            for case in ATTENTION:
                attend(case.query, case.flat(), case.scaling, case.softcap, case.sink, case.rows)
            for case in BLOCKS:
                attend(case.query, case.block(), case.scaling, case.softcap, case.sink, case.rows, want_row=True)
            for prompt in SCORING:
                rows = prompt.given(causal=prompt.rows == prompt.length)
                rows.received("mean")
                rows.moments()
                rows.peaks(prompt.length - prompt.rows or prompt.length, torch.ones(1), torch.ones(1), "sum")
            for dtype, dim in NUMBERS:
                lower_step("mass", dtype, dim)
            for rule in rules:
                lower_step(rule)
        for each in found:
            print(json.dumps(each))  # noqa: T201


def lower_step(rule: Rule, dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> None:
    case = Case(2, 4, dim, dim, 4096, dtype=dtype)
    numbers = [torch.zeros(size, dtype=torch.int64) for size in (2, (2, 2), 2, 2, 2)]
    positions, state = torch.zeros(2, 4096, dtype=torch.int64), torch.zeros(2, 4096)
    slots = Slots(case.keys, case.values, positions, (state,), *numbers)
    if rule == "pooled":
        slots = replace(slots, links=torch.zeros(2, 2, 4096, dtype=torch.int32))
    if rule == "row":
        slots = replace(slots, sums=(torch.zeros(2, 5000), numbers[0]))
    if rule == "persistence":
        more = torch.zeros(2, 4096, dtype=torch.int16), torch.zeros(2, 4096, 50, dtype=torch.uint8)
        slots = replace(slots, state=(state, *more))
    constants: dict[str, dict[str, int | str]] = {
        "persistence": {"HISTORY": 400}, "pooled": {"KERNEL": 5, "POOLING": "avg", "PROTECT": 32},
    }  # fmt: skip
    key, value, active = case.keys[:, 0], case.values[:, 0], torch.ones(2, dtype=torch.bool)
    step(
        case.query,
        key,
        value,
        slots,
        4096,
        rule,
        0.1,
        sinks=torch.zeros(2, 4),
        arriving=state[:, 0].clone,
        active=active,
        constants=constants.get(rule),
    )


if __name__ == "__main__":
    main()
