"""Calibrate a ranking: fit what entries are worth to later questions, choose the fit, and report how good it is.

Three disjoint parts of the contexts: one to fit on, one to choose on, one to report on. Importance is LU-KV's (Eq. 4),
the largest over all that is asked of a context: the questions, and the context itself, chunk by chunk, so that what no
question asks for is worth something, too (KVzip, arXiv 2505.23416).

A head gets the fit that recalls most importance, or an even spread over its entries where that moves its output less,
see `rankings`. A head whose context nothing looks at has nothing to fit: it is ranked by the spread, below all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.options import ProbeOptions
from kvsearch.calibration.probe.context_pass import ContextPass
from kvsearch.calibration.probe.contexts import FitContexts, RankingCalibration
from kvsearch.calibration.probe.fit import (
    Fit,
    fit_network,
    fit_ridge,
    log_importance,
    mixed,
    restrict_to,
    spread_fit,
    standardised,
    unseen_fit,
)
from kvsearch.calibration.probe.rankings import LeftOut, Measured, Ranking, gains, prefers_spread, reported
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.steps import StepCache
from kvsearch.core.progress import Progress
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.policies.generic import SINKS, SPREAD
from kvsearch.policies.probe import METHOD, Coefficients, Weights

if TYPE_CHECKING:
    from kvsearch.calibration.steps import Arrays

RIDGE = (1e-4, 1e-2, 1.0)  # strengths that are tried
STRONG = (1.0,)  # with few contexts
WIDTH, STEPS, BATCH, DECAY = 32, 1200, 1024, 1e-2
OWN = ("key", "value", "value_norm")  # what is an entry's own, whatever its context
EVERYTHING = "everything"  # the largest importance over all targets
OTHERS = "others"  # the same without the kind of question that is left out
COLUMNS = "columns"  # arrays of what is drawn: the number of each column's feature, [F]
FEATURE = "features"
TARGET = "target"

LayerSample = tuple[tuple[str, ...], Tensor, Tensor, Tensor]  # feature of each column, features, targets, unseen heads
FEW = 4  # contexts to fit on, below which there is strong shrinkage alone


class ProbeCalibration(RankingCalibration[ProbeOptions]):
    """A fit; the profile has the weights, and how good it and other policies are on the contexts to report on.

    "recall" [P, B, L, Hkv] is the importance that a ranking keeps at a budget, as a share of what the oracle keeps
    there; "loss" [P, B] is how far next-token distributions of replies move where all heads keep as much (total
    variation). Policies are the setting "rankings" of the provenance, the probe first.

    Where the data have two kinds of questions or more, one is left out of a second fit, by regressions alone.
    "kind_recall" and "kind_loss" are of that kind's questions on the contexts to report on, with one policy more: the
    fit that never saw the kind comes first. Which kind it is and how many questions are the settings "left_out" and
    "left_out_questions".
    """

    reads_again = False  # the second fit takes what was sampled for the first

    @torch.no_grad()
    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        options = self.options
        contexts = FitContexts.of(self, prompts, self.steps, progress)
        parts = contexts.parts
        others = contexts.others
        left_out = contexts.left_out
        places = draw_places(parts.fit, options)
        read = contexts.read(
            parts.fit, lambda context_pass: sample_entries(context_pass, places[context_pass.context], left_out)
        )
        samples = list(read)
        few = len(parts.fit) < FEW
        fitted = fit_candidates(self.loaded, samples, options, few, self.steps)
        layers = describe(self.loaded.model).full_layers
        weights, spread = _chosen(fitted, partial(contexts.read, parts.choose), options, layers)
        held: LeftOut | None = None
        if left_out is not None and others is not None:
            linear = options.model_copy(update={"form": "linear"})
            numbers = {prompt.context for prompt in others.fit}
            rest = [sample for sample, prompt in zip(samples, parts.fit, strict=True) if prompt.context in numbers]
            second = fit_candidates(self.loaded, rest, linear, len(rest) < FEW, self.steps, OTHERS)
            never, _ = _chosen(second, partial(contexts.read, others.choose), linear, layers)
            held = LeftOut(left_out, partial(scores_of, never))
        report = partial(contexts.read, parts.report, policies=self.policies)
        judged = reported(partial(scores_of, weights), report, held)
        settings = {
            "features": options.looked_at, "few_contexts": few, "spread_heads": int((spread & ~fitted.unseen).sum()),
            "unseen_heads": tuple(f"{layers[row]}.{head}" for row, head in fitted.unseen.nonzero().tolist()),
        }  # fmt: skip
        arrays = {name: array.numpy() for name, array in weights.arrays._asdict().items()}
        return contexts.profile(METHOD, {**arrays, **judged}, settings)


def _chosen(
    fitted: CandidateFits, read: Measured, options: ProbeOptions, layers: tuple[int, ...]
) -> tuple[Weights, Tensor]:
    """Return the weights of what is best of every head on contexts to choose on, and where that is the spread."""

    def weights(chosen: Tensor) -> Weights:
        return fitted.weights(options.looked_at, layers, chosen)

    last, heads = len(fitted.fits[0]) - 1, fitted.standards[0][0].shape[0]  # behind the regressions the spread
    tried: list[Ranking] = [
        partial(scores_of, weights(torch.full((len(layers), heads), number))) for number in range(max(1, last))
    ]
    found = [one["gain"] for one in read(lambda context_pass: {"gain": gains(tried, context_pass)})]
    best = torch.from_numpy(np.mean(found, axis=0).argmax(0))
    if SPREAD not in options.features:
        return weights(best), torch.zeros_like(best, dtype=torch.bool)
    spread = prefers_spread(partial(scores_of, weights(best)), read)
    return weights(torch.where(spread, last, best)), spread


def scores_of(weights: Weights, context_pass: ContextPass) -> Tensor:
    """Return the fitted log importance of a context's entries, [L, Hkv, T]."""
    pairs = zip(weights.layers, context_pass.features, strict=True)
    return torch.stack([weights.log_importance(x[None], layer)[0] for layer, x in pairs])


