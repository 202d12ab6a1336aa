"""Methods by name, as papers compare them: an eviction policy, a layout of budgets, and what is shared out per prompt.

Budgets are laid out anew for every prompt length, with the same exact total for all methods of one size. A policy with
budgets that need no measurement can be written as a plan, too, see `direct_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.budgets.allocator import Uniform
from kvsearch.budgets.dynamic import Allocation, create_allocation
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.config.options import parse_setting
from kvsearch.core.arrays import Ints
from kvsearch.core.errors import UsageError
from kvsearch.core.limits import MOST_ENTRIES
from kvsearch.core.naming import check_unique
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PHASES, Phase, Plan, Profile, Size
from kvsearch.plan.origin import ContextRecord, provenance
from kvsearch.policies import Policy
from kvsearch.runtime import Program
from kvsearch.strategies.build import Chosen, build_plan, check_mean, round_ratios

Heads = tuple[int, int]  # layers, kv heads


@dataclass(frozen=True)
class Formula:
    """Budgets that need no measurement. `floor` is what every head gets first, as far as the total reaches."""

    allocator: Uniform | Pyramid
    floor: int

    def budgets(self, total: int, length: int, heads: Heads) -> Ints:
        """Return budgets [L, Hkv] that sum to `total`, each at most `length`."""
        least = min(self.floor, length, total // (heads[0] * heads[1]))
        budgets: Ints = self.allocator.allocate(np.zeros(heads), total, np.full(heads, least), np.full(heads, length))
        return budgets

    def definition(self) -> dict[str, Any]:
        """Return all that the budgets depend on but the arguments, as JSON."""
        return {"allocator": self.allocator.name, "options": asdict(self.allocator), "floor": self.floor}


@dataclass(frozen=True)
class Calibrated:
    """Budgets looked up in a profile at the share that the total evicts of the prompt at hand."""

    profile: Profile

    def budgets(self, total: int, length: int, heads: Heads) -> Ints:
        """Return budgets [L, Hkv] that sum to `total`; UsageError if the profile has no table of local ratios."""
        size = heads[0] * heads[1]
        floor = min(max(self.profile.metadata.floor, 1), length, total // size)
        if total >= length * size:
            return np.full(heads, length, dtype=np.int64)
        return round_ratios(self.profile.local_ratios(1 - total / (length * size)), length, total, floor)

    def definition(self) -> dict[str, Any]:
        """Return all that the budgets depend on but the arguments, as JSON."""
        return {
            "profile_sha256": sha256(self.profile.to_bytes()).hexdigest(),
            "calibrated": self.profile.metadata.method,
        }


Layout = Formula | Calibrated


@dataclass(frozen=True)
class SizedTable:
    """The budgets of a layout at a size, [L, Hkv] by the length of a prompt."""

    layout: Layout
    size: Size
    heads: Heads
    decode: bool

    def __call__(self, length: int) -> Ints:
        """Return the budgets for a prompt of `length` tokens."""
        count = self.heads[0] * self.heads[1]
        total = self.size.held(length, count)
        # what a decode phase may hold is not bound by the prompt: the cache has yet to grow
        most = max(length, -(-total // count)) if self.decode else length
        return self.layout.budgets(min(total, most * count), most, self.heads)


@dataclass(frozen=True)
class Method:
    """A policy for all full-attention layers, the layout of its budgets, and an allocation (None: they hold as laid).

    `source` is where a profile was read from, for messages.
    """

    name: str
    policy: Policy
    layout: Layout
    allocation: Allocation | None = None
    source: Path | None = field(default=None, compare=False)

    @property
    def contexts(self) -> ContextRecord | None:
        """What its profile was fitted on: nothing without one, None where that is not known."""
        return (
            self.layout.profile.metadata.provenance.contexts if isinstance(self.layout, Calibrated) else ContextRecord()
        )

    def check(self, sizes: Sequence[Size]) -> None:
        """Find what is wrong with the sizes before a model is loaded.

        Raises:
            UsageError: a budget below what the policy protects, or an allocation that cannot share its entries.
        """
        try:
            for size in sizes:
                if size.budget is not None:
                    check_request(self.policy, size, self.allocation)
                elif self.allocation is not None:
                    self.allocation.check(self.policy, "allocation")
        except UsageError as error:
            raise UsageError(f"method {self.name}: {error}") from error

    def program(self, loaded: LoadedModel, size: Size, phases: str = "prefill") -> Program:
        """Return the method on a model, in the phases of that name: prefill, decode or both.

        Prefill budgets sum to `Size.held`, or to all of a shorter prompt. Decode budgets sum to `Size.held` always.

        Raises:
            IncompatibleError: the profile is of another model.
            UsageError: the allocation cannot share the policy's entries, or the policy has no decode rule.
        """
        self.policy.check_model(loaded.fingerprint)
        if isinstance(self.layout, Calibrated):
            metadata = self.layout.profile.metadata
            metadata.model.require(loaded.fingerprint, f"the profile {self.source or self.name}")
        shape = describe(loaded.model)
        heads = (len(shape.full_layers), shape.kv_heads)
        tables = {phase: SizedTable(self.layout, size, heads, phase == "decode") for phase in PHASES[phases]}
        return Program.of_policy(loaded.model, self.policy, tables, self.policy.least, self.allocation)

    def definition(self, size: Size, phases: str) -> dict[str, Any]:
        """Return everything that decides what is kept, as JSON."""
        shared = None
        if self.allocation is not None:
            shared = {"name": self.allocation.name, "options": self.allocation.parameters()}
        return {
            "policy": {"name": self.policy.name, "params": self.policy.parameters()},
            "budgets": self.layout.definition(), "allocation": shared, "size": size.as_json(), "phases": phases,
        }  # fmt: skip


def parse_allocation(text: str) -> Allocation | None:
    """Read an allocation from NAME or NAME:option=value,option=value; None is "static".

    Raises:
        UsageError: the text is not of that form, or there is no such allocation, option or value.
    """
    name, colon, options = text.partition(":")
    items = options.split(",") if colon else []
    if not name.strip() or not all(all(part.strip() for part in item.partition("=")) for item in items):
        raise UsageError(f"allocation {text!r} is not of the form NAME or NAME:option=value,option=value")
    pairs = [parse_setting(item) for item in items]
    check_unique(f"allocation {text!r}:", [key for key, _ in pairs])
    return create_allocation(name.strip(), dict(pairs))


def check_request(policy: Policy, size: Size, allocation: Allocation | None = None) -> None:
    """Find what is wrong with a request before a model is loaded.

    Raises:
        UsageError: a ratio without a length, a size below what the policy protects or that evicts nothing, or an
            allocation that cannot share the policy's entries.
    """
    size.require_length()
    mean = size.mean(size.length or 0)
    kept = f"{policy.name} always keeps ({policy.sink_count} sinks, {policy.recent_count} recent)"
    check_mean(mean, policy.least, size.length, kept, "lower them with --set")
    if policy.exempt(int(mean), 1):
        raise UsageError(
            f"{policy.name} never evicts heads with budgets of {mean:g} entries on average: see its description"
        )
    if allocation is not None:
        allocation.check(policy, "--allocation")


def direct_plan(
    loaded: LoadedModel,
    policy: Policy,
    size: Size,
    phases: Sequence[Phase],
    allocator: Uniform | Pyramid,
    allocation: Allocation | None = None,
) -> Plan:
    """`policy` for every full-attention layer of a model, with budgets that need no measurement.

    With a ratio, budgets are for prompts of `size.length` tokens and scale with the prompt at hand. The total is
    exact: what is left by rounding goes to the first heads. `allocation` shares what the budgets add up to anew for
    every prompt.

    Raises:
        UsageError: as `check_request` raises it.
    """
    check_request(policy, size, allocation)
    shape = describe(loaded.model)
    heads = (len(shape.full_layers), shape.kv_heads)
    total = size.total(size.length or 0, heads[0] * heads[1])
    budgets = Formula(allocator, policy.least).budgets(total, size.length or MOST_ENTRIES, heads)
    chosen = Chosen((policy.spec,) * heads[0], budgets)
    settings = {"ratio": size.ratio, "budget": size.budget, **asdict(allocator)}
    return build_plan(
        loaded.fingerprint,
        shape.full_layers,
        dict.fromkeys(phases, chosen),
        provenance(allocator.name, 0, None, settings, ContextRecord()),
        policy.least,
        size.scaling,
        size.length,
        allocation,
    )
