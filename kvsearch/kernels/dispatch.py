"""Which calls the kernels serve: those on CUDA that they are written for, where Triton is installed.

On the CPU they are served in Triton's interpreter, and only where `interpreted` asks for it: that is for tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kvsearch.errors import InternalError, KvsearchWarning

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # head dimension
INTERPRETED_PROCESSORS = 4  # of the device that the interpreter stands for

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)
_said: set[str] = set()


@contextmanager
def interpreted() -> Iterator[None]:
    """Let kernels serve CPU tensors, in Triton's interpreter, for a while.

    Raises:
        InternalError: Triton is not interpreting: TRITON_INTERPRET=1 must be set before it is first imported.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        raise InternalError("kernels run on the CPU only with TRITON_INTERPRET=1")
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def serves(*states: Tensor) -> bool:
    """Return whether kernels take these queries, keys and values [..., D]; each reason for a no is said once."""
    device = states[0].device
    if device.type != "cuda" and not (device.type == "cpu" and _interpreting.get()):
        return False
    reason = _unserved(states)
    if reason is not None and reason not in _said:
        _said.add(reason)
        warnings.warn(
            f"PyTorch's own operations run in place of fused kernels: {reason}", KvsearchWarning, stacklevel=2
        )
    return reason is None


def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return _multiprocessors(device)


def _unserved(states: tuple[Tensor, ...]) -> str | None:
    """Say why kernels do not take these tensors; None: they do."""
    if not _installed():
        return "Triton is not installed (pip install 'kvsearch[gpu]')"
    kinds = {state.dtype for state in states}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        return f"they are not written for {' and '.join(sorted(str(kind).removeprefix('torch.') for kind in kinds))}"
    if (widest := max(state.shape[-1] for state in states)) > WIDEST:
        return f"they are not written for heads of {widest} numbers, {WIDEST} at most"
    device = states[0].device
    if device.type == "cuda" and (wanting := _too_old(device, states[0].dtype)) is not None:
        return wanting
    if torch.is_grad_enabled() and any(state.requires_grad for state in states):
        return "they have no backward pass"
    return None


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _too_old(device: torch.device, dtype: torch.dtype) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if capability >= needed:
        return None
    name, (major, minor) = str(dtype).removeprefix("torch."), needed
    return f"for {name} they need compute capability {major}.{minor}, and this GPU has {'.'.join(map(str, capability))}"


@cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
