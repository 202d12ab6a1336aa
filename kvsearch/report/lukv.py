"""What `show` says of a LU-KV profile: local ratios and whether they are stable, ranking gaps, eviction losses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.calibration.analysis import lost_mass, ranking_gap, stability
from kvsearch.calibration.options import RECALL_AT
from kvsearch.errors import KvsearchWarning
from kvsearch.plan import Plan, Profile, ProfileMetadata
from kvsearch.plan.schema import STATIC
from kvsearch.report.heatmap import heatmap
from kvsearch.report.screen import facts, screen_table

if TYPE_CHECKING:
    from rich.console import RenderableType

STABILITY_SHOWN = (0.5, 0.8, 0.9)
BUDGETS_SHOWN = (1, 2, 5, 10, 20, 50)  # percent


@dataclass(frozen=True, eq=False)
class LukvView:
    """A LU-KV profile at a global eviction ratio, and what a plan of its model loses by it.

    Raises:
        UsageError: the ratio is out of range.
        IncompatibleError: the plan is of another model.
    """

    profile: Profile
    ratio: float
    plan: Plan | None = None

    @cached_property
    def ratios(self) -> NDArray[np.float64]:
        """Local eviction ratios, [L, Hkv]."""
        return self.profile.local_ratios(self.ratio)

    @cached_property
    def losses(self) -> dict[str, NDArray[np.float64]]:
        """The importance that is evicted with equal budgets, with those of the profile, and with those of the plan."""
        metadata = self.profile.metadata
        losses = {
            "uniform": lost_mass(self.profile, np.full(self.ratios.shape, 1 - self.ratio)),
            metadata.method: lost_mass(self.profile, 1 - self.ratios),
        }
        if self.plan is not None:
            metadata.model.require(self.plan.model, "this profile")
            if (name := self.plan.allocation.name) != STATIC:
                warning = f"the loss shown for the plan is that of its budgets without allocation {name}"
                warnings.warn(warning, KvsearchWarning, stacklevel=2)
            budgets, length = self.plan.budgets("prefill"), self.plan.length or metadata.length
            everything = (length,) * metadata.model.kv_heads  # what a layer outside the plan keeps
            kept = np.array([budgets[layer] or everything for layer in metadata.layers], dtype=float)
            losses["plan"] = lost_mass(self.profile, kept / length)
        return losses

    def as_json(self) -> dict[str, Any]:
        """See `View.as_json`."""
        losses = {name: loss.tolist() for name, loss in self.losses.items()}
        return {
            "metadata": self.profile.metadata.model_dump(mode="json"), "ratio": self.ratio,
            "local_ratios": self.ratios.tolist(), "stability": stability_json(self.profile),
            "ranking_gap": ranking_gap(self.profile).tolist(), "eviction_loss": losses,
            "choices": choice_lines(self.profile),
        }  # fmt: skip

    def parts(self) -> Iterator[RenderableType]:
        """See `View.parts`."""
        profile, metadata, losses = self.profile, self.profile.metadata, self.losses
        layers = metadata.layers
        answers = metadata.provenance.settings.get("answers", "given")  # all there was before it was recorded
        yield from facts({**origin(metadata, "questions"), "answers": answers})
        yield heatmap(f"local eviction ratio at {self.ratio:g}", self.ratios, layers, "{:.2f}", "mean")
        yield heatmap("recall lost to the oracle ranking", ranking_gap(profile), layers, "{:.3f}", "mean")
        lost = screen_table(f"importance evicted at {self.ratio:g}, share of the model's", ["layer", *losses])
        for row, layer in enumerate(layers):
            lost.add_row(str(layer), *(f"{loss[row].sum():.4f}" for loss in losses.values()))
        lost.add_row("all", *(f"{loss.sum():.4f}" for loss in losses.values()), style="bold")
        yield lost
        columns = ["ranking", *(f"{budget}%" for budget in BUDGETS_SHOWN)]
        kept = screen_table("importance kept at a budget, mean over heads", columns)
        for label, name in (("policy", "recall"), ("oracle", "oracle_recall")):
            curve = profile.arrays[name].mean(axis=(0, 1))
            kept.add_row(label, *(f"{curve[at]:.3f}" for at in BUDGETS_SHOWN))
        yield kept
        yield from choice_lines(profile)
        yield from stability_parts(profile, "questions", unknown="nan")


def choice_lines(profile: Profile) -> list[str]:
    """Say what a parameter that decides recalls at each of its values, and which is better; nothing if none does."""
    recall = profile.arrays.get("choice_recall")
    if recall is None:
        return []
    stated = profile.metadata.provenance.settings["choices"]
    names = stated if isinstance(stated, tuple) else (stated,)
    at = ", ".join(f"{share:.0%}" for share in RECALL_AT)
    told = "; ".join(
        f"{name} {', '.join(f'{one:.3f}' for one in row)}" for name, row in zip(names, recall, strict=True)
    )
    lines = [f"importance kept at {at} of the context, even budgets: {told}"]
    best = names[int(recall.mean(1).argmax())]
    if best != names[0]:
        lines.append(f"{best} recalls more than {names[0]}: calibrate with --set {best}")
    return lines


def origin(metadata: ProfileMetadata, noun: str) -> dict[str, Any]:
    """Return what a profile is of; `noun` says what it was measured on."""
    return {
        "model": metadata.model.short(), "method": metadata.method, noun: metadata.questions,
        "policy": f"{metadata.policy.name} {metadata.policy.params}", "length": f"{metadata.length} tokens",
        "data": metadata.provenance.settings.get("data"),
    }  # fmt: skip


def stability_json(profile: Profile) -> list[dict[str, Any]]:
    """Return how stable local ratios are at some ratios; what one question cannot tell is None."""
    found = [stability(profile, at) for at in STABILITY_SHOWN]
    return [{**without_nan(one), "verdict": one.verdict} for one in found]


def stability_parts(profile: Profile, noun: str, unknown: str) -> Iterator[RenderableType]:
    """Yield a table of how stable local ratios are and a verdict.

    `noun` says what they were measured on, `unknown` stands for what one question cannot tell.
    """
    found = [stability(profile, at) for at in STABILITY_SHOWN]
    columns = ["ratio", f"{noun} of one text", "texts", "a text and the others", f"odd/even {noun}"]
    table = screen_table("rank correlation of local ratios", columns)
    for one in found:
        values = (one.questions, one.texts, one.left_out, one.halves)
        table.add_row(f"{one.ratio:g}", *(unknown if value != value else f"{value:.2f}" for value in values))
    yield table
    yield f"at {found[1].ratio:g}: {found[1].verdict}"


def without_nan(found: Any) -> dict[str, float | None]:
    """Return the fields of a record of numbers, NaN as None."""
    return {name: None if value != value else value for name, value in found.__dict__.items()}
