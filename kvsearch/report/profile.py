"""What `show` says of profiles: the parts that calibration methods, which say which of them apply, are described by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from kvsearch.calibration.analysis import compute_lost_mass, compute_ranking_gap, measure_stability
from kvsearch.core.arrays import Floats
from kvsearch.core.printed import pluralize
from kvsearch.core.sign_flips import compute_chances
from kvsearch.evaluation.statistics import estimate_by_student
from kvsearch.plan import Phase, Profile, ProfileMetadata
from kvsearch.plan.methods import find_writer
from kvsearch.plan.profile_arrays import QUERY_COVARIANCE, QUERY_MEAN
from kvsearch.policies.fitted import is_last
from kvsearch.report.figures import Figure, ReportPart, make_layer_map
from kvsearch.report.table import Cell, Table, format_interval
from kvsearch.signals.table import ENTROPY, Explosion, SignalTable, is_constant

SHOWN_RATIO: Final = 0.8  # the global eviction ratio at which a profile is shown
RATIOS_SHOWN = (0.5, SHOWN_RATIO, 0.9)
BUDGETS_SHOWN = (1, 2, 5, 10, 20, 50)  # percent
TITLES = {
    "cosine": "cosine of attention outputs with those of the full cache",
    "ppl": "what perplexity gains",
    "error": "relative distance of attention outputs from those of the full cache",
    "nll": "nats per token that are lost",
}
PREFERRED = ("cosine", "ppl")  # the paper's; the others are shown where none of them was measured
MOST_DECIMALS = 5
NOISE_DECIMALS = 9  # decimals from which on differences are rounding
BEST_MARK = "*"
FULL_PATTERN = "full"
CHANCE: Final = 0.05  # that a ranking is better by, at the most


def list_profile_parts(profile: Profile, ratio: float = SHOWN_RATIO) -> Iterator[ReportPart]:
    """Yield what a profile says at a global eviction ratio; UsageError if that is out of range."""
    method = find_writer(profile.metadata.method)
    yield _describe_origin(profile.metadata)
    yield from method.describe(profile, ratio)
    yield from method.remarks(profile)


def compute_eviction_losses(profile: Profile, ratio: float) -> dict[str, Floats]:
    """Compute the evicted importance under uniform budgets and under the profile's."""
    ratios = profile.local_ratios(ratio)
    return {
        "uniform": compute_lost_mass(profile, np.full(ratios.shape, 1 - ratio)),
        profile.metadata.method: compute_lost_mass(profile, 1 - ratios),
    }


def _describe_origin(metadata: ProfileMetadata) -> dict[str, Any]:
    """Return what a profile is of, and what it was measured on."""
    settings = metadata.provenance.settings
    noun = "contexts" if find_writer(metadata.method).options.bare else "questions"
    facts: dict[str, Any] = {
        "model": metadata.model.short(), "method": metadata.method, noun: metadata.questions,
        "policy": f"{metadata.policy.name} {metadata.policy.params}", "length": f"{metadata.length} tokens",
    }  # fmt: skip
    for name in ("data", "answers", "protocol", "targets", "features", "bank", "chosen_by", "queries"):
        value = settings.get(name)
        if value is not None:
            facts[name] = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return facts


def describe_profile(profile: Profile) -> str:
    """Say what figures of a profile are of."""
    metadata = profile.metadata
    return f"{metadata.model.name}: {metadata.method}, {metadata.questions} questions of {metadata.length} tokens"


def list_array_parts(profile: Profile) -> Iterator[Table]:
    """Yield a table of the arrays that a profile has."""
    rows = []
    for name, array in profile.arrays.items():
        ends = (array.min(), array.mean(), array.max()) if array.size else (math.nan,) * 3
        rows.append([name, Cell(str(list(array.shape))), *(Cell.number(float(value), ".4g") for value in ends)])
    yield Table.plain("arrays", ["name", "shape", "least", "mean", "most"], rows)


def list_query_parts(profile: Profile) -> Iterator[Table]:
    """Yield how long the queries of every layer are, and how much they differ."""
    lengths = np.linalg.norm(profile.arrays[QUERY_MEAN], axis=-1).mean(1)
    spreads = np.sqrt(np.trace(profile.arrays[QUERY_COVARIANCE], axis1=-2, axis2=-1)).mean(1)
    rows = zip(profile.metadata.layers, zip(lengths, spreads, strict=True), strict=True)
    title = "queries before their rotary embedding, mean over heads"
    yield Table.numbers(title, ["layer", "|mean|", "spread"], rows, ".3g")


