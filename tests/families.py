"""Tiny random models of families, and prompts for them."""

from __future__ import annotations

import os
from typing import Any

import torch

from kvsearch.models.families import FAMILIES as ALL
from kvsearch.models.families import build

__all__ = ["ALL", "DEVICES", "FAMILIES", "SPECIAL", "build", "prompts"]

# all that is done to a model is tested on these; the others have one test each (tests/runtime/test_families.py)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
# what their attention or their other layers need is tested on these
SPECIAL = ("gpt_oss", "jamba", "lfm2", "llama4", "minimax", "qwen3_5", "qwen3_next")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
if (asked := os.environ.get("KVSEARCH_TEST_DEVICE")) is not None:  # tests of the runtime on another device only
    DEVICES = [asked]
    if asked.startswith("fakegpu"):
        from tests.device.accelerator import backend

        backend()


def prompts(batch: int, length: int, pads: int = 0, device: str = "cpu", seed: int = 0) -> tuple[Any, Any]:
    """Random ids [batch, length] and their attention mask; the first row starts with `pads` padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return ids.to(device), mask.to(device)
