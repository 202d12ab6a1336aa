"""What a decode step makes a GPU do, and how often the host waits for it, by the records of CUDA's own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kvsearch.models.memory import synchronise

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchCooperativeKernel")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuEventSynchronize")
FEW, MANY = 2, 6  # steps; the difference is free of what comes before and after them


@dataclass(frozen=True)
class Launches:
    """Kernels (a graph counts as one) and waits of the host, per step."""

    kernels: float
    waits: float


def count_launches(device: torch.device, steps: Callable[[int], object]) -> Launches | None:
    """Return what a step launches and waits for on a GPU; None on other devices.

    `steps` does so many steps. What is compiled or captured at a first step must be there before.
    """
    if device.type != "cuda":
        return None
    return per_step(_calls(device, steps, FEW), _calls(device, steps, MANY))


def per_step(few: Iterable[str], many: Iterable[str]) -> Launches:
    """Return the launches and waits of one step, given the names of CUDA's calls during `FEW` and `MANY` steps."""
    (kernels, waits), (more_kernels, more_waits) = _counts(few), _counts(many)
    return Launches((more_kernels - kernels) / (MANY - FEW), (more_waits - waits) / (MANY - FEW))


def _counts(names: Iterable[str]) -> tuple[int, int]:
    listed = list(names)
    return sum(name.startswith(LAUNCHES) for name in listed), sum(name.startswith(WAITS) for name in listed)


def _calls(device: torch.device, steps: Callable[[int], object], count: int) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    synchronise(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        steps(count)
        synchronise(device)
    return [event.name() for event in record.profiler.kineto_results.events()]
