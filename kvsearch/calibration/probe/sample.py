"""Entries that a ranking is fitted on, drawn from contexts, and the fits that are tried on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsearch.calibration.options import ProbeOptions
from kvsearch.calibration.probe.fit import (
    Fit,
    fit_network,
    fit_ridge,
    log_importance,
    mixed,
    reading,
    spread_fit,
    standardised,
    unseen_fit,
)
from kvsearch.calibration.probe.reading import Reading
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.steps import Arrays, Steps
from kvsearch.models.loading import LoadedModel
from kvsearch.policies.generic import SINKS, SPREAD
from kvsearch.policies.probe import Coefficients, Weights

RIDGE = (1e-4, 1e-2, 1.0)  # strengths that are tried
STRONG = (1.0,)  # with few contexts
WIDTH, STEPS, BATCH, DECAY = 32, 1200, 1024, 1e-2
OWN = ("key", "value", "value_norm")  # what is an entry's own, whatever its context
EVERYTHING = "everything"  # the largest importance over all targets
OTHERS = "others"  # the same without the kind of question that is left out
COLUMNS, FEATURE, TARGET = "columns", "features", "target"  # arrays of what is drawn


@dataclass(frozen=True)
class Drawn:
    """Entries of a context: features [Hkv, n, F] by layer, and log importance [L, Hkv, n] by target."""

    arrays: Arrays

    @property
    def columns(self) -> Tensor:
        """What every column of the features is of, by its number among the features, [F]."""
        return torch.from_numpy(self.arrays[COLUMNS])

    def features(self, row: int) -> Tensor:
        """Return what the entries look like in the layer of that row."""
        return torch.from_numpy(self.arrays[f"{FEATURE}.{row}"])

    def target(self, name: str) -> Tensor:
        """Return what the entries are worth."""
        return torch.from_numpy(self.arrays[f"{TARGET}.{name}"])


class Fitted(NamedTuple):
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


def places_drawn(prompts: Sequence[CalibrationPrompt], options: ProbeOptions) -> dict[int, Tensor]:
    """Draw entries of every context evenly, as many of each, [n] by the number of the context."""
    random, each = torch.Generator().manual_seed(options.seed), -(-options.entries // len(prompts))
    free = {prompt.context: prompt.length - SINKS - options.protect for prompt in prompts}
    return {context: torch.randperm(count, generator=random)[:each].sort().values for context, count in free.items()}


def draw(reading_: Reading, some: Tensor, left_out: str | None = None) -> dict[str, Tensor]:
    """Return the arrays of a `Drawn`: the entries `some` [n] of a context, the same of every head.

    Where a kind of question is `left_out`, there is also the target `OTHERS`, if anything else is asked.
    """
    whole = {EVERYTHING: reading_.largest}
    others = None if left_out is None else reading_.largest_without(left_out)
    if others is not None:
        whole[OTHERS] = others
    names = reading_.options.looked_at
    return {
        COLUMNS: torch.tensor([names.index(name) for name in reading_.columns]),
        **{f"{FEATURE}.{row}": x[:, some].clone() for row, x in enumerate(reading_.features)},
        **{f"{TARGET}.{name}": log_importance(values)[..., some].clone() for name, values in whole.items()},
    }


class LayerSample(NamedTuple):
    """What the entries that were drawn are in one layer, of all contexts together."""

    columns: tuple[str, ...]  # the feature of each column
    features: Tensor  # [Hkv, N, F]
    wanted: Tensor  # [Hkv, N] targets
    unseen: Tensor  # [Hkv] bool: heads without any importance


@dataclass(frozen=True)
class LayerSamples(Sequence[LayerSample]):
    """Those of some layers, by their `rows`; each is read when it is asked for: all may be more than memory holds."""

    drawn: Sequence[Drawn]
    worth: Tensor  # [L, Hkv, N] targets
    unseen: Tensor  # [L, Hkv]
    features: tuple[str, ...]
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        row = self.rows[number]
        columns = tuple(self.features[one] for one in self.drawn[0].columns.tolist())
        features = torch.cat([one.features(row) for one in self.drawn], 1)
        return LayerSample(columns, features, self.worth[row].clone(), self.unseen[row].clone())


def fit_all(
    loaded: LoadedModel,
    drawn: Sequence[Drawn],
    options: ProbeOptions,
    few: bool,
    done: Steps | None = None,
    target: str = EVERYTHING,
) -> Fitted:
    """Fit every candidate in every layer: regressions, a network if options say so, and last an even spread.

    Regressions are tried on all features, and on those that are an entry's own alone. With `few` contexts there is
    strong shrinkage only, and no network.
    """
    worth = torch.cat([one.target(target) for one in drawn], -1)
    unseen = (worth == 0).all(-1)  # see `log_importance`
    work = partial(_fit_layer, options=options, few=few)

    def make(rows: Sequence[int]) -> Iterator[Arrays]:
        return loaded.map(work, LayerSamples(drawn, worth, unseen, options.looked_at, rows))

    found, standards = [], []
    for made in (done or Steps(None, {})).stage(range(len(worth)), make):
        count = len(made) // len(Fit._fields)
        found.append([Fit(*(torch.from_numpy(made[f"{n}.{name}"]) for name in Fit._fields)) for n in range(count)])
        standards.append((torch.from_numpy(made["center"]), torch.from_numpy(made["scale"])))
    return Fitted(found, unseen, standards)


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
            reading(fit_ridge(z * subset, wanted, strength), subset)
            for subset in subsets
            for strength in (STRONG if few else RIDGE)
        ]
        if options.form == "network" and not few and subsets:
            network = fit_network(z * read, wanted, WIDTH, STEPS, BATCH, DECAY, options.seed)
            forms.append(reading(network, read))
        forms.append(spread_fit(z, wanted, columns.index(SPREAD)))
        none = unseen_fit(z, columns.index(SPREAD))
        found = [mixed((form, none), unseen.long(), form.output.shape[-1]) for form in forms]
    parts = {f"{number}.{name}": part for number, form in enumerate(found) for name, part in form._asdict().items()}
    return {name: part.numpy() for name, part in {**parts, "center": center, "scale": scale}.items()}
