"""A plan bound to a model: policy objects, and budgets for the prompt at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvsearch.budgets.dynamic import Allocation, create_allocation
from kvsearch.core.errors import EnvironmentFault, IncompatibleError, warn_once
from kvsearch.models.architecture import FULL_ATTENTION, describe, find_attention_modules, find_class_name
from kvsearch.models.memory import FP32, MemoryNeeds, estimate_reading_memory, measure_free_bytes, release_memory
from kvsearch.plan.arithmetic import compute_budgets
from kvsearch.plan.schema import NO_CARRY, Carry
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.carry import REFERENCES
from kvsearch.policies.registry import build_policy
from kvsearch.policies.scoring import choose_chunk_bytes
from kvsearch.runtime.decode.rule import decode_needs

if TYPE_CHECKING:
    from kvsearch.plan import Phase, Plan

POSITION = 4  # bytes beside the keys and values of an entry
RANKING = 12 * FP32  # bytes that scores, ranks and their sorting take of an entry

BudgetTable = Callable[[int], NDArray[np.int64]]


@dataclass(frozen=True)
class PhaseProgram:
    """One phase: the policy of each governed layer, and its budgets.

    `table` maps a prompt length (real tokens) to entries [governed layers, Hkv], rows in ascending layer order.
    """

    policies: dict[int, Policy]
    table: BudgetTable
    floor: int = 1  # the fewest entries a head may get where budgets are shared
    carries: Mapping[int, Carry] = field(default_factory=dict)  # by layer, what its entries carry of those that leave
    allocation: Allocation | None = None  # how they are shared; set by the program
    _tables: dict[int, NDArray[np.int64]] = field(init=False, default_factory=dict, compare=False, repr=False)

    def entries(self, length: int) -> int:
        """Count the entries of all layers and heads that the budgets allow after a prompt of `length` tokens."""
        table = self.table(length)
        if self.allocation is not None:
            room = np.full_like(table, length)
            # A pool cannot give out more than there is, as a whole or in every layer.
            axis = None if self.allocation.shares_layers else -1  # one pool of all layers, or one of each
            return int(np.minimum(table.sum(axis), room.sum(axis)).sum())
        table = np.minimum(table, length)
        for row, (_, policy) in enumerate(sorted(self.policies.items())):
            table[row] = [length if policy.keeps_all(budget, length) else budget for budget in table[row].tolist()]
        return int(table.sum())

    def budgets(self, layer: int, lengths: Sequence[int]) -> Tensor:
        """Return the entries per sequence and kv head of one layer, [B, Hkv] int64."""
        for length in set(lengths) - set(self._tables):
            self._tables[length] = self.table(length)
        row = sorted(self.policies).index(layer)
        return torch.from_numpy(np.stack([self._tables[length][row] for length in lengths]))


@dataclass(frozen=True)
class Program:
    """What each full-attention layer does: once at the end of the prompt, and after every token that follows.

    A phase that is None leaves the cache alone: without prefill the prompt stays whole until the first decode step,
    without decode the cache grows by one entry per token.
    """

    prefill: PhaseProgram | None = None
    decode: PhaseProgram | None = None
    allocation: Allocation | None = None  # how budgets are divided for each prompt; None: they are as planned
    plan: Plan | None = field(default=None, compare=False, repr=False)  # the plan that this is made of, if it is

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if (phase := getattr(self, name)) is not None:
                # The dataclass is frozen; a phase counts entries by how its budgets are shared.
                object.__setattr__(self, name, replace(phase, allocation=self.allocation))
        for policy in self.decode.policies.values() if self.decode else ():
            # For its error: a policy that cannot decide while decoding is refused before anything runs.
            decode_needs(policy)
        for phase in self.phases if self.allocation else ():
            for layer, policy in sorted(phase.policies.items()):
                self.allocation.check(policy, f"layer {layer}", layer in phase.carries)  # type: ignore[union-attr]

    @property
    def reads_twice(self) -> bool:
        """Whether a policy scores entries by a second reading of the prompt."""
        policies = {} if self.prefill is None else self.prefill.policies
        return any(policy.needs().reread is not None for policy in set(policies.values()))

    @classmethod
    def from_plan(cls, model: nn.Module, plan: Plan) -> Program:
        """Check `plan` against `model` and build its policies.

        Raises:
            IncompatibleError: the plan is for another model, or budgets a layer the runtime must leave alone.
            UsageError: an unknown policy or parameter, or a policy without a decode rule in the decode phase.
        """
        from kvsearch.budgets.plan_checks import check_plan
        from kvsearch.models.fingerprint import compute_fingerprint

        plan.model.require(compute_fingerprint(model), "this plan")
        check_plan(plan, "this plan")
        kinds = describe(model).kinds
        allocation = create_allocation(plan.allocation.name, plan.allocation.params)
        clip = allocation is None
        program = cls(
            _make_phase(plan, "prefill", kinds, clip), _make_phase(plan, "decode", kinds, clip), allocation, plan
        )
        for policy in program.policies:
            policy.check_model(plan.model)
        warn_unfit(model, program.policies)
        return program

    @classmethod
    def uniform(
        cls,
        model: nn.Module,
        policy: Policy,
        entries: Callable[[int], int],
        allocation: Allocation | None = None,
    ) -> Program:
        """Use one policy and prefill budget in all full-attention layers and heads; `entries` maps length to budget.

        Examples:
            >>> from kvsearch.models.loading import load
            >>> from kvsearch.policies import create_policy
            >>> from kvsearch.runtime import Program
            >>> program = Program.uniform(load("bundled").model, create_policy("keydiff"), lambda length: length // 4)
            >>> program.prefill.entries(1000)  # of 6 layers with 4 kv heads
            6000
        """
        shape = describe(model)
        size = (len(shape.full_layers), shape.kv_heads)

        def table(length: int) -> NDArray[np.int64]:
            return np.full(size, entries(length), np.int64)

        return cls.of_policy(model, policy, {"prefill": table}, allocation=allocation)

    @classmethod
    def of_policy(
        cls,
        model: nn.Module,
        policy: Policy,
        tables: Mapping[Phase, BudgetTable],
        floor: int = 1,
        allocation: Allocation | None = None,
    ) -> Program:
        """Use one policy in all full-attention layers, with the budgets of `tables` in its phases."""
        policies = dict.fromkeys(describe(model).full_layers, policy)
        phases = {phase: PhaseProgram(policies, table, floor) for phase, table in tables.items()}
        return cls(phases.get("prefill"), phases.get("decode"), allocation)

    @property
    def layers(self) -> tuple[int, ...]:
        """The model layers governed in some phase, ascending."""
        return tuple(sorted({layer for phase in self.phases for layer in phase.policies}))

    @property
    def phases(self) -> tuple[PhaseProgram, ...]:
        """The phases that do something."""
        return tuple(phase for phase in (self.prefill, self.decode) if phase is not None)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of all phases and layers."""
        return tuple(policy for phase in self.phases for policy in phase.policies.values())


def make_full_program(model: nn.Module) -> Program:
    """Return the program that evicts nothing."""
    return Program.uniform(model, create_policy("full"), int)


def _make_phase(plan: Plan, name: Phase, kinds: Sequence[str], clip: bool) -> PhaseProgram | None:
    """Return the phase "prefill" or "decode"; `clip`: no head gets more than the prompt has."""
    phase = plan.phases.get(name)
    if phase is None:
        return None
    foreign = [layer for layer in phase.planned_layers if kinds[layer] != FULL_ATTENTION]
    if foreign:
        what = ", ".join(sorted({kinds[layer] for layer in foreign}))
        raise IncompatibleError(
            f"the plan budgets layers {foreign}, which are of kind {what} and belong to the model: only layers of kind "
            f"{FULL_ATTENTION} can be planned"
        )
    policies = {index: build_policy(layer.policy) for index, layer in enumerate(phase.layers) if layer is not None}
    carries = {index: carry for index, carry in enumerate(phase.carries) if carry != NO_CARRY}
    return PhaseProgram(policies, partial(compute_budgets, plan, name, clip=clip), max(plan.floor, 1), carries)


KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")  # what transformers calls the normalisation of keys
# Rank by the length of a key; a third-party class says so by `key_norms = True`. KeyDiff is not among them: it compares
# directions, which do not change when every key gets the same length.
BY_KEY_NORM = ("knorm",)


def warn_unfit(model: nn.Module, policies: Iterable[Policy]) -> None:
    """Warn, once per policy and model class, of policies whose scores say little on this model."""
    named = {policy.name for policy in policies if policy.name in BY_KEY_NORM or getattr(policy, "key_norms", False)}
    for name in sorted(named) if has_key_norm(model) else ():
        warn_once(
            f"{find_class_name(model)} normalises its keys, so their norms are nearly equal and say little about what "
            f"matters: policy {name} ranks by them, another policy will likely keep more",
            stacklevel=3,
        )


def has_key_norm(model: nn.Module) -> bool:
    """Tell whether an attention layer of `model` normalises keys before it caches them, as in Qwen3 and Gemma3."""
    norms = (getattr(module, name, None) for module in find_attention_modules(model).values() for name in KEY_NORMS)
    return any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms)


