"""From what the stages of a paper's table found to its cells: one function for every kind of table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from kvsearch.arrays import Floats
from kvsearch.budgets.pyramidkv import Pyramid
from kvsearch.calibration.analysis import lost_mass, stability
from kvsearch.choose.verdicts import Validation
from kvsearch.evaluation.averages import SizeBlock
from kvsearch.evaluation.compare import Comparison
from kvsearch.evaluation.losses import LayerLoss
from kvsearch.evaluation.statistics import Row as ScoreRow
from kvsearch.papers.table import PaperTable, Row, Stage, View
from kvsearch.plan import Plan, Profile
from kvsearch.report.reproduced import LEFT_OUT, Measured
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.strategies.methods import FULL

FULL_CACHE, AVERAGE = "Full", "average"
SHOWN_BUDGETS = (1, 2, 5, 10, 20, 50)  # percent of a prompt


@dataclass(frozen=True)
class Finished:
    """A finished stage, with what its kind of job finds; `left_out` says which methods a model cannot run, and why."""

    stage: Stage
    comparison: Comparison | None = None
    losses: Sequence[LayerLoss] = ()
    plan: Plan | None = None
    profile: Profile | None = None
    selection: Mapping[str, Any] | None = None
    validation: Validation | None = None
    left_out: Mapping[str, str] | None = None


def cells(table: PaperTable, found: Sequence[Finished]) -> list[Measured]:
    """Return the cells of a table, row by row."""
    return list(VIEWS[table.view](table, found))


# --- scores of evaluations -------------------------------------------------------------------------------------------


def _scores(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    for one, result in _evaluations(found):
        first = True
        for block in result.blocks:
            columns = _columns(table, block)
            heading = _heading(one.stage, block)
            if first:
                yield from (_cell(FULL_CACHE, column, row.scores[FULL], one.stage.block) for column, row in columns)
                first = False
            for row in table.rows:
                method = _method(row, one.stage, block)
                if method in (one.left_out or {}):
                    yield Measured(row.label, columns[-1][0], None, heading, text=LEFT_OUT)
                elif (label := block.methods.get(method)) is not None:
                    key = _key(one.stage, block)
                    for column, scored in columns:
                        yield _cell(row.label, column, scored.scores[label], heading, key, ranked=True)


def _evaluations(found: Sequence[Finished]) -> Iterator[tuple[Finished, Comparison]]:
    yield from ((one, one.comparison) for one in found if one.comparison is not None)


def _columns(table: PaperTable, block: SizeBlock) -> list[tuple[str, ScoreRow]]:
    """Return the rows of scores that become columns: tasks or categories, then the paper's average."""
    kind = {"tasks": "task", "categories": "category"}.get(table.columns)
    inner = [(row.task, row) for row in block.rows if row.kind == kind]
    named = {row.task: row for row in block.rows if row.kind == "average"}
    return [*inner, (AVERAGE, named.get(table.average, block.overall))]


def _method(row: Row, stage: Stage, block: SizeBlock) -> str:
    return row.method.format(size=block.size, block=stage.block)


def _heading(stage: Stage, block: SizeBlock) -> str:
    words = "" if block.size is None else block.size.words
    return ", ".join(filter(None, (stage.block, words)))


def _key(stage: Stage, block: SizeBlock) -> str:
    return f"{stage.block} {block.size}".strip()


def _cell(
    row: str, column: str, found: Estimate | Difference, block: str = "", key: str = "", *, ranked: bool = False
) -> Measured:
    """Return a cell of a share, in points of 100."""
    return Measured(
        row, column, 100 * found.mean, block, key or block, 100 * found.low, 100 * found.high, ranked=ranked
    )


# --- the strongest baseline ------------------------------------------------------------------------------------------


