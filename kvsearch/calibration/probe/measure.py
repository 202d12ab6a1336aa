"""Calibrate a ranking: fit what entries are worth to later questions, choose the fit, and report how good it is.

Three disjoint parts of the contexts: one to fit on, one to choose on, one to report on. Importance is LU-KV's (Eq. 4),
the largest over all that is asked of a context: the questions, and the context itself, chunk by chunk, so that what no
question asks for is worth something, too (KVzip, arXiv 2505.23416).

A head gets the fit that recalls most importance, or an even spread over its entries where that moves its output less.
Importance says which entries a head looks at, not that it needs them: the output of a head that looks everywhere is a
mean, and an even sample keeps a mean that the entries with most attention do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.budgets.curves import oracle_recall_curve, recall_curve
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import COMPARED, ProbeOptions
from kvsearch.calibration.probe.reading import BUDGETS, Asking, Reading, prepared, split, without_questions
from kvsearch.calibration.probe.sample import Drawn, Fitted, draw, fit_all
from kvsearch.calibration.prompts import CalibrationPrompt, with_own_replies
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PolicySpec, Profile
from kvsearch.policies import Policy
from kvsearch.policies.probe import METHOD, SINKS, SPREAD, Weights
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running

FEW = 4  # contexts to fit on, below which there is strong shrinkage alone
SURE = 2.0  # standard errors
LEAST_ERROR = 1e-30  # of a head whose output does not move


def calibrate_probe(
    loaded: LoadedModel, data: CalibrationData, options: ProbeOptions, progress: Progress | None = None
) -> Profile:
    """Fit a ranking; the profile has the weights, and how good it and other policies are on the contexts to report on.

    "recall" [P, B, L, Hkv] is the importance that a ranking keeps at a budget, as a share of what the oracle keeps
    there; "loss" [P, B] is how far next-token distributions of replies move where all heads keep as much (total
    variation). Policies are the setting "rankings" of the provenance, the probe first.

    Raises:
        UsageError: fewer than three contexts, or one too short.
        IncompatibleError: the model computes NaN, or a context and what is asked of it do not fit its positions.
    """
    prompts, asking = prepared(loaded, data, options)
    given = {prompt.context: prompt for prompt in prompts}
    with torch.no_grad(), running(loaded.model):
        if options.answers == "own" and "answers" in asking.targets:
            prompts = with_own_replies(loaded, prompts, options.answer_tokens)
        parts = split(prompts, options.seed)
        steps = len(parts.fit) + 3 * len(parts.choose) + len(parts.report)
        read = _Reader(loaded, options, asking, given, steps, progress)
        random = torch.Generator().manual_seed(options.seed)
        each = -(-options.entries // len(parts.fit))
        drawn: list[Drawn] = []
        for reading in read(parts.fit):
            drawn.append(draw(reading, each, random))
        few = len(parts.fit) < FEW
        fitted = fit_all(drawn, reading.columns, options, few)
        layers = describe(loaded.model).full_layers
        chosen = _best_fits(fitted, read(parts.choose), options, layers)
        weights, spread = _with_spread(fitted, chosen, lambda: read(parts.choose), options, layers)
        recall, loss = _reported(weights, read(parts.report, options.policies()))
    silent = torch.stack([one.largest for one in drawn]).amax((0, 2)) == 0
    settings: dict[str, Any] = {
        "data": data.name, **options.settings(), "features": options.features, "rankings": (METHOD, *COMPARED),
        "targets": asking.targets, "without_questions": without_questions(prompts),
        "at": BUDGETS, "contexts": tuple(map(len, parts)), "few_contexts": few, "spread_heads": spread,
        "silent_layers": tuple(layer for layer, none in zip(layers, silent.tolist(), strict=True) if none),
    }  # fmt: skip
    lengths = [prompt.length for prompt in prompts]
    policy = PolicySpec(name=METHOD, params={"sinks": SINKS, "protect": options.protect})
    origin = profile_metadata(loaded, data, policy, METHOD, options.seed, settings, lengths, SINKS + options.protect)
    arrays = {name: array.numpy() for name, array in weights.arrays.items()}
    judged = {"recall": recall.astype(np.float32), "loss": loss.astype(np.float32)}
    return Profile(origin, {**arrays, **judged})


class _Reader:
    """Reads contexts one at a time, and counts them."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: ProbeOptions,
        asking: Asking,
        given: Mapping[int, CalibrationPrompt],
        steps: int,
        progress: Progress | None,
    ) -> None:
        self.how, self.given = (options, asking), given
        self.loaded, self._ticks = loaded, counted(iter(range(steps)), steps, progress)

    def __call__(self, prompts: Sequence[CalibrationPrompt], policies: Sequence[Policy] = ()) -> Iterator[Reading]:
        for prompt in prompts:
            yield Reading.of(self.loaded, prompt, self.given[prompt.context], *self.how, policies)
            next(self._ticks, None)


