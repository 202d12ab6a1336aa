"""The Exporter interface: a plan in the format of another tool, and what that format cannot express.

An exporter makes files out of a plan and lists what is lost on the way, in entries where that can be counted. Nothing
is lost in silence: what a target has no word for is listed. Where budgets become
coarser, `read` tells what the target makes of the files, from which it is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError, UsageError, require
from kvsearch.plan import ModelFingerprint, Plan, PolicySpec, Profile
from kvsearch.plan.arithmetic import compute_budgets
from kvsearch.plan.schema import NO_CARRY, STATIC
from kvsearch.runs.estimates import Estimate

if TYPE_CHECKING:
    from kvsearch.models.architecture import Architecture
    from kvsearch.models.loading import LoadedModel

WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
SINGLE_FILE = ""  # the name of the one file of a target that is no folder


Losses = Mapping[str, int | None]  # what a target cannot express: how many entries it concerns, None: not countable


@dataclass(frozen=True)
class ExportedFiles:
    """The result of an export: files by name, what they cannot express, and how they are loaded.

    The file called `SINGLE_FILE` is written at the path itself, others into the folder at that path. In lines of
    `usage`, {path} stands for it. `total` counts the entries of the plan. `at` is the prompt length at which the files
    are read back, None: that of the plan. `updated` are files that may be there and are replaced. `model` is saved in
    the folder first, where that has none.
    """

    files: Mapping[str, bytes]
    usage: tuple[str, ...]
    losses: Losses = field(default_factory=dict)
    total: int = 0
    at: int | None = None
    updated: tuple[str, ...] = ()
    model: LoadedModel | None = None

    def describe(self) -> list[str]:
        """Describe every loss in a line, with entries and percent where they are countable."""
        return [
            what
            if entries is None
            else f"{what}: {entries:,} of {self.total:,} entries ({100 * entries / self.total:.1f}%)"
            for what, entries in self.losses.items()
        ]


class PrefillBudgets:
    """The prefill budgets of a plan: `entries` [L, Hkv] of all layers, for prompts of `length` tokens.

    Those that follow the prompt are scaled to the length; None is that of the plan, if it has one. A layer that is not
    planned holds the whole prompt.

    Raises:
        IncompatibleError: the plan has no prefill phase.
        UsageError: the plan leaves layers alone, and what they hold cannot be known without a length.
    """

    def __init__(self, plan: Plan, length: int | None = None) -> None:
        if plan.prefill is None:
            raise IncompatibleError("the plan evicts while decoding only, and other tools are told budgets of a prompt")
        self.plan = plan
        self.length = at = length or plan.length
        if at is None and None in plan.prefill.layers:
            raise UsageError("the plan leaves some layers their whole cache: give the --length of your prompts")
        self.entries: Ints = np.full((plan.model.layers, plan.model.kv_heads), at or 0, dtype=np.int64)
        # without a length budgets are fixed, and no prompt is shorter than all of them together
        self.entries[list(plan.prefill.planned_layers)] = compute_budgets(plan, "prefill", at or plan.prefill.total)

    @property
    def total(self) -> int:
        return int(self.entries.sum())

    @property
    def known_length(self) -> int:
        """The prompt length; UsageError where there is none."""
        return require(self.length, "the target needs the length of a prompt, and the plan has none: give --length")

    @property
    def per_layer(self) -> list[int]:
        """Entries per kv head of each layer, the mean over its heads, rounded down."""
        return [int(row.sum()) // len(row) for row in self.entries]

    @property
    def policy(self) -> PolicySpec:
        """The policy with the most entries."""
        layers = [layer for layer in self.plan.phase("prefill").layers if layer is not None]
        specs = list({layer.policy.model_dump_json(): layer.policy for layer in layers}.values())
        return max(specs, key=lambda spec: sum(sum(layer.budget) for layer in layers if layer.policy == spec))

    def measure_policy_loss(self, what: str, differs: Callable[[PolicySpec], bool]) -> Losses:
        """Measure the entries of layers whose policy differs; empty if there are none."""
        rows = zip(self.plan.phase("prefill").policies, self.entries, strict=True)
        entries = int(sum(row.sum() for spec, row in rows if spec is not None and differs(spec)))
        return {what: entries} if entries else {}


@dataclass(frozen=True)
class PlanScores:
    """Scores of a plan on questions that a run did not choose by.

    Args:
        text: all of it, in Markdown.
        metrics: means with their intervals, by what they are of with its unit: percent, or nats per token of text.
        metric: the name of the metric that scores the tasks, "score" where they have several.
        tasks: the names of the tasks.
        datasets: the ids of those that are public datasets of the hub.
        questions: how many were asked.
    """

    text: str
    metrics: Mapping[str, Estimate]
    metric: str
    tasks: Sequence[str]
    datasets: Sequence[str]
    questions: int


@dataclass(frozen=True)
class ExportInputs:
    """Inputs of an export besides the plan or profile.

    A prompt length in tokens, the model and its shape where the target needs them, and what was measured of the plan.
    Of the folder that a plan is put into: the content of its `config.json` and its card, if it has one, and the model
    that is saved there first, None: it is there.
    """

    length: int | None = None
    architecture: Architecture | None = None
    model: Any = None  # of transformers
    scores: PlanScores | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    card: str | None = None
    unsaved: LoadedModel | None = None

    @property
    def known_architecture(self) -> Architecture:
        """The shape of the model; UsageError where it was not given."""
        return require(self.architecture, "the target is told of query heads, which a plan does not know: give --model")


class Exporter:
    """Base of exporters, each for one target: another tool, or a folder to deploy a plan."""

    needs_model: ClassVar[bool] = False


class PlanExporter(Exporter, ABC):
    """Exports a plan."""

    @abstractmethod
    def export(self, plan: Plan, inputs: ExportInputs) -> ExportedFiles:
        """Make the files for prompts of `inputs.length` tokens, by default as long as the plan's.

        Raises:
            UsageError: a length or the model is needed.
            IncompatibleError: the target has no word for such a plan at all.
        """


class BudgetExporter(PlanExporter):
    """Exports the budgets of a plan: they are written, read back, and compared.

    `coarser` says what becomes of budgets that are others then ({at} is the length), "" of a target whose files do not
    tell. `ranks` are the policies that the target has, none where `write` says itself what is lost of policies.
    `proportional` is as for `list_common_losses`.
    """

    coarser: ClassVar[str] = ""
    ranks: ClassVar[tuple[str, ...]] = ()
    proportional: ClassVar[bool | None] = False
    matches: ClassVar[bool] = False  # whether the target itself lets kept entries carry what leaves

    def export(self, plan: Plan, inputs: ExportInputs) -> ExportedFiles:
        """Write the budgets, and list the losses of budgets, policies and the plan."""
        budgets = PrefillBudgets(plan, inputs.length)
        written = self.write(budgets, inputs)
        losses: dict[str, int | None] = {}
        if self.coarser:
            at = budgets.known_length if written.at is None else written.at
            # Counted from the files as the target reads them, not from what should be in them.
            losses |= measure_budget_loss(
                budgets.entries, self.read(written.files, plan.model, at), self.coarser.format(at=at)
            )
        if self.ranks:
            what = f"the target picks entries as {self.ranks[0]} does, other policies do not"
            losses |= budgets.measure_policy_loss(what, lambda spec: spec.name not in self.ranks)
        losses |= {**written.losses, **list_common_losses(budgets, proportional=self.proportional)}
        if not self.matches:
            losses |= find_carry_loss(budgets)
        return replace(written, losses=losses, total=budgets.total)

    @abstractmethod
    def write(self, budgets: PrefillBudgets, inputs: ExportInputs) -> ExportedFiles:
        """Write the files of these budgets, with losses besides the budgets; errors as for `export`."""

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Read back the entries [L, Hkv] that a target with `coarser` budgets holds at a prompt length."""
        raise NotImplementedError