# --- tables of local ratios -------------------------------------------------------------------------------------------


def list_table_parts(profile: Profile, ratio: float) -> Iterator[ReportPart]:
    """Yield the local ratios at a global one, and what was measured along with them."""
    body = make_layer_map({"": profile.local_ratios(ratio)}, profile.metadata.layers, "eviction ratio", "{:.2f}")
    yield Figure("local-ratios", f"local eviction ratio at {ratio:g}", describe_profile(profile), body)
    is_dynamic = "ratio_deviation" in profile.arrays  # the mean of what a dynamic rule decided
    yield from _list_dynamic_parts(profile, ratio) if is_dynamic else _list_lukv_parts(profile, ratio)


# --- LU-KV ------------------------------------------------------------------------------------------------------------


def _list_lukv_parts(profile: Profile, ratio: float) -> Iterator[ReportPart]:
    """Yield the ranking's gap to the oracle's, eviction losses, and whether local ratios are stable."""
    if "recall" not in profile.arrays:
        return
    layers = profile.metadata.layers
    gap = make_layer_map({"": compute_ranking_gap(profile)}, layers, "recall lost", "{:.3f}")
    yield Figure("ranking-gap", "recall lost to the oracle ranking", describe_profile(profile), gap)
    losses = compute_eviction_losses(profile, ratio)
    lost: list[tuple[str | int, list[float]]] = [
        *((layer, [loss[row].sum() for loss in losses.values()]) for row, layer in enumerate(layers)),
        ("all", [loss.sum() for loss in losses.values()]),
    ]
    yield Table.numbers(f"importance evicted at {ratio:g}, share of the model's", ["layer", *losses], lost, ".4f")
    kept = [
        (label, profile.arrays[name].mean(axis=(0, 1))[list(BUDGETS_SHOWN)])
        for label, name in (("policy", "recall"), ("oracle", "oracle_recall"))
    ]
    columns = ["ranking", *(f"{budget}%" for budget in BUDGETS_SHOWN)]
    yield Table.numbers("importance kept at a budget, mean over heads", columns, kept, ".3f")
    yield from _list_stability_parts(profile, "questions")


def _list_stability_parts(profile: Profile, noun: str) -> Iterator[str | Table]:
    """Yield a table of how stable local ratios are over what they were measured on, and a verdict."""
    stabilities = [measure_stability(profile, ratio) for ratio in RATIOS_SHOWN]
    rows = [(f"{stable.ratio:g}", (stable.questions, stable.texts, stable.halves)) for stable in stabilities]
    columns = ["ratio", f"{noun} of one text", "texts", "halves of the texts"]
    yield Table.numbers("rank correlation of local ratios", columns, rows, ".2f")
    yield f"at {SHOWN_RATIO:g}: {stabilities[1].verdict}"


# --- dynamic rules ----------------------------------------------------------------------------------------------------


def _list_dynamic_parts(profile: Profile, ratio: float) -> Iterator[ReportPart]:
    """Yield how far what a dynamic rule decides differs between prompts."""
    deviations = profile.arrays["ratio_deviation"]
    deviation = deviations[min(max(round(100 * ratio), 1), len(deviations)) - 1]
    body = make_layer_map({"": deviation}, profile.metadata.layers, "standard deviation", "{:.3f}")
    title = "standard deviation of the local eviction ratio over the prompts"
    yield Figure("ratio-deviation", title, describe_profile(profile), body)
    yield from _list_stability_parts(profile, "prompts")


def describe_exponents(profile: Profile) -> str:
    """Say what CAKE's exponents are, and where they come from."""
    settings = profile.metadata.provenance.settings
    pair = settings["tau1"], settings["tau2"]
    source = {"fit": "fitted", "fixed": "as given"}.get(str(settings.get("exponents", "fixed")))
    if source is None:
        size = f"{settings['tuned_for']} entries per kv head"
        tuned_none = f"CAKE's authors tuned none for {profile.metadata.model.name} at {size}"
        source = tuned_none if pair == (1, 1) else f"tuned by CAKE's authors for {size}"
    return f"exponents tau1 {pair[0]:.3g}, tau2 {pair[1]:.3g}: {source}"