def _best(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield PolyKV's Table 2: the best single policy, strategies, and the better one's lead."""
    for one, result in _evaluations(found):
        for block in result.blocks:
            overall, (name, label) = _overall(table, block), _best_baseline(table, block)
            row, key = "" if block.size is None else str(block.size), "" if block.size is None else str(block.size)
            yield Measured(row, FULL_CACHE, 100 * overall.scores[FULL].mean, key=key)
            best = 100 * overall.scores[label].mean
            yield Measured(row, "Baseline", best, key=key, text=f"{best:.2f} ({name})")
            strategies = []
            for told in table.rows:
                if "{size}" in told.method and (mine := block.methods.get(_method(told, one.stage, block))):
                    strategies.append(100 * overall.scores[mine].mean)
                    yield Measured(row, told.label, strategies[-1], key=key)
            if strategies:
                lead = max(strategies) - best
                yield Measured(row, "delta", lead, key=key, text=f"{lead:+.2f}")


def _categories(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield PolyKV's Table 4: the strategy minus the best single policy, by category."""
    for one, result in _evaluations(found):
        for block in result.blocks:
            name, label = _best_baseline(table, block)
            strategy = next(
                mine for row in table.rows if "{" in row.method
                if (mine := block.methods.get(_method(row, one.stage, block)))
            )  # fmt: skip
            rows = [(row.task, row) for row in block.rows if row.kind == "category"]
            for category, row in [*(rows or _tasks(block)), (AVERAGE, _overall(table, block))]:
                lead = 100 * (row.scores[strategy].mean - row.scores[label].mean)
                heading = f"{one.stage.block}: minus {name}"
                yield Measured(category, "delta", lead, heading, one.stage.block, text=f"{lead:+.2f}")


def _tasks(block: SizeBlock) -> list[tuple[str, ScoreRow]]:
    return [(row.task, row) for row in block.rows if row.kind == "task"]


def _overall(table: PaperTable, block: SizeBlock) -> ScoreRow:
    return _columns(table, block)[-1][1]


def _best_baseline(table: PaperTable, block: SizeBlock) -> tuple[str, str]:
    """Return the name and the label of the row without a plan of its own that scores highest."""
    overall = _overall(table, block)
    named = {
        row.label: block.methods[row.method]
        for row in table.rows
        if "{" not in row.method and row.method in block.methods
    }
    return max(named.items(), key=lambda item: overall.scores[item[1]].mean)


# --- selections, signals, layers -------------------------------------------------------------------------------------


def _selections(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:  # noqa: ARG001
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


SIGNALS = {("route", "cosine"): "Cosine", ("route", "ppl"): "PPL sens.", ("budgets", "entropy"): "Entropy"}
KINDS = {"route": "Eviction", "budgets": "Budget allocation"}


def _signals(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:  # noqa: ARG001
    """Yield PolyKV's Table 3: forward, inverse and their difference."""
    known = [one.validation for one in found if one.validation is not None]
    for at in known[-1].budgets if known else ():
        for one in at.signals:
            row = f"{SIGNALS.get((one.kind, one.signal), 'PPL sens.')}, {one.phases}"
            heading = KINDS[one.kind]
            yield _cell(row, "Fwd.", one.forward, heading)
            yield _cell(row, "Inv.", one.inverse, heading)
            gain = one.gains.inverse
            cell = _cell(row, "delta", gain, heading)
            yield Measured(**{**cell.__dict__, "text": f"{100 * gain.mean:+.2f}"})
            yield _cell(row, "Uniform", one.uniform, heading)
            yield Measured(row, "verdict", None, heading, text=one.verdict)


def _layers(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:  # noqa: ARG001
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


def _losses(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield LAVa's Table 14: the loss of the first and of the last layer's output."""
    for one, result in _evaluations(found):
        layers = sorted({loss.layer for loss in one.losses})
        for layer, heading in dict(zip((layers[0], layers[-1]), ("Layer 0", "Layer 31"), strict=True)).items():
            for row in table.rows:
                labels = {block.methods.get(row.method) for block in result.blocks}
                mine = [loss for loss in one.losses if loss.layer == layer and loss.method in labels]
                for loss in mine:
                    yield Measured(row.label, loss.task, loss.loss, f"Layer {layer}", heading)


# --- profiles --------------------------------------------------------------------------------------------------------


def _profiles(table: PaperTable, found: Sequence[Finished]) -> Iterator[Measured]:
    """Yield what LU-KV's figures show: recall by budget, eviction loss by layer, stability of local ratios."""
    ratio = table.paper.ratios[0]
    profiles = {one.stage.name.removeprefix("lukv-"): one.profile for one in found if one.profile is not None}
    shared = profiles.pop("adakv", None)
    for metric, profile in profiles.items():
        for row, name in ((metric, "recall"), (f"oracle, for {metric}", "oracle_recall")):
            curve = profile.arrays[name].mean(axis=(0, 1))
            for budget in SHOWN_BUDGETS:
                yield Measured(row, f"{budget}% kept", 100 * float(curve[budget]), "importance kept (Figure 1)")
    for metric, profile in profiles.items():
        for name, loss in _eviction_losses(profile, ratio, shared if metric == "snapkv" else None).items():
            heading = f"importance evicted at {ratio:g}, percent of the model's, {metric} (Figures 3, 4 and 6)"
            for layer, lost in zip(profile.metadata.layers, loss.sum(-1), strict=True):
                yield Measured(name, f"layer {layer}", 100 * float(lost), heading)
            yield Measured(name, "all", 100 * float(loss.sum()), heading)
            yield Measured(name, "worst head", 100 * float(loss.max()), heading)
    for metric, profile in profiles.items():
        told, heading = stability(profile, ratio), f"rank correlation of local ratios at {ratio:g} (Figure 2b)"
        for column, value in (("questions", told.questions), ("texts", told.texts), ("halves", told.halves)):
            yield Measured(metric, column, value, heading)


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


VIEWS: Mapping[View, Callable[[PaperTable, Sequence[Finished]], Iterator[Measured]]] = {
    "scores": _scores, "best": _best, "categories": _categories, "selections": _selections, "signals": _signals,
    "layers": _layers, "losses": _losses, "profiles": _profiles,
}  # fmt: skip
