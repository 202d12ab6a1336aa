"""Decide between kernels and PyTorch: kernels serve CUDA tensors that they are written for, if Triton is installed.

On the CPU they are served in Triton's interpreter, and only while `Interpreter.serves`: that is for tests.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import warn_once
from kvsearch.core.parsing import describe_fault
from kvsearch.kernels import constant

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # head dimension
INTERPRETED_PROCESSORS = 4  # of the device that the interpreter stands for


class Interpreter:
    """Whether Triton's interpreter serves CPU tensors now: an attribute, which compiled steps can look at."""

    serves = False


def serves(*states: Tensor) -> bool:
    """Return whether kernels take these queries, keys and values [..., D]; each reason against is warned of once."""
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
    """Return the number of multiprocessors of a device."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first tensor; Triton by itself takes the current one.

    What torch.compile makes of it does so, too, and takes no context managers that it does not know.
    """
    device = arguments[0].device
    here = device.type == "cpu" or torch.compiler.is_compiling()
    # Without this a model on several GPUs would launch on the one that is current.
    with nullcontext() if here else torch.get_device_module(device).device(device):
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
    return lacking(states[0].device)


@constant
@cache
def lacking(device: torch.device) -> str | None:
    """Return why kernels cannot run on a device, tried by launching one; None if they can."""
    if os.environ.get("KVSEARCH_KERNELS") == "0":
        return "KVSEARCH_KERNELS is 0"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'kvsearch[gpu]')"
    if torch.version.hip is not None:
        return "they are not written for ROCm"
    major, minor = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
    if major < 8:
        return f"they need compute capability 8.0, and this GPU has {major}.{minor}"
    try:
        from kvsearch.kernels.jit.common import write_one

        launch(write_one, (1,), torch.empty(1, device=device))
    except Exception as error:  # noqa: BLE001 - whatever Triton, a compiler or the driver raises
        return f"Triton cannot launch one here ({describe_fault(error)})"
    return None
