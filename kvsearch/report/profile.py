"""What `show` says of a profile: of local ratios, by LU-KV or a dynamic rule, of query statistics, and of others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from kvsearch.calibration.analysis import lost_mass, ranking_gap, stability
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import KvsearchWarning, UsageError
from kvsearch.plan import Plan, Profile, ProfileMetadata
from kvsearch.plan.profile_arrays import QUERIES, QUERY_COVARIANCE, QUERY_MEAN
from kvsearch.plan.schema import STATIC
from kvsearch.policies.registry import FITTED
from kvsearch.report.figures.data import Figure, Part, layer_map
from kvsearch.report.ranking import RankingView
from kvsearch.report.signals import signal_parts
from kvsearch.report.table import Table
from kvsearch.signals.table import SignalTable

RATIO: Final = 0.8  # the global eviction ratio at which a profile is shown
RATIOS_SHOWN = (0.5, RATIO, 0.9)
BUDGETS_SHOWN = (1, 2, 5, 10, 20, 50)  # percent


def profile_parts(profile: Profile, ratio: float = RATIO, plan: Plan | None = None) -> Iterator[Part]:
    """Yield what a profile says at a global eviction ratio, and what a plan of its model loses by it.

    Raises:
        UsageError: the ratio is out of range, or a plan is to be judged by a profile without the importance of entries.
        IncompatibleError: the plan is of another model.
    """
    method = profile.metadata.method
    is_lukv = not (method in FITTED or method == QUERIES or profile.metadata.signals or is_dynamic(profile))
    if plan is not None and not is_lukv:
        raise UsageError(f"--plan needs a LU-KV profile: a {method} profile does not say what entries are worth")
    yield _origin(profile.metadata)
    if method in FITTED:
        yield from RankingView(profile).parts()
    elif method == QUERIES:
        yield _query_table(profile)
    elif profile.metadata.signals is not None:
        yield from signal_parts(SignalTable(profile))
    else:
        body = layer_map({"": profile.local_ratios(ratio)}, profile.metadata.layers, "eviction ratio", "{:.2f}")
        yield Figure("local-ratios", f"local eviction ratio at {ratio:g}", caption(profile), body)
        yield from _dynamic_parts(profile, ratio) if is_dynamic(profile) else _lukv_parts(profile, ratio, plan)
    yield from remarks(profile)


def is_dynamic(profile: Profile) -> bool:
    """Return whether a profile is the mean of what a dynamic rule decided."""
    return "ratio_deviation" in profile.arrays


def remarks(profile: Profile) -> Iterator[str]:
    """Yield what there is to say about a profile before it is used, one line each."""
    if profile.metadata.method in FITTED:
        yield from RankingView(profile).remarks()
    if profile.metadata.method == "cake":
        yield _exponents(profile)


def eviction_losses(profile: Profile, ratio: float, plan: Plan | None = None) -> dict[str, Floats]:
    """Return the importance that is evicted with equal budgets, with those of the profile, and with those of a plan."""
    metadata = profile.metadata
    ratios = profile.local_ratios(ratio)
    losses = {
        "uniform": lost_mass(profile, np.full(ratios.shape, 1 - ratio)),
        metadata.method: lost_mass(profile, 1 - ratios),
    }
    if plan is not None:
        metadata.model.require(plan.model, "this profile")
        if (name := plan.allocation.name) != STATIC:
            warning = f"the loss shown for the plan is that of its budgets without allocation {name}"
            warnings.warn(warning, KvsearchWarning, stacklevel=2)
        budgets = plan.budgets("prefill")
        length = plan.length or metadata.length
        everything = (length,) * metadata.model.kv_heads  # what a layer outside the plan keeps
        entries = np.array([budgets[layer] or everything for layer in metadata.layers], dtype=float)
        losses["plan"] = lost_mass(profile, entries / length)
    return losses


def _origin(metadata: ProfileMetadata) -> dict[str, Any]:
    """Return what a profile is of, and what it was measured on."""
    settings = metadata.provenance.settings
    noun = "contexts" if metadata.method in (*FITTED, QUERIES) else "questions"
    facts: dict[str, Any] = {
        "model": metadata.model.short(), "method": metadata.method, noun: metadata.questions,
        "policy": f"{metadata.policy.name} {metadata.policy.params}", "length": f"{metadata.length} tokens",
    }  # fmt: skip
    for name in ("data", "answers", "protocol", "targets", "features", "bank", "chosen_by", "queries"):
        value = settings.get(name)
        if value is not None:
            facts[name] = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return facts


def _query_table(profile: Profile) -> Table:
    """Return the length of the mean query, and how queries spread around it, mean over the heads of a layer."""
    lengths = np.linalg.norm(profile.arrays[QUERY_MEAN], axis=-1).mean(1)
    spreads = np.sqrt(np.trace(profile.arrays[QUERY_COVARIANCE], axis1=-2, axis2=-1)).mean(1)
    rows = zip(profile.metadata.layers, zip(lengths, spreads, strict=True), strict=True)
    title = "queries before their rotary embedding, mean over heads"
    return Table.numbers(title, ["layer", "|mean|", "spread"], rows, ".3g")


def caption(profile: Profile) -> str:
    """Say what figures of a profile are of."""
    metadata = profile.metadata
    return f"{metadata.model.name}: {metadata.method}, {metadata.questions} questions of {metadata.length} tokens"


# --- LU-KV ------------------------------------------------------------------------------------------------------------


def _lukv_parts(profile: Profile, ratio: float, plan: Plan | None) -> Iterator[Part]:
    """Yield the ranking's gap to the oracle's, eviction losses, and whether local ratios are stable."""
    if "recall" not in profile.arrays:
        return
    layers = profile.metadata.layers
    gap = layer_map({"": ranking_gap(profile)}, layers, "recall lost", "{:.3f}")
    yield Figure("ranking-gap", "recall lost to the oracle ranking", caption(profile), gap)
    losses = eviction_losses(profile, ratio, plan)
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
    yield from _stability_parts(profile, "questions")


def _stability_parts(profile: Profile, noun: str) -> Iterator[str | Table]:
    """Yield a table of how stable local ratios are over what they were measured on, and a verdict."""
    stabilities = [stability(profile, ratio) for ratio in RATIOS_SHOWN]
    rows = [(f"{found.ratio:g}", (found.questions, found.texts, found.left_out, found.halves)) for found in stabilities]
    columns = ["ratio", f"{noun} of one text", "texts", "a text and the others", "halves of the texts"]
    yield Table.numbers("rank correlation of local ratios", columns, rows, ".2f")
    yield f"at {RATIO:g}: {stabilities[1].verdict}"


# --- dynamic rules ----------------------------------------------------------------------------------------------------


def _dynamic_parts(profile: Profile, ratio: float) -> Iterator[Part]:
    """Yield how far what a dynamic rule decides differs between prompts."""
    deviations = profile.arrays["ratio_deviation"]
    deviation = deviations[min(max(round(100 * ratio), 1), len(deviations)) - 1]
    body = layer_map({"": deviation}, profile.metadata.layers, "standard deviation", "{:.3f}")
    title = "standard deviation of the local eviction ratio over the prompts"
    yield Figure("ratio-deviation", title, caption(profile), body)
    yield from _stability_parts(profile, "prompts")


def _exponents(profile: Profile) -> str:
    """Say what CAKE's exponents are, and where they come from."""
    settings = profile.metadata.provenance.settings
    pair = settings["tau1"], settings["tau2"]
    source = {"fit": "fitted", "fixed": "as given"}.get(str(settings.get("exponents", "fixed")))
    if source is None:
        size = f"{settings['tuned_for']} entries per kv head"
        tuned_none = f"CAKE's authors tuned none for {profile.metadata.model.name} at {size}"
        source = tuned_none if pair == (1, 1) else f"tuned by CAKE's authors for {size}"
    return f"exponents tau1 {pair[0]:.3g}, tau2 {pair[1]:.3g}: {source}"
