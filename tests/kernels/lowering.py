"""Compile every launch of the kernels to machine code for GPUs, without one: a program, run without the interpreter.

The launchers run as they are on CPU tensors; what they would launch is compiled with the same arguments and blocks.
Writes a line of JSON for each kernel: its name, the architecture, the bytes of shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvsearch.kernels.attention import Entries, attend
from kvsearch.kernels.step import LayerSums, Rule, Slots, step
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


@contextmanager
def compiling(architecture: int) -> Iterator[list[dict[str, Any]]]:
    """Compile in place of launching."""
    found: list[dict[str, Any]] = []

    def launch(kernel: JITFunction[Any], _: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            made = compiled(kernel, args, kwargs, architecture)
            machine_code = len(made.asm["cubin"])
            name = made.metadata.name
            found.append({"kernel": name, "shared": made.metadata.shared, "bytes": machine_code, "arch": architecture})

        return run

    before = JITFunction.__getitem__
    JITFunction.__getitem__ = launch  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        JITFunction.__getitem__ = before  # type: ignore[method-assign]


ATTENTION = [
    (90, Case(8, 4, 128, 128, 4096, dtype=torch.bfloat16)),
    (90, Case(2, 4, 80, 96, 4096, dtype=torch.float16, holes=True, ragged=True, softcap=30.0, sinks=True)),
    (90, Case(2, 8, 256, 256, 4096, rows=8, dtype=torch.bfloat16)),
    (80, Case(8, 4, 192, 128, 4096, dtype=torch.bfloat16, holes=True)),
    (80, Case(2, 2, 256, 256, 4096, holes=True)),
    (80, Case(1, 4, 64, 64, 128, dtype=torch.float16)),
]

SCORING = [
    (90, Prompt(8, 4, 32, 4096, 128, dtype=torch.bfloat16)),
    (80, Prompt(1, 2, 256, 256, 256, softcap=30.0)),
    (80, Prompt(1, 8, 64, 1024, 80, dtype=torch.float16)),
]


def main() -> None:
    for architecture, case in ATTENTION:
        with compiling(architecture) as found:
            held = Entries(case.keys, case.values, case.columns, case.positions, case.lengths)
            attend(case.query, held, case.scaling, case.softcap, case.sink, case.rows, want_row=case.rows == 1)
        report(found)
    for architecture, prompt in SCORING:
        with compiling(architecture) as found:
            rows = prompt.given(causal=prompt.rows == prompt.length)
            rows.received("mean")
            rows.moments()
        report(found)
    rules: tuple[Rule, ...] = ("position", "mass", "stored", "row", "persistence", "pooled")
    for rule in rules:
        with compiling(90) as found:
            lower_step(rule)
        report(found)


def lower_step(rule: Rule) -> None:
    case = Case(2, 4, 128, 128, 4096, dtype=torch.bfloat16)
    numbers = [torch.zeros(size, dtype=torch.int64) for size in (2, (2, 2), 2, 2, 2)]
    positions, state = torch.zeros(2, 4096, dtype=torch.int64), torch.zeros(2, 4096)
    slots = Slots(case.keys, case.values, positions, (state,), *numbers)
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
        layer=LayerSums(torch.zeros(2, 5000), numbers[0]) if rule == "row" else None,
    )


def report(found: list[dict[str, Any]]) -> None:
    for each in found:
        print(json.dumps(each))  # noqa: T201


if __name__ == "__main__":
    main()
