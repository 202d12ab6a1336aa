"""Calibrate a ranking: fit what entries are worth to later questions, choose the fit, and report how good it is.

Three disjoint parts of the contexts: one to fit on, one to choose on, one to report on. Importance is LU-KV's (Eq. 4),
the largest over all that is asked of a context: the questions, and the context itself, chunk by chunk, so that what no
question asks for is worth something, too (KVzip, arXiv 2505.23416).

A head gets the fit that recalls most importance, or an even spread over its entries where that moves its output less,
see `rankings`. A head whose context nothing looks at has nothing to fit: it is ranked by the spread, below all others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import ProbeOptions
from kvsearch.calibration.probe.contexts import FitContexts
from kvsearch.calibration.probe.rankings import LeftOut, Measured, Ranking, gains, prefers_spread, reported
from kvsearch.calibration.probe.reading import Reading
from kvsearch.calibration.probe.sample import OTHERS, Drawn, Fitted, draw, fit_all, places_drawn
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.policies.generic import SPREAD
from kvsearch.policies.probe import METHOD, Weights
from kvsearch.progress import Progress

FEW = 4  # contexts to fit on, below which there is strong shrinkage alone


def calibrate_probe(
    loaded: LoadedModel,
    data: CalibrationData,
    options: ProbeOptions,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> Profile:
    """Fit a ranking; the profile has the weights, and how good it and other policies are on the contexts to report on.

    "recall" [P, B, L, Hkv] is the importance that a ranking keeps at a budget, as a share of what the oracle keeps
    there; "loss" [P, B] is how far next-token distributions of replies move where all heads keep as much (total
    variation). Policies are the setting "rankings" of the provenance, the probe first.

    Where the data have two kinds of questions or more, one is left out of a second fit, by regressions alone.
    "kind_recall" and "kind_loss" are of that kind's questions on the contexts to report on, with one policy more: the
    fit that never saw the kind comes first. Which kind it is and how many questions are the settings "left_out" and
    "left_out_questions".

    What is finished is kept in `directory`, and what is there is not measured again.

    Raises:
        UsageError: fewer than three contexts, or one too short; what is kept in `directory` is damaged, or of another
            fit.
        IncompatibleError: the model computes NaN, or a context and what is asked of it do not fit its positions.
    """
    with torch.no_grad():
        contexts = FitContexts.of(loaded, data, options, progress, directory)
        parts, others, left_out = contexts.parts, contexts.others, contexts.left_out
        places = places_drawn(parts.fit, options)
        read = contexts.read(parts.fit, lambda reading: draw(reading, places[reading.context], left_out))
        drawn = [Drawn(one) for one in read]
        few = len(parts.fit) < FEW
        fitted = fit_all(loaded, drawn, options, few, contexts.done)
        layers = describe(loaded.model).full_layers
        weights, spread = _chosen(fitted, partial(contexts.read, parts.choose), options, layers)
        held: LeftOut | None = None
        if left_out is not None and others is not None:
            linear, same = options.model_copy(update={"form": "linear"}), {one.context for one in others.fit}
            kept = [one for one, prompt in zip(drawn, parts.fit, strict=True) if prompt.context in same]
            second = fit_all(loaded, kept, linear, len(kept) < FEW, contexts.done, OTHERS)
            never, _ = _chosen(second, partial(contexts.read, others.choose), linear, layers)
            held = LeftOut(left_out, partial(scores_of, never))
        report = partial(contexts.read, parts.report, policies=options.policies())
        judged = reported(partial(scores_of, weights), report, held)
    settings = {
        "features": options.looked_at, "few_contexts": few, "spread_heads": int((spread & ~fitted.unseen).sum()),
        "unseen_heads": tuple(f"{layers[row]}.{head}" for row, head in fitted.unseen.nonzero().tolist()),
    }  # fmt: skip
    arrays = {name: array.numpy() for name, array in weights.arrays._asdict().items()}
    return contexts.profile(METHOD, {**arrays, **judged}, settings)


def _chosen(fitted: Fitted, read: Measured, options: ProbeOptions, layers: tuple[int, ...]) -> tuple[Weights, Tensor]:
    """Return the weights of what is best of every head on contexts to choose on, and where that is the spread."""

    def weights(chosen: Tensor) -> Weights:
        return fitted.weights(options.looked_at, layers, chosen)

    last, heads = len(fitted.fits[0]) - 1, fitted.standards[0][0].shape[0]  # behind the regressions the spread
    tried: list[Ranking] = [
        partial(scores_of, weights(torch.full((len(layers), heads), number))) for number in range(max(1, last))
    ]
    found = [one["gain"] for one in read(lambda reading: {"gain": gains(tried, reading)})]
    best = torch.from_numpy(np.mean(found, axis=0).argmax(0))
    if SPREAD not in options.features:
        return weights(best), torch.zeros_like(best, dtype=torch.bool)
    spread = prefers_spread(partial(scores_of, weights(best)), read)
    return weights(torch.where(spread, last, best)), spread


def scores_of(weights: Weights, reading: Reading) -> Tensor:
    """Return the fitted log importance of a context's entries, [L, Hkv, T]."""
    pairs = zip(weights.layers, reading.features, strict=True)
    return torch.stack([weights.log_importance(x[None], layer)[0] for layer, x in pairs])
