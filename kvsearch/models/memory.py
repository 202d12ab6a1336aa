"""Memory: what a model takes, what a device has and may be used of it, and what to do where it ran out."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.core.errors import EnvironmentFault

if TYPE_CHECKING:
    import torch

FP32 = 4
CPU_BYTES = 8 * 2**30
GPU_SHARE = 0.5

# What allocators say: CUDA's, torch's on a CPU, and libraries of CUDA.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a model takes to read prompts and to go on from them, in parts that are there at the same time.

    `weights`; `cache`: what is kept of prompts and of the tokens after them; `dense`: keys and values before anything
    leaves, of one layer, or of all where prompts are read in chunks; `activations` of the layer that is computed;
    `masks` of padding or of a chunk; `logits` of the last tokens; `scratch`: what policies score with.
    """

    weights: int
    cache: int
    dense: int
    activations: int
    masks: int
    logits: int
    scratch: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(astuple(self))


def estimate_reading_memory(
    model: Any, lengths: Sequence[int], cache: int, chunk: int | None = None, scratch: int = 0, gathered: int = 0
) -> MemoryNeeds:
    """Estimate the memory of prefill and decoding for a batch of prompts of these lengths, by arithmetic.

    `cache` are the bytes that are kept, `scratch` those that policies score with. Prompts of different lengths are read
    one after the other, on a CPU padded to the longest. Weights may be on no device.

    `chunk` tokens are read at a time (None: whole prompts), while policies have `gathered` so many bytes. That is
    counted at the moment that takes most: in an MLP, in attention, or as a layer evicts. Flash attention, on CUDA in
    half precision, takes no mask.
    """
    from kvsearch.models.architecture import describe, find_text_config
    from kvsearch.models.weights import count_stored_bytes

    shape = describe(model)
    config = find_text_config(model)
    number = model.dtype.itemsize
    length = max(lengths)
    is_padded = model.device.type == "cpu" and len(set(lengths)) > 1
    # Without padding prompts of one length are read together, neighbours alone: see `read_prompts`.
    batch = len(lengths) if is_padded else max(len(list(alike)) for _, alike in groupby(lengths))
    rows = min(length, chunk or length)
    queries = shape.query_heads * shape.head_dim
    entry = 2 * shape.kv_heads * shape.head_dim
    # of a token: embedding, rotary tables, input of the layer, residual, its norm; and in the MLP, or in attention
    inner = getattr(config, "intermediate_size", None) or 4 * shape.hidden_size
    in_fp32 = 0 if number == FP32 else 2 * FP32 // number * shape.hidden_size
    token = batch * rows * number
    always = token * (4 * shape.hidden_size + 2 * shape.head_dim)
    in_mlp = always + token * max(3 * inner, in_fp32)
    in_attention = always + token * (4 * queries + 2 * entry)
    seen = rows * length * (batch if is_padded else 1)  # a mask; under one, heads of a group do not share their entries
    masks = seen * (1 + number) + 2 * batch * queries * length * number
    dense = batch * length * entry * number  # of a layer
    if rows == length:
        moments = [(dense, max(in_mlp, in_attention), masks if is_padded else 0, scratch)]
    else:  # what a layer keeps takes the place of what it had, once the last chunk has passed
        everything = max(0, len(shape.full_layers) * dense - cache)
        has_flash = model.device.type in ("cuda", "meta") and number < FP32
        moments = [
            (everything, in_mlp, seen, gathered),
            (everything, in_attention, seen if has_flash else masks, gathered),
            (everything + 2 * dense, always, seen, gathered + scratch),
        ]
    dense, activations, masks, scratch = max(moments, key=sum)
    return MemoryNeeds(
        weights=count_stored_bytes(model.modules()),
        cache=cache,
        dense=dense,
        activations=activations,
        masks=masks,
        logits=len(lengths) * config.vocab_size * (number + FP32),
        scratch=scratch,
    )


def find_accelerator(device: torch.device) -> Any | None:
    """Find torch's module of a device with its own memory, such as `torch.cuda`; None for the host."""
    if device.type in ("cpu", "meta"):
        return None
    import torch

    module = torch.get_device_module(device)
    return module if hasattr(module, "mem_get_info") else None


def find_best_device() -> str:
    """Return the GPU with the most free memory, "cpu" where there is none."""
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return str(max(gpus, key=measure_free_bytes, default="cpu"))


def has_bfloat16() -> bool:
    """Tell whether this machine's processor multiplies matrices of bfloat16 itself: AMX or AVX512-BF16."""
    import torch

    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()  # no public name


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished its queued work."""
    if (module := find_accelerator(device)) is not None:
        module.synchronize(device)


def find_default_memory(device: torch.device, cpu_bytes: int = CPU_BYTES, gpu_share: float = GPU_SHARE) -> int:
    """Return the bytes that computation may use beside the weights: `cpu_bytes`, or a share of a GPU's free memory."""
    module = find_accelerator(device)
    return cpu_bytes if module is None else int(module.mem_get_info(device)[0] * gpu_share)


def measure_free_bytes(device: torch.device) -> int:
    """Measure a device's free bytes; on the host the file cache counts as free."""
    if (module := find_accelerator(device)) is not None:
        return int(module.mem_get_info(device)[0])
    try:
        with Path("/proc/meminfo").open() as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, on a device or on the host, as torch and Python say it."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(said in message for said in _OUT_OF_MEMORY)


def release_memory() -> None:
    """Release the memory of a failed attempt, so that a smaller one finds room."""
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
    from kvsearch.models.weights import count_stored_bytes, list_named_tensors

    if not any(weight.is_meta for weight in model.parameters()):
        return
    total = count_stored_bytes(model.modules())
    missing = sum(tensor.nbytes for _, tensor in list_named_tensors(model) if tensor.is_meta)
    raise EnvironmentFault(
        f"model {name!r} does not fit: {missing / MB:,.1f} of its {total / MB:,.1f} MB of weights were left outside of "
        f"the device, where plans cannot be made or run: free {missing / MB:,.1f} MB there, or use more GPUs "
        "(--device-map auto), --dtype bfloat16, a smaller or quantised model, or --device cpu"
    )
