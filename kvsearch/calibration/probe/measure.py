"""Calibrate a ranking: fit the importance of entries for later questions, choose the fit, and report its quality.

Three disjoint parts of the contexts: one to fit on, one to choose on, one to report on. Importance is LU-KV's (Eq. 4),
the largest over all tokens that read a context: the questions, and the context itself, chunk by chunk, so that what no
question asks for is worth something, too (KVzip, arXiv 2505.23416).

A head gets the fit that recalls most importance, or an even spread over its entries where that moves its output less,
see `find_spread_heads`. A head whose context nothing looks at has nothing to fit: it is ranked by the spread, below all
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.calibration.options import ProbeOptions
from kvsearch.calibration.probe.context_pass import (
    ContextPass,
    EntryLook,
    Measure,
    Noting,
)
from kvsearch.calibration.probe.contexts import FitCandidates, FitContexts, FittedRanking, RankingCalibration
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.steps import StepCache
from kvsearch.core.arrays import Floats
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import Work
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.policies import Observation
from kvsearch.policies.probe import SINKS, SPREAD, Coefficients, Weights, columns_of, features_of, needs_of
from kvsearch.runtime.speed import time_action

RIDGE_STRENGTHS = (1e-4, 1e-2, 1.0)  # strengths that are tried
FEW_CONTEXT_STRENGTHS = (1.0,)  # with few contexts
WIDTH, STEPS, BATCH, DECAY = 32, 400, 1024, 1e-2
LEARNING_RATE = 1e-2  # of the optimiser: 400 steps recall as much as 1,200 at a third of it
FITTED_BYTES = 2**27  # of features of the layers that are fitted at once, which are copied about five times
OWN_FEATURES = ("key", "value", "value_norm")  # what is an entry's own, whatever its context
FEATURE = "features"  # arrays of what is drawn
TARGET = "target"  # the largest importance over all that is asked

ROUNDOFF = 1e-6
UNSEEN_SCORE = -30.0  # log importance where nothing was looked at: below all others, and still told apart as exp of it
IMPORTANCE_FLOOR = 1e-3  # of a head's largest importance: what lies below is not told apart

LayerFits = list[list[Coefficients]]  # by layer and candidate
# of some layers: features [layers * Hkv, N, F], targets [layers * Hkv, N], unseen heads [layers, Hkv]
LayerSample = tuple[Tensor, Tensor, Tensor]
MIN_CONTEXTS_FOR_NETWORK = 4  # contexts to fit on, below which there is strong shrinkage alone
TIMED_STEPS = 4  # of a network, for a forecast


class ProbeCalibration(RankingCalibration[ProbeOptions]):
    """Calibration of a probe; the profile has its weights, and the quality of it and other policies on report contexts.

    "recall" [P, B, L, Hkv] is the importance that a ranking keeps at a budget, as a share of what the oracle keeps
    there; "text_loss" [N, P', B] is how far next-token distributions of replies move where all heads keep as much
    (total variation), on every text, and "middle_loss" [P] the mean of that at the middle size. Policies are the
    setting "rankings" of the provenance, the probe first, and those whose losses are measured at every size are the
    setting "judged"; all protect the same entries.
    """

    def draw(self, contexts: FitContexts) -> Noting:
        self.places = draw_places(contexts.fit, self.options)
        names = self.options.looked_at
        look = EntryLook([needs_of(names)], partial(note_features, names=names, places=self.places))
        return Noting({self.options.method: look})

    def make_sampler(self) -> Measure:
        return partial(sample_entries, name=self.options.method, places=self.places)

    def fit(self, samples: Sequence[Arrays], contexts: FitContexts) -> FitCandidates:
        options = self.options
        self.few = len(contexts.fit) < MIN_CONTEXTS_FOR_NETWORK
        self.fits, unseen = fit_candidates(self.loaded, samples, options, self.few, contexts.calibration.steps)
        self.fit_spread = len(self.fits[0]) - 1  # behind the regressions the spread
        count = max(1, self.fit_spread)
        tried = [self._weights(torch.full(unseen.shape, number)) for number in range(count)]
        return FitCandidates(count, self._look(tried), unseen)

    def choose(self, gains: Floats) -> Tensor:
        return torch.from_numpy(gains.argmax(0))

    @property
    def may_spread(self) -> bool:
        return SPREAD in self.options.features

    def finish(self, chosen: Tensor, even: Tensor, contexts: FitContexts) -> FittedRanking:  # noqa: ARG002
        weights = self._weights(torch.where(even, self.fit_spread, chosen))
        arrays = {name: array.numpy() for name, array in weights.arrays._asdict().items()}
        settings = {"features": self.options.looked_at, "few_contexts": self.few}
        return FittedRanking(self._look([weights]), arrays, settings)

    def _weights(self, chosen: Tensor) -> Weights:
        """Return the weights of the candidates `chosen` [L, Hkv]."""
        width = max(fit.output.shape[-1] for forms in self.fits for fit in forms)
        picked = [select_fits(forms, row, width) for forms, row in zip(self.fits, chosen, strict=True)]
        coefficients = Coefficients(*(torch.stack(parts) for parts in zip(*picked, strict=True)))
        return Weights(self.options.looked_at, describe(self.loaded.model).full_layers, coefficients)

    def _look(self, weights: Sequence[Weights]) -> EntryLook:
        """Make the look that notes the log importance of entries by each of several fits."""
        return EntryLook([needs_of(self.options.looked_at)], partial(note_scores, weights=weights))

    def estimate_fit(self, contexts: int) -> Work:
        """Estimate the time of fitting networks, from a few timed steps."""
        if self.options.form != "network" or contexts < MIN_CONTEXTS_FOR_NETWORK:
            return Work()
        shape = describe(self.loaded.model)
        columns = columns_of(self.options.looked_at, shape.head_dim)
        drawn = torch.rand(shape.kv_heads, BATCH, len(columns) + 1)

        def fit_some() -> None:
            fit_network(drawn[..., 1:], drawn[..., 0], WIDTH, TIMED_STEPS, BATCH, DECAY, self.options.seed)

        seconds = median(time_action(fit_some)) * STEPS / TIMED_STEPS
        return Work(seconds=seconds * len(shape.full_layers))


def sample_entries(context_pass: ContextPass, name: str, places: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Sample the drawn entries: features [Hkv, n, F] by layer, targets [L, Hkv, n].

    The features are what the look of this `name` noted; `places` are the entries by context.
    """
    layers = enumerate(context_pass.importance_pass.noted)
    features = {f"{FEATURE}.{row}": layer.noted[name] for row, layer in layers}
    target = log_importance(context_pass.largest)[..., places[context_pass.prompt.context]]
    return {**features, TARGET: target.clone()}


def note_scores(observation: Observation, context: int, free: slice, weights: Sequence[Weights]) -> Tensor:  # noqa: ARG001
    """Note the log importance of entries by each of several fits, [fits, Hkv, T]."""
    features = features_of(observation, weights[0].features)[:, :, free]
    return torch.cat([candidate.log_importance(features, observation.layer) for candidate in weights])


# --- entries to fit on ----------------------------------------------------------------------------------------------


def draw_places(prompts: Sequence[CalibrationPrompt], options: ProbeOptions) -> dict[int, Tensor]:
    """Draw equally many entries of every context, evenly, [n] by the number of the context."""
    random = torch.Generator().manual_seed(options.seed)
    each = -(-options.entries // len(prompts))
    free = {prompt.context: prompt.length - SINKS - options.protect for prompt in prompts}
    return {context: torch.randperm(count, generator=random)[:each].sort().values for context, count in free.items()}


def note_features(
    observation: Observation, context: int, free: slice, names: tuple[str, ...], places: Mapping[int, Tensor]
) -> Tensor:
    """Note the features of the entries at the `places` [n] of a context, [Hkv, n, F]."""
    return features_of(observation, names)[0, :, free][:, places[context].to(observation.keys.device)]


class LayerSamples(Sequence[LayerSample]):
    """The samples of some layers, by their `rows`; each is read lazily, as all may be more than memory.

    Samples of several layers are together, one layer after the other. `samples` are the features of every context,
    `worth` [L, Hkv, N] the importance to predict, `unseen` [L, Hkv] says which heads no token looks at.
    """

    def __init__(self, samples: Sequence[Arrays], worth: Tensor, unseen: Tensor, rows: Sequence[Sequence[int]]) -> None:
        self.samples = samples
        self.worth = worth
        self.unseen = unseen
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        rows = list(self.rows[number])
        layers = [[torch.from_numpy(arrays[f"{FEATURE}.{row}"]) for arrays in self.samples] for row in rows]
        features = torch.cat([torch.cat(parts, 1) for parts in layers])
        return features, self.worth[rows].flatten(0, 1), self.unseen[rows]


def fit_candidates(
    loaded: LoadedModel, samples: Sequence[Arrays], options: ProbeOptions, few: bool, steps: StepCache
) -> tuple[LayerFits, Tensor]:
    """Fit every candidate in every layer: regressions, a network if options say so, and last an even spread.

    Beside the fits, all standardised alike, it is returned which heads have no importance in any context, [L, Hkv]:
    these have the even spread under every candidate.

    Regressions are tried on all features, and on those that are an entry's own alone. With `few` contexts there is
    strong shrinkage only, and no network. Some layers are fitted at once, as many as `FITTED_BYTES` hold.
    """
    worth = torch.cat([torch.from_numpy(arrays[TARGET]) for arrays in samples], -1)
    unseen = (worth == 0).all(-1)  # where all importance is 0, so is what is fitted
    work = partial(_fit_layers, options=options, few=few)
    together = max(1, FITTED_BYTES // sum(arrays[f"{FEATURE}.0"].nbytes for arrays in samples))

    def make(rows: Sequence[int]) -> Iterator[Arrays]:
        groups = [rows[first : first + together] for first in range(0, len(rows), together)]
        return chain.from_iterable(loaded.map(work, LayerSamples(samples, worth, unseen, groups)))

    fits = []
    names = Coefficients._fields
    for made in steps.stage(range(len(worth)), make):
        numbers = range(len(made) // len(names))
        fits.append([Coefficients(*(torch.from_numpy(made[f"{n}.{name}"]) for name in names)) for n in numbers])
    return fits, unseen


def _fit_layers(loaded: LoadedModel, sample: LayerSample, options: ProbeOptions, few: bool) -> list[Arrays]:
    """Fit the candidates of some layers."""
    x, wanted, unseen = sample
    layers, heads = unseen.shape
    columns = columns_of(options.looked_at, loaded.fingerprint.head_dim)
    read = torch.tensor([name != SPREAD for name in columns])
    own = torch.tensor([name in OWN_FEATURES for name in columns])
    subsets = [subset for subset in (read, own) if subset.any() and (subset is read or not torch.equal(own, read))]
    center, scale = standardise(x)
    z = (x - center[:, None]) / scale[:, None]
    with torch.no_grad():
        forms = fit_ridges(z, wanted, FEW_CONTEXT_STRENGTHS if few else RIDGE_STRENGTHS, subsets)
        if options.form == "network" and not few and subsets:
            network = fit_network(z * read, wanted, WIDTH, STEPS, BATCH, DECAY, options.seed, layers)
            forms.append(restrict_features(network, read))
        forms.append(fit_spread(z, wanted, columns.index(SPREAD)))
        even = fit_spread(z, z[..., columns.index(SPREAD)], columns.index(SPREAD))
        none = even._replace(bias=torch.full_like(even.bias, UNSEEN_SCORE))
        fits = [select_fits((form, none), unseen.flatten().long(), form.output.shape[-1]) for form in forms]
    whole = [fit._replace(center=center, scale=scale)._asdict() for fit in fits]
    return [
        {
            f"{number}.{name}": array[first : first + heads].numpy()
            for number, fit in enumerate(whole)
            for name, array in fit.items()
        }
        for first in range(0, layers * heads, heads)
    ]


# --- regressions of the heads of a layer -----------------------------------------------------------------------------


def make_constant_fit(z: Tensor, bias: Tensor) -> Coefficients:
    """Make coefficients that predict `bias` [Hkv] for every entry, on plain features [Hkv, N, F].

    There are no hidden units (K = 0).
    """
    heads, _, size = z.shape
    none = z.new_zeros(heads, 0)
    zeros = z.new_zeros(heads, size)
    return Coefficients(zeros, torch.ones_like(zeros), zeros, z.new_zeros(heads, size, 0), none, none, bias)


def log_importance(importance: Tensor) -> Tensor:
    """Compute the fit target log(I + 0.001 max I) of the importance [..., T] of a head; 0 where all is 0."""
    largest = importance.amax(-1, keepdim=True)
    return (importance + IMPORTANCE_FLOOR * largest).clamp(min=torch.finfo(torch.float32).tiny).log() * (largest > 0)


def standardise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread of features [Hkv, N, F] over the entries, [Hkv, F] each.

    The spread of what is the same everywhere is 1: what no entry could teach must not become large on other texts.
    """
    spread = x.std(1, correction=0)
    return x.mean(1), torch.where(spread > ROUNDOFF * x.abs().amax(1), spread, 1.0)


def fit_ridges(z: Tensor, target: Tensor, strengths: Sequence[float], subsets: Sequence[Tensor]) -> list[Coefficients]:
    """Fit target = linear . z + bias with the penalty strength times N on |linear|^2, in closed form, in fp64.

    There is a fit for every subset of the features and every strength, in this order.

    Args:
        z: standardised features [Hkv, N, F].
        target: [Hkv, N].
        strengths: of the penalty, relative to the variance of the features, which is 1.
        subsets: the features that a fit may use, [F] bool each.
    """
    _, count, size = z.shape
    mean = target.mean(1)
    x = z.double()
    y = (target - mean[:, None]).double()
    # products of all features, once: those of a subset are among them
    gram = x.transpose(1, 2) @ x / count
    pull = x.transpose(1, 2) @ y[..., None] / count
    ridge = torch.eye(size, dtype=torch.float64, device=z.device)
    fits = []
    for subset in subsets:
        within = gram * (subset[:, None] & subset)
        for strength in strengths:
            linear = torch.linalg.solve(within + strength * ridge, pull * subset[:, None])[..., 0]
            fits.append(make_constant_fit(z, mean)._replace(linear=linear.float()))
    return fits


def fit_network(
    z: Tensor, target: Tensor, width: int, steps: int, batch: int, decay: float, seed: int, layers: int = 1
) -> Coefficients:
    """Fit target = output . gelu(hidden z + hidden_bias) + bias by AdamW on squared errors, all heads at once.

    Args:
        z: standardised features [Hkv, N, F], of several layers one after the other.
        target: [Hkv, N].
        width: hidden units of every head.
        steps: of the optimiser, with a cosine schedule.
        batch: entries drawn for a step, the same columns of every head.
        decay: weight decay.
        seed: of the first weights and the draws, which are the same in all layers.
        layers: how many they are.
    """
    heads, count, size = z.shape
    random = torch.Generator().manual_seed(seed)
    mean = target.mean(1, keepdim=True)
    spread = target.std(1, keepdim=True, correction=0).clamp(min=ROUNDOFF)
    wanted = (target - mean) / spread

    def drawn(*shape: int) -> Tensor:
        return torch.randn(heads // layers, *shape, generator=random).repeat(layers, 1, 1).to(z.device)

    hidden = drawn(size, width) / size**0.5
    output = drawn(width, 1) / width**0.5
    hidden_bias = z.new_zeros(heads, 1, width)
    bias = z.new_zeros(heads, 1)
    parameters = [part.requires_grad_() for part in (hidden, output, hidden_bias, bias)]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    entries = z.transpose(0, 1).contiguous()  # entries are drawn many times as fast where they lie in one piece
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(0, count, (min(batch, count),), generator=random).to(z.device)
            drawn_entries = entries.index_select(0, some).transpose(0, 1)
            inner = nn.functional.gelu(torch.baddbmm(hidden_bias, drawn_entries, hidden))
            loss = ((inner @ output)[..., 0] + bias - wanted.index_select(1, some)).square().mean(1).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    # back to the target's own unit
    offset = bias.detach() * spread + mean
    return make_constant_fit(z, offset[:, 0])._replace(
        hidden=hidden.detach(), hidden_bias=hidden_bias.detach()[:, 0], output=output.detach()[..., 0] * spread
    )


def fit_spread(z: Tensor, target: Tensor, column: int) -> Coefficients:
    """Rank by one standardised feature alone, whatever the target; scores spread as the target does, around its mean.

    Args:
        z: standardised features [Hkv, N, F].
        target: [Hkv, N].
        column: of the feature.
    """
    linear = torch.zeros_like(z[:, 0])
    linear[:, column] = target.std(1, correction=0).clamp(min=ROUNDOFF)
    return make_constant_fit(z, target.mean(1))._replace(linear=linear)


def restrict_features(fit: Coefficients, columns: Tensor) -> Coefficients:
    """Restrict a fit to the features `columns` [F] bool; it was fitted with zeros for the others."""
    return fit._replace(linear=fit.linear * columns, hidden=fit.hidden * columns[:, None])


def select_fits(fits: Sequence[Coefficients], chosen: Tensor, width: int) -> Coefficients:
    """Select the fit `chosen` [Hkv] for every head; hidden units are padded with zeros to `width`."""

    def picked(name: str) -> Tensor:
        parts = [getattr(fit, name) for fit in fits]
        if name in ("hidden", "hidden_bias", "output"):
            parts = [nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts]
        return torch.stack([parts[index][head] for head, index in enumerate(chosen.tolist())])

    return Coefficients(*map(picked, Coefficients._fields))