def count_entries(model: Any, phase: PhaseProgram | None, length: int) -> int:
    """Count the entries of all full-attention layers after a phase; layers that it leaves alone keep a whole prompt."""
    shape = describe(model)
    planned = 0 if phase is None else phase.entries(length)
    unplanned = len(shape.full_layers) - (0 if phase is None else len(phase.policies))
    return planned + unplanned * shape.kv_heads * length


def estimate_prompt_bytes(model: Any, program: Program, lengths: Sequence[int], tokens: int = 0) -> int:
    """Estimate the bytes of compressed prompts: keys, values and positions of full-attention layers.

    Log weights of entries that carry something count. Under a program without a decode phase, `tokens` more of every
    prompt have come.
    """
    shape = describe(model)
    phase = program.prefill
    more = 0 if program.decode else tokens
    entries = len(lengths) * len(shape.full_layers) * shape.kv_heads * more
    weights = 0
    for length in lengths:
        entries += count_entries(model, phase, length)
        if phase is not None and phase.carries:
            table = np.minimum(phase.table(length), length)
            weights += int(table[[layer in phase.carries for layer in sorted(phase.policies)]].sum())
    size = model.dtype.itemsize
    return int(entries * (2 * shape.head_dim * size + POSITION) + weights * size)


def estimate_memory(
    model: Any, program: Program, lengths: Sequence[int], chunk: int | None = None, tokens: int = 0
) -> MemoryNeeds:
    """Estimate the memory of a batch of prompts of these lengths under a program, with `tokens` more of each."""
    shape = describe(model)
    scoring = [policy.needs() for policy in program.policies if policy.name != "full"]
    entries = len(lengths) * max(lengths) * shape.kv_heads
    rows = max((max(lengths) if need.column_sums else need.query_rows for need in scoring), default=0)
    # Scores are made in chunks of this size, however long the prompt is.
    logits = min(choose_chunk_bytes(model.device), 2 * FP32 * shape.group * entries * rows)
    scratch = logits + entries * (RANKING + FP32 * shape.head_dim) if scoring else 0
    queries = max((need.query_rows for need in scoring), default=0) * shape.head_dim * model.dtype.itemsize
    if program.prefill is not None and program.prefill.carries:
        queries += REFERENCES * shape.head_dim * model.dtype.itemsize
        # of one layer: values once more, and reference logits of a few heads at a time
        scratch += entries * shape.head_dim * model.dtype.itemsize + 2 * choose_chunk_bytes(model.device)
    sums = FP32 * max(lengths) if any(need.column_sums for need in scoring) else 0
    gathered = len(lengths) * len(shape.full_layers) * shape.query_heads * (queries + sums)
    return estimate_reading_memory(
        model, lengths, estimate_prompt_bytes(model, program, lengths, tokens), chunk, scratch, gathered
    )


