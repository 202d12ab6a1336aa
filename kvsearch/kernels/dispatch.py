"""Which calls the kernels serve: those on CUDA that they are written for, where Triton is installed.

On the CPU they are served in Triton's interpreter, and only while `Interpreter.serves`: that is for tests.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import warn_once
from kvsearch.kernels import constant

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # head dimension
INTERPRETED_PROCESSORS = 4  # of the device that the interpreter stands for


class Interpreter:
    """Whether Triton's interpreter serves CPU tensors now: an attribute, which compiled steps can look at."""

    serves = False


def serves(*states: Tensor) -> bool:
    """Return whether kernels take these queries, keys and values [..., D]; each reason for a no is said once."""
    device = states[0].device
    if device.type != "cuda" and not (device.type == "cpu" and Interpreter.serves):
        return False
    reason = _unserved(states)
    if reason is not None and not torch.compiler.is_compiling():
        warn_once(f"PyTorch's own operations run in place of fused kernels: {reason}")
    return reason is None


@constant
@cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first tensor; Triton by itself takes the current one."""
    device = arguments[0].device
    with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        kernel[grid](*arguments, **constants)


def needs_gradients(*states: Tensor) -> bool:
    """Return whether gradients are recorded for some of these tensors."""
    return torch.is_grad_enabled() and any(state.requires_grad for state in states)


def _unserved(states: tuple[Tensor, ...]) -> str | None:
    """Say why kernels do not take these tensors; None: they do."""
    if any(state.dtype != states[0].dtype or state.dtype not in DTYPES for state in states):
        kinds = sorted({str(state.dtype).removeprefix("torch.") for state in states})
        return f"they are not written for {' and '.join(kinds)}"
    for state in states:
        if state.shape[-1] > WIDEST:
            return f"they are not written for heads of {state.shape[-1]} numbers, {WIDEST} at most"
    if needs_gradients(*states):
        return "they have no backward pass"
    return lacking(states[0].device, states[0].dtype)


@constant
@cache
def lacking(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what the machine lacks for kernels on these numbers; None: nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'kvsearch[gpu]')"
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    found = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
    if found >= needed:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"for {name} they need compute capability {needed[0]}.{needed[1]}, and this GPU has {found[0]}.{found[1]}"
