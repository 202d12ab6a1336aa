"""What a step costs an accelerator: kernels, what the host waits for, copies to the device; by source line, too."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import kvsearch
from kvsearch.kernels import attention as kernels
from kvsearch.kernels.attention import Entries
from kvsearch.policies import Policy
from kvsearch.runtime import PlanCache, Program, attention
from kvsearch.runtime.attention import NAME, use_attention
from kvsearch.runtime.shared_prefill import prefill_all
from kvsearch.runtime.store import storage
from tests.torture.device.accelerator import events, recording

KINDS = ("kernel", "wait", "copy")
PACKAGE, MODELS = Path(kvsearch.__file__).parent, Path(transformers.__file__).parent
LENGTH, ENTRIES, STEPS = 128, 64, 12  # tokens of a prompt, budget of a head, decode steps after it


@dataclass(frozen=True)
class Cost:
    """Per layer, everything outside of the layers included: kernels, what the host waits for, copies to the device."""

    kernels: float
    waits: float
    copies: float

    @classmethod
    def of(cls, found: Sequence[tuple[str, str]], layers: int) -> Cost:
        counts = Counter(kind for kind, _ in found)
        return cls(*(counts[kind] / layers for kind in KINDS))


@dataclass(frozen=True)
class Costs:
    """A prompt, the usual decode step after it (the median), and the most of everything in one step."""

    prefill: Cost
    step: Cost
    most: Cost


def even(model: Any) -> np.ndarray:
    """Budgets [L, Hkv] that are all the same."""
    return np.full((model.config.num_hidden_layers, model.config.num_key_value_heads), ENTRIES)


def ragged(model: Any) -> np.ndarray:
    """Budgets [L, Hkv] between three and five quarters of those, another one for each head of a layer."""
    heads = model.config.num_key_value_heads
    return np.tile(np.linspace(0.75, 1.25, heads) * ENTRIES, (model.config.num_hidden_layers, 1)).astype(np.int64)


def program(model: Any, policy: Policy, budgets: np.ndarray, *, decode: bool) -> Program:
    """Return the program with these budgets, whatever the prompt's length, in one phase or both."""
    tables = {"prefill": lambda _: budgets} | ({"decode": lambda _: budgets} if decode else {})
    return Program.of_policy(model, policy, tables)


def stock(model: Any, *, static: bool) -> Any:
    """Return a cache of transformers' own."""
    room = LENGTH + STEPS
    return StaticCache(config=model.config, max_cache_len=room) if static else DynamicCache(config=model.config)


@contextmanager
def flat() -> Iterator[None]:
    """Let plans without a decode phase store entries as where kernels serve; attention is one kernel, of zeros."""

    def attend(query: torch.Tensor, held: Entries, *_: Any) -> tuple[torch.Tensor, None]:
        return query.new_zeros(*query.shape[:2], held.values.shape[-1]), None

    with ExitStack() as stack:
        for module, name, made in (
            (storage, "serves", lambda *_: True),
            (attention, "serves", lambda *_: True),
            (kernels, "attend", attend),
        ):
            stack.enter_context(patch.object(module, name, made))
        yield


@torch.no_grad()
def read_prompt(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Read prompts into a cache: twice where a policy wants that. `mask` is 0 where padding; None: there is none."""
    if isinstance(cache, PlanCache):
        prefill_all(model, [cache], ids, torch.ones_like(ids) if mask is None else mask)
    else:
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def costs(model: Any, make: Callable[[], Any], ids: torch.Tensor, steps: int = STEPS) -> Costs:
    """Return what a prompt costs (the second one: weights are on the device by then), and the steps after it."""
    layers, token = model.config.num_hidden_layers, ids[:, :1]

    def prompt(cache: Any) -> Cost:
        with recording():
            read_prompt(model, cache, ids)
        return Cost.of(events(), layers)

    def step() -> Cost:
        with recording():
            model(input_ids=token, past_key_values=cache)
        return Cost.of(events(), layers)

    cache = make()
    with use_attention(model, NAME if isinstance(cache, PlanCache) else "sdpa"):
        prompt(cache)
        cache = make()
        read = prompt(cache)
        found = [step() for _ in range(steps)]
    usual, most = (Cost(*(of(getattr(one, f.name) for one in found) for f in fields(Cost))) for of in (median, max))
    return Costs(read, usual, most)


class Lines(TorchDispatchMode):
    """Says which lines of kvsearch made what happened ("" where transformers did); use it within `recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str, str]] = Counter()  # kind, operator, line

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for kind, what in events():
            self.found[kind, what, _line()] += 1
        return result


@contextmanager
def by_line() -> Iterator[Lines]:
    """Count what happens by source line."""
    with recording(), Lines() as lines:
        yield lines


def _line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}:{frame.f_lineno}"
        if path.is_relative_to(MODELS):
            return ""
        frame = frame.f_back
    return ""
