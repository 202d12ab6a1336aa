"""A policy with given scores, random ragged programs, and the reference that every runtime result is held against.

The reference is eager attention over a full `DynamicCache` in which evicted keys get a mask of -inf, in every forward
pass after the prompt's. It shares nothing with ragged storage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from kvsearch.models.architecture import describe
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.plan import Plan
from kvsearch.plan.origin import ContextRecord
from kvsearch.policies import Observation, Policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME, Output, use_attention
from kvsearch.runtime.attention import use_attention as running
from kvsearch.runtime.program import PhaseProgram
from tests.plan.builders import PROVENANCE, make_plan, phase_dict

TOLERANCE = 2e-5
Kept = dict[int, Tensor]  # model layer -> [B, Hkv, T] bool


@dataclass(frozen=True)
class GivenScores(Policy):
    """Scores fixed beforehand."""

    name: ClassVar[str] = "given"
    source: ClassVar[str] = "tests"

    scores: Tensor = field(default_factory=lambda: torch.zeros(0))

    def score(self, observation: Observation) -> Tensor:
        return self.scores.to(observation.keys.device)


@dataclass(frozen=True)
class Eviction:
    """A program with random scores and random ragged budgets, and what it must keep of the prompt."""

    program: Program
    kept: Kept


def random_eviction(model: Any, mask: Tensor, seed: int = 0) -> Eviction:
    """Evict at random, other entries in every layer, sequence and head, 1 to 90% of them, for the prompt of `mask`."""
    shape = describe(model)
    planned = shape.full_layers
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    scores = torch.rand(len(planned), len(mask), shape.kv_heads, mask.shape[1], generator=generator)
    ratios = rng.uniform(0.01, 0.9, (len(planned), shape.kv_heads))

    def table(length: int) -> np.ndarray:
        return np.maximum(1, np.round(ratios * length)).astype(np.int64)

    kept = {}
    for row, layer in enumerate(planned):
        chosen = torch.zeros(scores.shape[1:], dtype=torch.bool)
        for sequence in range(len(mask)):
            real = torch.nonzero(mask[sequence].cpu()).flatten()
            for head, budget in enumerate(table(len(real))[row]):
                best = scores[row, sequence, head, real].argsort(descending=True)[:budget]
                chosen[sequence, head, real[best]] = True
        kept[layer] = chosen
    policies = {layer: GivenScores(scores[row]) for row, layer in enumerate(planned)}
    return Eviction(Program(PhaseProgram(policies, table)), kept)


def plan_for(model: Any, budgets: list[list[int] | None], **changes: Any) -> Plan:
    """A plan of fixed SnapKV budgets for `model`; `changes` replace fields of the plan, or `policy` and `params`."""
    policy = {"name": changes.pop("policy", "snapkv"), "params": changes.pop("params", {"window": 4})}
    origin = {**PROVENANCE, "contexts": ContextRecord()}
    content = {"model": compute_fingerprint(model).model_dump(), "prefill": phase_dict(budgets, policy), **changes}
    return make_plan(budgets, **{"scaling": "fixed", "length": None, "floor": 1, "provenance": origin, **content})


@contextmanager
def reference(model: Any, kept: Kept) -> Iterator[DynamicCache]:
    """A full cache in which all but the `kept` entries of the prompt are masked once the prompt has passed."""
    with masked(model, kept):
        yield DynamicCache(config=model.config)


@torch.no_grad()
def feed(model: Any, cache: Any, pieces: Sequence[tuple[Tensor, Tensor]], seen: Tensor | None = None) -> list[Tensor]:
    """Logits [B, q, V] of consecutive pieces (ids, mask) [B, q], each one forward pass, positions as `generate` has.

    `seen` is the mask of what the cache has read before, None: nothing.
    """
    logits = []
    for ids, mask in pieces:
        seen = mask if seen is None else torch.cat([seen, mask], 1)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = model(input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache)
        cache = output.past_key_values  # the model's own, where none was given
        logits.append(output.logits)
    return logits


def one_by_one(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ids [B, n] as n pieces of one token."""
    return [(ids[:, i : i + 1], torch.ones_like(ids[:, :1])) for i in range(ids.shape[1])]


def equal_to_masking(
    model: Any, eviction: Eviction, pieces: Sequence[tuple[Tensor, Tensor]], **options: Any
) -> tuple[list[Tensor], PlanCache]:
    """The reference's logits of `pieces`, the first of which is the prompt, and the cache; the others are the same."""
    with running(model, NAME):
        cache = PlanCache(model, eviction.program, **options)
        planned = feed(model, cache, pieces)
    with reference(model, eviction.kept) as full:
        expected = feed(model, full, pieces)
    for (_, real), actual, wanted in list(zip(pieces, planned, expected, strict=True))[1:]:
        assert_close(actual[real.bool()], wanted[real.bool()])
    return expected, cache


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal up to `tolerance` times the largest expected value (or 1)."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))
    assert float((actual - expected).abs().max()) <= tolerance * scale


def kept_tokens(chosen: Tensor, mask: Tensor) -> list[list[list[int]]]:
    """The tokens of a kept mask [B, Hkv, T], per sequence and head, as indices among those that are no padding."""
    index = (mask.cumsum(-1) - 1).cpu()
    rows = zip(index, chosen.cpu(), strict=True)
    return [[tokens[head].tolist() for head in row] for tokens, row in rows]


def held_tokens(cache: PlanCache, layer: int, batch: int, heads: int) -> list[list[list[int]]]:
    """The same of a cache."""
    return [[cache.kept_positions(layer, row, head) for head in range(heads)] for row in range(batch)]


def columns(cache: PlanCache, mask: Tensor, kv_heads: int, width: int) -> Kept:
    """What each head holds as masks [B, Hkv, width] over the columns of a left-padded batch."""
    kept = {}
    for layer in cache.planned:
        shown = torch.zeros(len(mask), kv_heads, width, dtype=torch.bool)
        for row, pads in enumerate((mask == 0).sum(-1).tolist()):
            for head in range(kv_heads):
                shown[row, head, [pads + index for index in cache.kept_positions(layer, row, head)]] = True
        kept[layer] = shown
    return kept


REFERENCE = "kvsearch_masked"
_evicted: dict[int, Tensor] = {}  # by model layer, [B, Hkv, T] bool: the entries of the prompt that are not seen


def _masked_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    index: Any = module.layer_idx
    evicted = _evicted.get(index)
    if evicted is not None and key.shape[2] > evicted.shape[2]:
        bias = torch.zeros(*evicted.shape[:2], 1, key.shape[2], device=key.device)
        bias[:, :, 0, : evicted.shape[2]].masked_fill_(evicted.to(key.device), float("-inf"))
        bias = bias.repeat_interleave(query.shape[1] // key.shape[1], 1)
        mask = bias if mask is None else mask + bias
    output: Output = sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, mask, **kwargs
    )
    return output


def hide(kept: Mapping[int, Tensor]) -> None:
    """From now on, of the columns [B, Hkv, T] bool of each layer, only the `kept` ones are seen."""
    _evicted.update({layer: ~chosen for layer, chosen in kept.items()})


@contextmanager
def masked(model: Any, kept: Mapping[int, Tensor]) -> Iterator[None]:
    """Let `model` see of its prompt only what is `kept` in each layer, once the prompt has passed."""
    hide(kept)
    try:
        with use_attention(model, REFERENCE):
            yield
    finally:
        _evicted.clear()


AttentionInterface.register(REFERENCE, _masked_eager)
AttentionMaskInterface.register(REFERENCE, eager_mask)