def _best_fits(fitted: Fitted, readings: Iterator[Reading], options: ProbeOptions, layers: tuple[int, ...]) -> Tensor:
    """Return of every head the regression that recalls most, [L, Hkv]."""
    regressions = len(fitted.fits[0]) - (SPREAD in options.features)
    heads = fitted.standards[0][0].shape[0]
    tried = [
        fitted.weights(options.features, layers, torch.full((len(layers), heads), number))
        for number in range(max(1, regressions))
    ]
    gains = [[recall_of(_sorted(one.largest, _scores(weights, one))).mean(0) for weights in tried] for one in readings]
    return torch.from_numpy(np.mean(gains, axis=0).argmax(0))


def _with_spread(
    fitted: Fitted,
    chosen: Tensor,
    readings: Callable[[], Iterator[Reading]],
    options: ProbeOptions,
    layers: tuple[int, ...],
) -> tuple[Weights, int]:
    """Return the weights, with an even spread for heads that it moves less, and for how many that is.

    It must move a head less for each target: by answers alone what no question needs, by reconstruction alone what is
    needed once, would not count. Every question counts the same, however large its errors are. All heads keep their
    fits if replies move more with the spread, beyond chance: heads are judged one by one, and lose together.
    """
    fits = fitted.weights(options.features, layers, chosen)
    if SPREAD not in options.features:
        return fits, 0
    last = torch.full_like(chosen, len(fitted.fits[0]) - 1)
    even = fitted.weights(options.features, layers, last)
    ratios: dict[str, list[Tensor]] = {}
    for one in readings():
        keeps = [one.kept(_scores(weights, one), budget) for weights in (fits, even) for budget in BUDGETS]
        errors = (
            one.head_errors(keeps).clamp(min=LEAST_ERROR).log().view(len(one.asked), 2, len(BUDGETS), *chosen.shape)
        )
        for asked, row in zip(one.asked, (errors[:, 0] - errors[:, 1]).mean(1), strict=True):
            ratios.setdefault(asked.target, []).append(row)
    better = torch.stack([torch.stack(rows).mean(0) > 0 for rows in ratios.values()]).all(0)
    mixture = fitted.weights(options.features, layers, torch.where(better, last, chosen))
    lost = torch.cat([_losses((fits, mixture), one).mean(-1) for one in readings()])  # [questions, 2]
    worse = lost[:, 1] - lost[:, 0]
    beyond = SURE * float(worse.std(correction=0)) / len(worse) ** 0.5
    return (fits, 0) if float(worse.mean()) > beyond else (mixture, int(better.sum()))


def _losses(rankings: Sequence[Weights], reading: Reading) -> Tensor:
    """Return how far replies move under each of several fitted rankings, [questions, R, B]."""
    keeps = [reading.kept(_scores(one, reading), budget) for one in rankings for budget in BUDGETS]
    return reading.losses(keeps).view(-1, len(rankings), len(BUDGETS))


def _reported(weights: Weights, readings: Iterator[Reading]) -> tuple[Floats, Floats]:
    """Return recall [P, B, L, Hkv] and loss [P, B] of the fitted ranking and of the policies that were asked."""
    recalls, losses = [], []
    for one in readings:
        importance, own = one.largest, _scores(weights, one)
        ranks = [one.passed.ranks(number) for number in range(len(COMPARED))]
        others = [recall_of(importance.gather(-1, rank[..., one.free].argsort(-1)).numpy()) for rank in ranks]
        recalls.append(np.stack([recall_of(_sorted(importance, own)), *others]))
        keeps = [one.kept(own, budget) for budget in BUDGETS]
        keeps += [rank < max(1, round(budget * one.length)) for rank in ranks for budget in BUDGETS]
        losses.append(one.losses(keeps).mean(0).view(-1, len(BUDGETS)).numpy())
    return np.mean(recalls, axis=0), np.mean(losses, axis=0)


def _scores(weights: Weights, reading: Reading) -> Tensor:
    """Return the fitted log importance, [L, Hkv, T]."""
    pairs = zip(weights.layers, reading.features, strict=True)
    return torch.stack([weights.log_importance(x[None], layer)[0] for layer, x in pairs])


def _sorted(importance: Tensor, scores: Tensor) -> Floats:
    """Return importance in the order of a ranking."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    found: Floats = importance.gather(-1, order).numpy()
    return found


def recall_of(importance: Floats) -> Floats:
    """Return the importance kept at each of `BUDGETS`, as a share of what the oracle keeps there, [B, ...].

    `importance` [..., T] is in the order of the ranking. A head without importance has nothing to lose: 1.
    """
    at = [max(1, round(budget * importance.shape[-1])) for budget in BUDGETS]
    kept, best = recall_curve(importance)[..., at], oracle_recall_curve(importance)[..., at]
    return np.moveaxis(kept / best, -1, 0)
