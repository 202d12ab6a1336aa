"""Does a plan do on a family of models what it should? A tiny random model answers, in a fraction of a second.

Under budgets that evict nothing the model must say what it says by itself; under ragged budgets the cache must be
smaller, and the logits those of a full cache with the evicted entries masked. What only a part of the product needs
(queries turned back, attention that goes to the output projection as it is) is looked at, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.architecture import (
    FORGETFUL,
    FULL_ATTENTION,
    LEFT_ALONE,
    UNROTATED,
    RotaryTables,
    describe,
    find_attention_modules,
    find_output_projection,
    find_unsupported,
    unrotate,
)
from kvsearch.policies.base import Policy
from kvsearch.policies.full import FullKV
from kvsearch.policies.snapkv import SnapKV
from kvsearch.runtime.attention import Output, attend_dense, run_attention, use_attention
from kvsearch.runtime.cache import PlanCache
from kvsearch.runtime.program import PhaseProgram, Program
from tests.families import REFUSED, build, prompts
from tests.runtime.helpers import columns, feed, masked, one_by_one

Verdict = Literal["supported", "partly", "refused", "FAILED"]
PROMPT, PADS, REPLY, KEPT = 40, 5, 6, (6, 20)  # tokens, and the fewest and most entries of a head
TOLERANCE = 1e-4  # of the largest logit
NOTICED = 1e-3  # eviction must move the logits by more, or the comparison says nothing
WATCHED = "kvsearch_watched"


@dataclass(frozen=True)
class FamilyReport:
    """What became of one family; `why` says what is left out, or what is wrong."""

    family: str
    verdict: Verdict
    why: str
    planned_layers: str  # "2 of 4"


def check_family(name: str) -> FamilyReport:
    """Check a tiny random model of a family; never raises for what it does."""
    verdict: Verdict = "FAILED"
    planned = "-"
    try:
        model = _uneven(build(name))
        if name in REFUSED and (problem := find_unsupported(model)):
            return FamilyReport(name, "refused", problem, planned)
        shape = describe(model)
        planned = f"{len(shape.full_layers)} of {shape.layers}"
        _check_plans(model)
        if name in REFUSED:
            raise _Wrong("it runs, and the table says that it is refused")
        limits = list(_limits(model, name))
        verdict = "partly" if limits else "supported"
        why = "; ".join(limits)
    except (_Wrong, IncompatibleError) as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - whatever a version of transformers makes of it is the finding
        why = f"{type(error).__name__}: {error}".split("\n")[0]
    return FamilyReport(name, verdict, why, planned)


class _Wrong(Exception):
    """What a family does is not what it should do."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _Wrong(problem)


