"""Which calls the kernels serve: those on CUDA that they are written for, where Triton is installed.

On the CPU they are served in Triton's interpreter, and only where `interpreted` asks for it: that is for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kvsearch.errors import InternalError, warn_once
from kvsearch.kernels.compiled import constant

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # head dimension
INTERPRETED_PROCESSORS = 4  # of the device that the interpreter stands for


class _Interpreter:
    """Whether Triton's interpreter serves CPU tensors now: an attribute, which compiled steps can look at."""

    serves = False


@contextmanager
def interpreted(serve: bool = True) -> Iterator[None]:
    """Let kernels serve CPU tensors, in Triton's interpreter, for a while; or not, where they do.

    Raises:
        InternalError: Triton is not interpreting: TRITON_INTERPRET=1 must be set before it is first imported.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        raise InternalError("kernels run on the CPU only with TRITON_INTERPRET=1")
    before, _Interpreter.serves = _Interpreter.serves, serve
    try:
        yield
    finally:
        _Interpreter.serves = before


def serves(*states: Tensor) -> bool:
    """Return whether kernels take these queries, keys and values [..., D]; each reason for a no is said once."""
    device = states[0].device
    if device.type != "cuda" and not (device.type == "cpu" and _Interpreter.serves):
        return False
    reason = _unserved(states)
    if reason is not None and not torch.compiler.is_compiling():
        warn_once(f"PyTorch's own operations run in place of fused kernels: {reason}")
    return reason is None


@constant
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    return INTERPRETED_PROCESSORS if device.type == "cpu" else _multiprocessors(device)


def _unserved(states: tuple[Tensor, ...]) -> str | None:
    """Say why kernels do not take these tensors; None: they do."""
    if any(state.dtype != states[0].dtype or state.dtype not in DTYPES for state in states):
        kinds = sorted({str(state.dtype).removeprefix("torch.") for state in states})
        return f"they are not written for {' and '.join(kinds)}"
    for state in states:
        if state.shape[-1] > WIDEST:
            return f"they are not written for heads of {state.shape[-1]} numbers, {WIDEST} at most"
    if torch.is_grad_enabled() and any(state.requires_grad for state in states):
        return "they have no backward pass"
    return _lacking(states[0].device, states[0].dtype)


@constant
def _lacking(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what the machine lacks for kernels on these numbers."""
    if not _installed():
        return "Triton is not installed (pip install 'kvsearch[gpu]')"
    needed, found = (8, 0) if dtype == torch.bfloat16 else (7, 5), _capability(device)
    if found >= needed:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"for {name} they need compute capability {needed[0]}.{needed[1]}, and this GPU has {found[0]}.{found[1]}"


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
