"""Whether what a plan keeps of prompts fits into the memory of the model's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsearch.errors import EnvironmentFault
from kvsearch.models.architecture import describe
from kvsearch.models.memory import free_bytes, free_memory
from kvsearch.runtime.program import Program


def prompt_bytes(model: Any, program: Program, lengths: Sequence[int]) -> int:
    """Return about the bytes that compressed prompts take: keys, values and positions of full-attention layers."""
    shape = describe(model)
    phase, layers = program.prefill, len(shape.full_layers)
    entries = 0
    for length in lengths:
        planned = 0 if phase is None else phase.entries(length)
        unplanned = layers - (0 if phase is None else len(phase.policies))
        entries += planned + unplanned * shape.kv_heads * length
    return int(entries * (2 * shape.head_dim * model.dtype.itemsize + 4))


def read_bytes(model: Any, program: Program, lengths: Sequence[int], chunk: int | None = None) -> int:
    """Return about the bytes that reading prompts takes at least, beside the weights.

    That is what is kept of them, and the dense keys and values of one layer; of all layers where prompts are read in
    chunks, as what leaves is known only when the last one has passed.
    """
    shape = describe(model)
    layer = int(len(lengths) * max(lengths) * shape.kv_heads * 2 * shape.head_dim * model.dtype.itemsize)
    if chunk is not None and chunk < max(lengths):
        return layer * len(shape.full_layers)
    return prompt_bytes(model, program, lengths) + layer


def require_room(model: Any, programs: Mapping[str, Program], lengths: Sequence[int], chunk: int | None = None) -> None:
    """Raise an EnvironmentFault if a batch of prompts of these lengths does not fit under one of the programs."""
    needed = {name: read_bytes(model, program, lengths, chunk) for name, program in programs.items()}
    name, most = max(needed.items(), key=lambda item: item[1])
    devices = {one.device for one in model.parameters() if not one.is_meta}
    if most <= sum(map(free_bytes, devices)):
        return
    free_memory()  # what torch holds for later is free, too
    if most > (free := sum(map(free_bytes, devices))):
        prompts = f"{len(lengths)} prompts of up to" if len(lengths) > 1 else "a prompt of"
        raise EnvironmentFault(
            f"{name} needs {most / 1e9:.2f} GB beside the weights for {prompts} {max(lengths):,} tokens, and "
            f"{', '.join(sorted(map(str, devices)))} has {free / 1e9:.2f} GB free: {(most - free) / 1e9:.2f} GB are "
            "missing; keep fewer entries, shorten the prompt, or spread the model with --device-map auto"
        )