@torch.no_grad()
def _uneven(model: Any) -> Any:
    """Change the weights of norms, which begin as ones and would hide that they follow a rotary embedding."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def _check_plans(model: Any) -> None:
    ids, mask = prompts(2, PROMPT, PADS)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": REPLY, "do_sample": False}
    stock = model.generate(ids, **options)
    with run_attention(model):
        full = PlanCache(model, Program.uniform(model, FullKV(), lambda length: length))
        said = model.generate(ids, past_key_values=full, **options)
        cache = PlanCache(model, _ragged(model))
        more, _ = prompts(2, REPLY - 1, 0, seed=1)
        planned = _fed(model, ids, mask, more, cache)
    _require(torch.equal(stock, said), "a plan that evicts nothing changes what the model says")
    held = columns(cache, mask, describe(model).kv_heads, PROMPT + more.shape[1])
    kept = {layer: shown[..., :PROMPT] for layer, shown in held.items()}
    entries = cache.entries() - more.shape[1]
    budgets = torch.stack([chosen.sum(-1) for chosen in kept.values()])
    _require(torch.equal(entries, budgets), "a head holds another number of entries than its budget")
    _require(int(entries.max()) <= KEPT[1], "a head holds more entries than its budget")
    _require(cache.nbytes() < full.nbytes(), "the cache is not smaller under a plan")
    everything = _fed(model, ids, mask, more, None)
    with masked(model, kept):
        expected = _fed(model, ids, mask, more, None)
    scale = float(expected.abs().max())
    apart, moved = (float((logits - expected).abs().max()) / scale for logits in (planned, everything))
    _require(apart <= TOLERANCE, f"under a plan logits are {apart:.1e} off those of masked entries")
    _require(moved > NOTICED, "nothing is seen of an eviction")


def _ragged(model: Any) -> Program:
    """Return a program of SnapKV with a budget of its own for every layer and head."""
    shape = describe(model)
    budgets: Ints = np.random.default_rng(0).integers(*KEPT, (len(shape.full_layers), shape.kv_heads), endpoint=True)
    policies: dict[int, Policy] = dict.fromkeys(shape.full_layers, SnapKV(sinks=1, window=4))
    return Program(PhaseProgram(policies, lambda _: budgets.copy()))


def _fed(model: Any, ids: Tensor, mask: Tensor, more: Tensor, cache: Any) -> Tensor:
    """Return logits [B, n, V] of tokens `more` [B, n] that follow the prompts one by one."""
    return torch.cat(feed(model, cache, [(ids, mask), *one_by_one(more)])[1:], 1)


@torch.no_grad()
def _limits(model: Any, family: str) -> Iterator[str]:
    """Yield what is left out on this model, in words."""
    shape = describe(model)
    kinds = [LEFT_ALONE[kind] for kind in dict.fromkeys(shape.kinds) if kind != FULL_ATTENTION]
    if kinds:
        yield f"its layers of {' and '.join(kinds)} are left alone"
    calls = {
        index: _Call(module) for index, module in find_attention_modules(model).items() if index in shape.full_layers
    }
    with use_attention(model, WATCHED), _watching(calls):
        model(prompts(1, PROMPT)[0], use_cache=False)
        same = all(torch.equal(call.output, call.projected) for call in calls.values())
        turned_back = all(_turns_back(call, RotaryTables(model, index)) for index, call in calls.items())
    _require(
        turned_back == (family in UNROTATED),
        f"queries turn back to position 0: {turned_back}, which UNROTATED does not say",
    )
    continues = _continues(model)
    _require(
        continues == (family not in FORGETFUL),
        f"several tokens at once continue a prompt: {continues}, which FORGETFUL does not say",
    )
    if not turned_back:
        yield "queries cannot be turned back to position 0: no policy that reads them so (expected_attention)"
    if not continues:
        yield "transformers' code for it cannot take several tokens at once after a prompt: questions belong into it"
    if not same:
        yield (
            "norms of projected values leave out a gate or norm that comes before the output projection (calibrate, "
            "policies that read them)"
        )


def _continues(model: Any) -> bool:
    """Tell whether the model's own code says the same of a text in two pieces as of all of it."""
    ids, _ = prompts(1, PROMPT)
    whole = model(ids, use_cache=False).logits[:, -1]
    start = model(ids[:, : PROMPT // 2])
    positions = torch.arange(PROMPT // 2, PROMPT)[None]
    pieces = model(ids[:, PROMPT // 2 :], position_ids=positions, past_key_values=start.past_key_values)
    return bool((pieces.logits[:, -1] - whole).abs().max() <= TOLERANCE * whole.abs().max())


class _Call:
    """One call of an attention layer: what was given to it, its queries, its output and what was projected."""

    arguments: dict[str, Any]
    query: Tensor
    output: Tensor
    projected: Tensor

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def note_arguments(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = {**({"hidden_states": args[0]} if args else {}), **kwargs}

    def note_projected(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.projected = args[0].flatten()


_calls: dict[nn.Module, _Call] = {}


def _watched(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    output = attend_dense(module, query, key, value, mask, **kwargs)
    if module in _calls:
        _calls[module].query, _calls[module].output = query, output[0].flatten()
    return output


@contextmanager
def _watching(calls: dict[int, _Call]) -> Iterator[None]:
    hooks = [call.module.register_forward_pre_hook(call.note_arguments, with_kwargs=True) for call in calls.values()]
    hooks += [
        find_output_projection(call.module).register_forward_pre_hook(call.note_projected) for call in calls.values()
    ]
    _calls.update({call.module: call for call in calls.values()})
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _calls.clear()


def _turns_back(call: _Call, tables: Callable[[Tensor], tuple[Tensor, Tensor]]) -> bool:
    """Tell whether queries turned back are those that the layer makes of the same input at position 0."""
    given, positions = call.arguments.get("position_embeddings"), torch.arange(PROMPT)
    turned = _plain(call.query, tables, positions)
    if given is None:
        at_zero = call.arguments
    else:
        parts = given if isinstance(given, tuple) else (given,)
        first = tuple(part[:, :1].expand_as(part) for part in parts)
        at_zero = {**call.arguments, "position_embeddings": first if isinstance(given, tuple) else first[0]}
    call.module(**at_zero)
    plain = _plain(call.query, tables, torch.zeros_like(positions))
    return bool((turned - plain).abs().max() <= TOLERANCE * plain.abs().max())


def _plain(query: Tensor, tables: Callable[[Tensor], tuple[Tensor, Tensor]], positions: Tensor) -> Tensor:
    cos, sin = tables(positions)
    return unrotate(query.float(), cos[None], sin[None])


AttentionInterface.register(WATCHED, _watched)
AttentionMaskInterface.register(WATCHED, sdpa_mask)