# --- signals of PolyKV ------------------------------------------------------------------------------------------------


def list_signal_parts(table: SignalTable) -> Iterator[Mapping[str, Any] | str | Table]:
    """Yield the means of all signals over the samples; a star is at the best pattern of a layer."""
    axes = table.axes
    measures = select_measures(table)
    has_entropy = ENTROPY in table.sensitivities
    facts = {"signals": ", ".join([*table.routes, ENTROPY] if has_entropy else table.routes)}
    if "ppl" in table.routes:
        facts["perplexity"] = f"{table.perplexity:.6g} under the full cache"
    yield facts
    layers = [str(layer) for layer in table.profile.metadata.layers]
    for phase in axes.phases:
        for budget in axes.budgets:
            for measure in measures:
                cells = _make_cells(table, measure, phase, budget)
                rows = [[layer, *row] for layer, row in zip(layers, cells, strict=True)]
                title = f"{phase} at {budget} entries per kv head: {TITLES[measure]}"
                yield Table.plain(title, ["layer", *table.patterns], rows, tight=True)
        if has_entropy:
            entropies = table.read_sensitivity(ENTROPY, phase, axes.budgets[0], ())  # the same at every budget
            values = zip(layers, entropies[:, None], strict=True)
            yield Table.numbers(f"{phase}: entropy of attention", ["layer", ENTROPY], values, ".4f")
    if measures:
        yield f"{BEST_MARK} the best pattern of a layer"
    worst: dict[tuple[str, str], Explosion] = {}  # of a pattern in a phase, the budget at which it is worst
    explosions = (table.find_explosions(phase, budget) for phase in axes.phases for budget in axes.budgets)
    for explosion in chain.from_iterable(explosions):
        place = (explosion.pattern, explosion.phase)
        worst[place] = max(worst.get(place, explosion), explosion, key=lambda known: known.gain)
    yield from (explosion.words for explosion in worst.values())


def select_measures(table: SignalTable) -> list[str]:
    """Select the paper's signals, or all others if the paper's were not measured."""
    return [name for name in PREFERRED if name in table.routes] or list(table.routes)


def _make_cells(table: SignalTable, measure: str, phase: Phase, budget: int) -> list[list[Cell]]:
    """Return the cells of every layer, pattern by pattern, the best one marked, the full cache aside."""
    values = table.measured(measure, phase, budget)
    rivals = [index for index, name in enumerate(table.patterns) if name != FULL_PATTERN]
    preferences = table.read_preference(measure, phase, budget)[:, rivals]
    form = "+.3g"
    if measure not in ("ppl", "nll"):  # the largest harm has four digits, as far as the page has room for them
        largest = float((1 - values if measure == "cosine" else values).max())
        decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else MOST_DECIMALS
        form = f".{min(max(decimals, 0), MOST_DECIMALS)}f"
    rows = []
    for row, wanted in zip(np.round(values, NOISE_DECIMALS), preferences, strict=True):
        best = None if is_constant(wanted) else rivals[int(wanted.argmax())]
        cells = (Cell.number(float(value), form) for value in row)
        rows.append([Cell(f"{BEST_MARK}{cell.text}", best=True, value=cell.value) if at == best else cell
                     for at, cell in enumerate(cells)])  # fmt: skip
    return rows


# --- fitted rankings -------------------------------------------------------------------------------------------------


