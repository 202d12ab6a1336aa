"""The fake accelerator in torch: `fakegpu:0` and `fakegpu:1`, and what its memory and its events say."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from accelerate import dispatch_model

from tests.torture.device.build import library

NAME = "fakegpu"


@cache
def backend() -> ctypes.CDLL:
    """Return the library, with the devices known to torch; NoCompiler where it cannot be built."""
    built = ctypes.CDLL(str(library()))
    for name in ("used_bytes", "peak_bytes", "limit_bytes"):
        getattr(built, name).restype = ctypes.c_int64
    built.set_limit.argtypes = (ctypes.c_int, ctypes.c_int64)
    built.take_events.restype = ctypes.c_char_p
    built.install()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(built))
    torch.utils.generate_methods_for_privateuse1_backend()
    return built


def device(index: int = 0) -> torch.device:
    """Return a device, built on first use."""
    backend()
    return torch.device(NAME, index)


def spread(model: Any) -> Any:
    """Put the first half of a model's layers on one device and the others on the other, as device maps do."""
    layers = len(model.model.layers)
    places = {f"model.layers.{index}": device(index * 2 // layers) for index in range(layers)}
    places |= {f"model.{name}": device(0) for name in ("embed_tokens", "rotary_emb")}
    return dispatch_model(model, {**places, "model.norm": device(1), "lm_head": device(1)})


def events() -> list[tuple[str, str]]:
    """Return what happened since the last call, as (kind, operator); kinds are kernel, wait and copy."""
    lines = backend().take_events().decode().splitlines()
    return [(kind, what) for kind, what in (line.split(" ", 1) for line in lines)]


@contextmanager
def recording() -> Iterator[None]:
    """Write down events; what was written down before is forgotten."""
    events()
    backend().record(1)
    try:
        yield
    finally:
        backend().record(0)


@contextmanager
def room(bytes_free: int, index: int = 0) -> Iterator[None]:
    """Let a device have no more than so many bytes free."""
    before = backend().limit_bytes(index)
    backend().set_limit(index, backend().used_bytes(index) + bytes_free)
    try:
        yield
    finally:
        backend().set_limit(index, before)


def _index(device: Any = None) -> int:
    if device is None:
        return backend().current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return backend().current_device() if index is None else index


@contextmanager
def _current(device: Any) -> Iterator[None]:
    """Let a device be the current one for a while, as `torch.cuda.device` does."""
    before = backend().current_device()
    backend().set_device(_index(device))
    try:
        yield
    finally:
        backend().set_device(before)


def _module(built: ctypes.CDLL) -> ModuleType:
    """Make `torch.fakegpu`: what torch, transformers and accelerate look for, and memory as `torch.cuda` tells it."""
    made: Any = ModuleType(f"torch.{NAME}")
    made.is_available = made.is_initialized = lambda: True
    made.is_bf16_supported = lambda including_emulation=True: True
    made._is_in_bad_fork = lambda: False
    made._lazy_init = made.empty_cache = lambda: None
    made.synchronize = lambda device=None: None
    made.device_count, made.current_device, made.set_device = (
        built.device_count,
        built.current_device,
        lambda device: built.set_device(_index(device)),
    )
    made.manual_seed = made.manual_seed_all = lambda seed: None
    made.get_rng_state = lambda device=None: torch.get_rng_state()
    made.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.get_device_name = lambda device=None: "fake accelerator"
    made.memory_allocated = lambda device=None: built.used_bytes(_index(device))
    made.max_memory_allocated = lambda device=None: built.peak_bytes(_index(device))
    made.reset_peak_memory_stats = lambda device=None: built.reset_peak(_index(device))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = _index(device)
        return built.limit_bytes(index) - built.used_bytes(index), built.limit_bytes(index)

    made.mem_get_info = mem_get_info
    made.device = _current
    return made
