"""Entries that a ranking is fitted on, drawn from contexts, and the fits that are tried on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from kvsearch.policies.probe import SPREAD, Weights

RIDGE = (1e-4, 1e-2, 1.0)  # strengths that are tried
STRONG = (1.0,)  # with few contexts
WIDTH, STEPS, BATCH, DECAY = 32, 1200, 1024, 1e-2
OWN = ("key", "value", "value_norm")  # what is an entry's own, whatever its context
EVERYTHING = "everything"  # the largest importance over all targets
OTHERS = "others"  # the same without the kind of question that is left out


class Drawn(NamedTuple):
    """Entries of a context: by layer features [Hkv, n, F], and log importance [L, Hkv, n] by what was asked."""

    features: list[Tensor]
    targets: dict[str, Tensor]


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
        return Weights(features, layers, {"center": center, "scale": scale, **arrays})


def draw(reading_: Reading, count: int, random: torch.Generator, left_out: str | None = None) -> Drawn:
    """Draw `count` entries of a context, the same of every head, evenly.

    Where a kind of question is `left_out`, there is also the target `OTHERS`, if anything else is asked.
    """
    largest, asked = reading_.largest, reading_.importance
    some = torch.randperm(largest.shape[-1], generator=random)[:count].sort().values
    whole = {EVERYTHING: largest, **(asked if len(asked) > 1 else {})}
    others = None if left_out is None else reading_.largest_without(left_out)
    if others is not None:
        whole[OTHERS] = others
    targets = {name: log_importance(values)[..., some].clone() for name, values in whole.items()}
    return Drawn([x[:, some].clone() for x in reading_.features], targets)


def fit_all(
    drawn: Sequence[Drawn], columns: tuple[str, ...], options: ProbeOptions, few: bool, target: str = EVERYTHING
) -> Fitted:
    """Fit every candidate in every layer: regressions, a network if options say so, and last an even spread.

    Regressions are tried on all features, and on those that are an entry's own alone. With `few` contexts there is
    strong shrinkage only, and no network.
    """
    read = torch.tensor([name != SPREAD for name in columns])
    own = torch.tensor([name in OWN for name in columns])
    subsets = [one for one in (read, own) if one.any() and (one is read or not torch.equal(one, read))]
    unseen = torch.stack([(one.targets[target] == 0).all(-1) for one in drawn]).all(0)  # see `log_importance`
    found, standards = [], []
    for row in range(len(drawn[0].features)):
        x = torch.cat([one.features[row] for one in drawn], 1)
        wanted = torch.cat([one.targets[target][row] for one in drawn], -1)
        center, scale = standardised(x)
        z = (x - center[:, None]) / scale[:, None]
        forms = [
            reading(fit_ridge(z * subset, wanted, strength), subset)
            for subset in subsets
            for strength in (STRONG if few else RIDGE)
        ]
        if options.form == "network" and not few and subsets:
            network = fit_network(z * read, wanted, WIDTH, STEPS, BATCH, DECAY, options.seed)
            forms.append(reading(network, read))
        forms.append(spread_fit(z, wanted, columns.index(SPREAD)))
        none, which = unseen_fit(z, columns.index(SPREAD)), unseen[row].long()
        found.append([mixed((form, none), which, form.output.shape[-1]) for form in forms])
        standards.append((center, scale))
    return Fitted(found, unseen, standards)
