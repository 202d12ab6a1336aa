"""Memory of a device: how much may be used unless told otherwise, and what to do where it ran out."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.core.errors import EnvironmentFault

if TYPE_CHECKING:
    import torch

CPU_BYTES = 8 * 2**30
GPU_SHARE = 0.5

# What allocators say: CUDA's, torch's on a CPU, and libraries of CUDA.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def accelerator(device: torch.device) -> Any | None:
    """Return torch's module of a device that counts its own memory, such as `torch.cuda`; None of the host."""
    if device.type in ("cpu", "meta"):
        return None
    import torch

    module = torch.get_device_module(device)
    return module if hasattr(module, "mem_get_info") else None


def best_device() -> str:
    """Return the GPU with the most free memory, "cpu" where there is none."""
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return str(max(gpus, key=free_bytes, default="cpu"))


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was asked to do."""
    if (module := accelerator(device)) is not None:
        module.synchronize(device)


def default_memory(device: torch.device, cpu_bytes: int = CPU_BYTES, gpu_share: float = GPU_SHARE) -> int:
    """Return the bytes that work beside the weights may take: `cpu_bytes`, or a share of what a GPU has free."""
    module = accelerator(device)
    return cpu_bytes if module is None else int(module.mem_get_info(device)[0] * gpu_share)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be taken on a device; of a host those that its file cache would give back, too."""
    if (module := accelerator(device)) is not None:
        return int(module.mem_get_info(device)[0])
    try:
        with Path("/proc/meminfo").open() as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, on a device or on the host, as torch and Python say it."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(said in words for said in _OUT_OF_MEMORY)


def free_memory() -> None:
    """Return what a failed attempt left behind, so that a smaller one finds room."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


MB = 10**6


def refuse_offloaded(model: Any, name: str) -> None:
    """Raise EnvironmentFault if weights were left on the host or the disk, as device maps do with what does not fit.

    They are brought one by one while the model runs and are nowhere in between: policies that read a projection, and
    the fingerprint, would find nothing there.
    """
    if not any(one.is_meta for one in model.parameters()):
        return
    total = sum(parameter.nbytes for parameter in model.parameters())
    missing = sum(parameter.nbytes for parameter in model.parameters() if parameter.is_meta)
    raise EnvironmentFault(
        f"model {name!r} does not fit: {missing / MB:,.1f} of its {total / MB:,.1f} MB of weights were left outside of "
        f"the device, where plans cannot be made or run: free {missing / MB:,.1f} MB there, or use more GPUs "
        "(--device-map auto), --dtype bfloat16, a smaller or quantised model, or --device cpu"
    )