def require_room(model: Any, programs: Mapping[str, Program], lengths: Sequence[int], chunk: int | None = None) -> None:
    """Raise an EnvironmentFault if a batch of prompts of these lengths does not fit under one of the programs.

    A model without weights has no device that could be too small.
    """
    # On several devices their memory counts together: what is read is spread as the weights are.
    devices = {weight.device for weight in model.parameters() if not weight.is_meta}
    needs = {name: estimate_memory(model, program, lengths, chunk) for name, program in programs.items()}
    name, needed = max(needs.items(), key=lambda item: item[1].total)
    beside = needed.total - needed.weights
    if not devices or beside <= sum(map(measure_free_bytes, devices)):
        return
    release_memory()  # what torch holds for later is free, too
    if beside > (free := sum(map(measure_free_bytes, devices))):
        prompts = f"{len(lengths)} prompts of up to" if len(lengths) > 1 else "a prompt of"
        raise EnvironmentFault(
            f"{name} needs {beside / 1e9:.2f} GB beside the weights for {prompts} {max(lengths):,} tokens "
            f"({needed.cache / 1e9:.2f} GB are the cache), and {', '.join(sorted(map(str, devices)))} has "
            f"{free / 1e9:.2f} GB free: {(beside - free) / 1e9:.2f} GB are missing; keep fewer entries, shorten the "
            "prompt, or spread the model with --device-map auto"
        )