class TextLosses:
    """How far replies move on every text under uniform budgets, for several rankings; the first is the fitted one.

    A ranking is better than another where that is so at every size, beyond chance: by a sign-flip test over texts,
    whose chance is that of the luckiest of all that it is compared with. Below five texts nothing is beyond chance.

    `is_last` where all that it was compared with is better, though only the best of these are here.

    They are read from a profile that has them: `values` [N, P, B] by text, ranking and size, `at` [B] shares of
    entries.
    """

    def __init__(self, profile: Profile) -> None:
        settings: dict[str, Any] = profile.metadata.provenance.settings
        self.values: Floats = profile.arrays["text_loss"].astype(np.float64)
        self.rankings: Sequence[str] = settings["judged"]
        self.at: Sequence[float] = settings["at"]
        self.is_last = is_last(profile.arrays)

    @property
    def mean(self) -> Floats:
        """The mean over texts, [P, B]."""
        return np.asarray(self.values.mean(0))

    @property
    def best(self) -> int:
        """The number of the best ranking that was not fitted, mean over texts and sizes."""
        return 1 + int(self.mean[1:].mean(1).argmin())

    @property
    def is_better(self) -> bool | None:
        """Whether the first ranking is better than all that were not fitted; None: not known.

        False if the best of these is better.
        """
        leads = self.values[:, 1:] - self.values[:, :1]  # [N, P', B]
        won, lost = (
            [compute_chances(sign * leads[..., size].T / len(leads)) <= CHANCE for size in range(len(self.at))]
            for sign in (1, -1)
        )
        if np.all(won):
            return True
        return False if np.all(lost, axis=0)[self.best - 1] else None

    @property
    def words(self) -> str:
        """How far replies move under the first ranking and under the best that was not fitted, at every size."""
        said = []
        for share, fitted, other in zip(self.at, self.values[:, 0].T, self.values[:, self.best].T, strict=True):
            lead = format_interval(estimate_by_student(other - fitted), "+.3f", unit=1)
            said.append(
                f"{share:.0%}: {fitted.mean():.3f}, under {self.rankings[self.best]} {other.mean():.3f}, {lead}"
            )
        return f"replies move at {'; '.join(said)} (mean and 95% interval over {pluralize(len(self.values), 'text')})"

    @property
    def preferred(self) -> str | None:
        """The built-in ranking to use in place of the fit; None where the fit may be as good."""
        return self.rankings[self.best] if self.is_last or self.is_better is False else None


def list_ranking_remarks(profile: Profile) -> Iterator[str]:
    """Yield what to know before a fitted ranking is used."""
    settings: dict[str, Any] = profile.metadata.provenance.settings
    fit, choose, report = settings["contexts"]
    yield f"fitted on {pluralize(fit, 'context')}, chosen on {choose}, reported on {report}"
    if settings.get("few_contexts"):
        yield f"{pluralize(fit, 'context')} to fit on are few: regressions with strong shrinkage alone were tried"
    if bare := settings.get("without_questions"):
        which = "the" if bare == fit + choose + report else f"{bare} of the {fit + choose + report}"
        yield f"{which} contexts have no questions, and are asked for themselves alone (reconstruction)"
    if unseen := settings.get("unseen_heads"):
        listed = ", ".join(unseen if len(unseen) <= 8 else [*unseen[:8], "..."])
        heads = f"{pluralize(len(unseen), 'kv head')} ({listed} by layer)"
        yield f"nothing that was asked looks at the context in {heads}: even ranking there"
    losses = TextLosses(profile)
    best = losses.rankings[losses.best]
    if losses.is_last:
        yield f"every other ranking is better than the fit, {losses.words}: it is not used"
    elif losses.is_better:
        yield f"the fit ranks better than each of {len(losses.rankings) - 1} others: {losses.words}"
    elif losses.is_better is False:
        yield f"{best} ranks better than the fit: {losses.words}; use {best}, or fit on more"


def list_ranking_parts(profile: Profile) -> Iterator[str | Table]:
    """Yield tables of how replies move and of recall, by budget and by layer, on contexts that were not fitted on."""
    settings: dict[str, Any] = profile.metadata.provenance.settings
    losses = TextLosses(profile)
    at = settings["at"]
    names = settings["rankings"]
    lost = "how far replies move with even budgets (total variation)"
    kept = "importance kept, of what the oracle keeps"
    columns = ["ranking", *(f"{budget:.0%}" for budget in at)]
    yield Table.numbers(lost, columns, zip(losses.rankings, losses.mean, strict=True), ".3f")
    recall = zip(names, profile.arrays["recall"].mean((2, 3)), strict=True)
    yield Table.numbers(f"{kept}; mean over heads and layers", columns, recall, ".3f")
    layers = profile.arrays["recall"].mean(3)[:, 0]  # [P, L]
    rows = []
    for row, layer in enumerate(profile.metadata.layers):
        best = int(layers[1:, row].argmax()) + 1
        other = Cell(f"{layers[best, row]:.3f} ({names[best]})", value=float(layers[best, row]))
        rows.append([layer, Cell.number(float(layers[0, row]), ".3f"), other])
    columns = ["layer", profile.metadata.method, "the best other policy"]
    yield Table.plain(f"by layer at {at[0]:.0%}", columns, rows)