# --- entries to fit on ----------------------------------------------------------------------------------------------


class CandidateFits(NamedTuple):
    """What was tried in every layer, all standardised alike; the last candidate is the even spread.

    A head with no importance in any context has it under every candidate.
    """

    fits: list[list[Fit]]  # by layer and candidate
    unseen: Tensor  # whether a head has no importance, [L, Hkv]
    standards: list[tuple[Tensor, Tensor]]  # mean and spread of features by layer, [Hkv, F] each

    def weights(self, features: tuple[str, ...], layers: tuple[int, ...], chosen: Tensor) -> Weights:
        """Return the weights of the candidates `chosen` [L, Hkv]."""
        width = max(fit.output.shape[-1] for forms in self.fits for fit in forms)
        picked = [mixed(forms, row, width) for forms, row in zip(self.fits, chosen, strict=True)]
        arrays = {name: torch.stack([getattr(fit, name) for fit in picked]) for name in Fit._fields}
        center, scale = (torch.stack(parts) for parts in zip(*self.standards, strict=True))
        return Weights(features, layers, Coefficients(center, scale, **arrays))


def draw_places(prompts: Sequence[CalibrationPrompt], options: ProbeOptions) -> dict[int, Tensor]:
    """Draw entries of every context evenly, as many of each, [n] by the number of the context."""
    random, each = torch.Generator().manual_seed(options.seed), -(-options.entries // len(prompts))
    free = {prompt.context: prompt.length - SINKS - options.protect for prompt in prompts}
    return {context: torch.randperm(count, generator=random)[:each].sort().values for context, count in free.items()}


def sample_entries(context_pass: ContextPass, some: Tensor, left_out: str | None = None) -> dict[str, Tensor]:
    """Return arrays of the entries `some` [n] of a context: features [Hkv, n, F] by layer, targets [L, Hkv, n].

    Where a kind of question is `left_out`, there is also the target `OTHERS`, if anything else is asked.
    """
    whole = {EVERYTHING: context_pass.largest}
    others = None if left_out is None else context_pass.largest_without(left_out)
    if others is not None:
        whole[OTHERS] = others
    names = context_pass.options.looked_at
    return {
        COLUMNS: torch.tensor([names.index(name) for name in context_pass.columns]),
        **{f"{FEATURE}.{row}": x[:, some].clone() for row, x in enumerate(context_pass.features)},
        **{f"{TARGET}.{name}": log_importance(values)[..., some].clone() for name, values in whole.items()},
    }


@dataclass(frozen=True)
class LayerSamples(Sequence[LayerSample]):
    """The samples of some layers, by their `rows`; each is read when it is asked for: all may be more than memory."""

    samples: Sequence[Arrays]  # of all contexts
    worth: Tensor  # [L, Hkv, N] targets
    unseen: Tensor  # [L, Hkv]
    features: tuple[str, ...]
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row = self.rows[number]
        columns = tuple(self.features[column] for column in self.samples[0][COLUMNS].tolist())
        features = torch.cat([torch.from_numpy(arrays[f"{FEATURE}.{row}"]) for arrays in self.samples], 1)
        return columns, features, self.worth[row].clone(), self.unseen[row].clone()


def fit_candidates(
    loaded: LoadedModel,
    samples: Sequence[Arrays],
    options: ProbeOptions,
    few: bool,
    steps: StepCache,
    target: str = EVERYTHING,
) -> CandidateFits:
    """Fit every candidate in every layer: regressions, a network if options say so, and last an even spread.

    Regressions are tried on all features, and on those that are an entry's own alone. With `few` contexts there is
    strong shrinkage only, and no network.
    """
    worth = torch.cat([torch.from_numpy(arrays[f"{TARGET}.{target}"]) for arrays in samples], -1)
    unseen = (worth == 0).all(-1)  # see `log_importance`
    work = partial(_fit_layer, options=options, few=few)

    def make(rows: Sequence[int]) -> Iterator[Arrays]:
        return loaded.map(work, LayerSamples(samples, worth, unseen, options.looked_at, rows))

    found, standards = [], []
    for made in steps.stage(range(len(worth)), make):
        count = len(made) // len(Fit._fields)
        found.append([Fit(*(torch.from_numpy(made[f"{n}.{name}"]) for name in Fit._fields)) for n in range(count)])
        standards.append((torch.from_numpy(made["center"]), torch.from_numpy(made["scale"])))
    return CandidateFits(found, unseen, standards)


def _fit_layer(_: LoadedModel, sample: LayerSample, options: ProbeOptions, few: bool) -> Arrays:
    """Return the candidates of a layer, and how they standardise."""
    columns, x, wanted, unseen = sample
    read = torch.tensor([name != SPREAD for name in columns])
    own = torch.tensor([name in OWN for name in columns])
    subsets = [one for one in (read, own) if one.any() and (one is read or not torch.equal(one, read))]
    center, scale = standardised(x)
    z = (x - center[:, None]) / scale[:, None]
    with torch.no_grad():
        forms = [
            restrict_to(fit_ridge(z * subset, wanted, strength), subset)
            for subset in subsets
            for strength in (STRONG if few else RIDGE)
        ]
        if options.form == "network" and not few and subsets:
            network = fit_network(z * read, wanted, WIDTH, STEPS, BATCH, DECAY, options.seed)
            forms.append(restrict_to(network, read))
        forms.append(spread_fit(z, wanted, columns.index(SPREAD)))
        none = unseen_fit(z, columns.index(SPREAD))
        found = [mixed((form, none), unseen.long(), form.output.shape[-1]) for form in forms]
    parts = {f"{number}.{name}": part for number, form in enumerate(found) for name, part in form._asdict().items()}
    return {name: part.numpy() for name, part in {**parts, "center": center, "scale": scale}.items()}
