"""Cells of a paper's table that are no scores of evaluations: selections, signals, plans, losses, profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.calibration.analysis import lost_mass, stability
from kvsearch.papers.lukv import NAMES
from kvsearch.papers.table import PaperTable
from kvsearch.plan import Profile
from kvsearch.report.paper_scores import Finished, evaluations, share_cell
from kvsearch.report.reproduced import Measured
from kvsearch.strategies.names import FULL

SHOWN_BUDGETS = (1, 2, 5, 10, 20, 50)  # percent of a prompt
SIGNALS = {("route", "cosine"): "Cosine", ("route", "ppl"): "PPL sens.", ("budgets", "entropy"): "Entropy"}
KINDS = {"route": "Eviction", "budgets": "Budget allocation"}


def selections(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:  # noqa: ARG001
    """Yield PolyKV's Table 1, a row per benchmark: all scores are of split report."""
    for one in found:
        if one.selection is None:
            continue
        row, report = one.stage.block, one.selection["report"]
        scores = {name: 100 * score["mean"] for name, score in report["scores"].items()}
        outcome = next(
            result for result in one.selection["outcomes"] if result["phases"] == one.selection["written"]["phases"]
        )
        ranked = [method["name"] for method in outcome["standings"] if method["lead"] is not None]
        top = outcome["winner"] or (ranked[0] if ranked else None)
        best = report["baseline"]
        yield Measured(row, "FullKV", scores[FULL], key=row)
        yield Measured(row, "Best baseline", scores[best], key=row, text=f"{scores[best]:.2f} ({best})")
        if top is None:
            yield Measured(row, "PolyKV Top-1", None, key=row, text="no candidate")
            continue
        yield Measured(row, "PolyKV Top-1", scores[top], key=row, text=f"{scores[top]:.2f} ({top})")
        spread = [scores[name] for name in ranked if name in scores]
        yield Measured(row, "Top-5 range", None, key=row, text=f"{min(spread):.2f} to {max(spread):.2f}")
        lead = scores[top] - scores[best]
        yield Measured(row, "delta", lead, key=row, text=f"{lead:+.2f}")
        yield Measured(row, "accepted", None, key=row, text="yes" if outcome["winner"] else "no")


def signals(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:  # noqa: ARG001
    """Yield PolyKV's Table 3: forward, inverse and their difference."""
    known = [one.validation for one in found if one.validation is not None]
    for at in known[-1].budgets if known else ():
        for one in at.signals:
            row = f"{SIGNALS.get((one.kind, one.signal), 'PPL sens.')}, {one.phases}"
            heading = KINDS[one.kind]
            yield share_cell(row, "Fwd.", one.forward, heading)
            yield share_cell(row, "Inv.", one.inverse, heading)
            gain = one.gains.inverse
            cell = share_cell(row, "delta", gain, heading)
            yield replace(cell, text=f"{100 * gain.mean:+.2f}")
            yield share_cell(row, "Uniform", one.uniform, heading)
            yield Measured(row, "verdict", None, heading, text=one.verdict)


def layers(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:  # noqa: ARG001
    """Yield the mean budget of every layer of every plan, and its pattern where a plan has several."""
    for one in found:
        if one.plan is None:
            continue
        phase, size = one.plan.prefill or one.plan.decode, one.stage.options["budget"]
        for index, layer in enumerate(phase.layers if phase is not None else ()):
            if layer is not None:
                budget = fmean(layer.budget)
                if len(one.plan.policies) > 1:
                    yield Measured(f"layer {index}", f"pattern at {size}", None, text=layer.policy.name)
                yield Measured(f"layer {index}", f"entries at {size}", budget, text=f"{budget:.0f}")


def losses(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield LAVa's Table 14: the loss of the first and of the last layer's output."""
    for one, result in evaluations(found):
        layers = sorted({loss.layer for loss in one.losses})
        for layer, heading in dict(zip((layers[0], layers[-1]), ("Layer 0", "Layer 31"), strict=True)).items():
            for row in table.rows:
                labels = {block.methods.get(row.method) for block in result.blocks}
                mine = [loss for loss in one.losses if loss.layer == layer and loss.method in labels]
                for loss in mine:
                    yield Measured(row.label, loss.task, loss.loss, f"Layer {layer}", heading)


# --- profiles --------------------------------------------------------------------------------------------------------


def profiles(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield what LU-KV's figures show: recall by budget, eviction loss by layer, stability of local ratios."""
    ratio = table.paper.ratios[0]
    known = {one.stage.name.removeprefix("lukv-"): one.profile for one in found if one.profile is not None}
    shared = known.pop("adakv", None)
    for metric, profile in known.items():
        for row, name in ((NAMES[metric], "recall"), (f"{NAMES[metric]}, oracle", "oracle_recall")):
            curve = profile.arrays[name].mean(axis=(0, 1))
            for budget in SHOWN_BUDGETS:
                yield Measured(row, f"{budget}% kept", 100 * float(curve[budget]), "Figure 1")
    for metric, profile in known.items():
        for name, loss in _eviction_losses(profile, ratio, shared if metric == "snapkv" else None).items():
            heading = f"Figures 3, 4, 6: {NAMES[metric]}"
            for layer, lost in zip(profile.metadata.layers, loss.sum(-1), strict=True):
                yield Measured(name, f"layer {layer}", 100 * float(lost), heading)
            yield Measured(name, "all", 100 * float(loss.sum()), heading)
            yield Measured(name, "worst head", 100 * float(loss.max()), heading)
    for metric, profile in known.items():
        told = stability(profile, ratio)
        for column, value in (("questions", told.questions), ("texts", told.texts), ("halves", told.halves)):
            yield Measured(NAMES[metric], column, value, "Figure 2b")


def _eviction_losses(profile: Profile, ratio: float, shared: Profile | None) -> dict[str, Floats]:
    """Return what every head loses [L, Hkv] under the allocations of the paper."""
    shape, length = profile.metadata.shape, profile.metadata.length
    total, floor = round((1 - ratio) * length * shape[0] * shape[1]), max(profile.metadata.floor, 1)
    pyramid = Pyramid(window=floor).allocate(np.zeros(shape), total, np.full(shape, floor), np.full(shape, length))
    kept = {"Uniform": np.full(shape, 1 - ratio), "Pyramid": pyramid / length}
    if shared is not None:
        kept["Ada"] = 1 - shared.local_ratios(ratio)
    kept["LU-KV"] = 1 - profile.local_ratios(ratio)
    return {name: lost_mass(profile, share) for name, share in kept.items()}