class ProfileExporter(Exporter, ABC):
    """Exports a profile, for all sizes at once."""

    name: ClassVar[str]

    @abstractmethod
    def export(self, profile: Profile, inputs: ExportInputs) -> ExportedFiles:
        """Make the files.

        Raises:
            UsageError: the profile has not what the target needs.
            IncompatibleError: the target has no word for it.
        """


def measure_budget_loss(planned: Ints, held: Ints, what: str) -> Losses:
    """Measure how many `planned` entries [L, Hkv] are not `held`, and how many are held beyond their total."""
    missing = int(np.maximum(planned - held, 0).sum())
    beyond = int((held - planned).sum())
    losses = {what: missing} if missing else {}
    return losses | ({f"{what}, and more are held than planned": beyond} if beyond > 0 else {})


def list_common_losses(budgets: PrefillBudgets, *, proportional: bool | None) -> Losses:
    """List the losses of all targets that take static budgets of prompts.

    `proportional`: whether the target's budgets follow the prompt (True), are numbers (False), or are shares of a
    total that it is told elsewhere (None).
    """
    plan = budgets.plan
    losses = []
    if plan.decode is not None:
        losses.append("eviction while decoding is left out")
    if plan.allocation.name != STATIC:
        losses.append(f"budgets that {plan.allocation.name} divides for each prompt become fixed ones")
    if proportional is True and plan.scaling == "fixed":
        losses.append(f"budgets become shares of the prompt: right at {budgets.known_length:,} tokens only")
    if proportional is False and plan.scaling == "proportional":
        losses.append(f"budgets no longer follow the prompt: they are those of {budgets.known_length:,} tokens")
    return dict.fromkeys(losses)


def find_carry_loss(budgets: PrefillBudgets) -> Losses:
    """Find the loss of entries that carry evicted ones, for targets without that; empty if none carry."""
    carries = budgets.plan.phase("prefill").carries
    entries = int(budgets.entries[[carry != NO_CARRY for carry in carries]].sum())
    what = "entries carry nothing of what leaves: log weights, and values fitted with them, are left out"
    return {what: entries} if entries else {}


def repeat_for_heads(entries: Sequence[int], heads: int) -> Ints:
    """Repeat entries per head of every layer for its heads, [L, Hkv]."""
    return np.repeat(np.array(entries, dtype=np.int64)[:, None], heads, axis=1)


def measure_head_loss(budgets: PrefillBudgets) -> Losses:
    """Measure the loss if all heads of a layer keep equally many entries."""
    even = repeat_for_heads(budgets.per_layer, budgets.plan.model.kv_heads)
    return measure_budget_loss(
        budgets.entries, even, "budgets of single heads: all heads of a layer keep the same number"
    )
