"""Calibrate a ranking: fit what entries are worth to later questions, choose the fit, and report how good it is.

Three disjoint parts of the contexts: one to fit on, one to choose on, one to report on. Importance is LU-KV's (Eq. 4),
the largest over all that is asked of a context: the questions, and the context itself, chunk by chunk, so that what no
question asks for is worth something, too (KVzip, arXiv 2505.23416).

A head gets the fit that recalls most importance, or an even spread over its entries where that moves its output less.
Importance says which entries a head looks at, not that it needs them: the output of a head that looks everywhere is a
mean, and an even sample keeps a mean that the entries with most attention do not. A head whose context nothing looks
at has nothing to fit: it is ranked by the spread, below all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.budgets.curves import oracle_recall_curve, recall_curve
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import COMPARED, ProbeOptions
from kvsearch.calibration.probe.reading import (
    BUDGETS,
    Asking,
    Parts,
    Reading,
    kind_to_leave_out,
    known_kinds,
    prepared,
    split,
    without_questions,
)
from kvsearch.calibration.probe.sample import OTHERS, Drawn, Fitted, draw, fit_all, places_drawn
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.calibration.steps import Arrays, Steps, identity_of, kept_replies
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PolicySpec, Profile
from kvsearch.policies import Policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.probe import METHOD, SINKS, SPREAD, Weights
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running

FEW = 4  # contexts to fit on, below which there is strong shrinkage alone
SURE = 2.0  # standard errors
LEAST_ERROR = 1e-30  # of a head whose output does not move


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
    prompts, asking = prepared(loaded, data, options)
    given = {prompt.context: prompt for prompt in prompts}
    done = Steps(directory, identity_of(loaded, data, prompts, {"seed": options.seed, **options.settings()}))
    with torch.no_grad(), running(loaded.model):
        if options.answers == "own" and "answers" in asking.targets:
            prompts = kept_replies(loaded, prompts, options.answer_tokens, done)
        parts = split(prompts, options.seed)
        left_out = kind_to_leave_out(parts) if "answers" in asking.targets else None
        others = parts if left_out is None else _without(parts, left_out)
        again = 0 if left_out is None else len(others.choose)
        steps = len(parts.fit) + 3 * (len(parts.choose) + again) + len(parts.report)
        read = _Reader(loaded, options, asking, given, done, steps, progress)
        places = places_drawn(parts.fit, options)
        drawn = [
            Drawn(one) for one in read(parts.fit, lambda reading: draw(reading, places[reading.context], left_out))
        ]
        few = len(parts.fit) < FEW
        fitted = fit_all(drawn, options, few, done)
        layers = describe(loaded.model).full_layers
        weights, spread = _chosen(fitted, partial(read, parts.choose), options, layers)
        held: _LeftOut | None = None
        if left_out is not None:
            linear, same = options.model_copy(update={"form": "linear"}), {one.context for one in others.fit}
            kept = [one for one, prompt in zip(drawn, parts.fit, strict=True) if prompt.context in same]
            second = fit_all(kept, linear, len(kept) < FEW, done, OTHERS)
            held = _LeftOut(left_out, _chosen(second, partial(read, others.choose), linear, layers)[0])
        judged = _reported(weights, partial(read, parts.report, policies=options.policies()), held)
    unseen = [f"{layers[row]}.{head}" for row, head in fitted.unseen.nonzero().tolist()]
    settings: dict[str, Any] = {
        "data": data.name, **options.settings(), WRITTEN_FOR: VERSION, "features": options.looked_at,
        "rankings": (METHOD, *COMPARED), "targets": asking.targets,
        "without_questions": without_questions(prompts), "at": BUDGETS, "contexts": tuple(map(len, parts)),
        "few_contexts": few, "spread_heads": spread, "unseen_heads": tuple(unseen),
        **(_told_of(left_out, prompts, parts.report) if "answers" in asking.targets else {}),
    }  # fmt: skip
    lengths = [prompt.length for prompt in prompts]
    policy = PolicySpec(name=METHOD, params={"sinks": SINKS, "protect": options.protect})
    origin = profile_metadata(loaded, data, policy, METHOD, options.seed, settings, lengths, SINKS + options.protect)
    arrays = {name: array.numpy() for name, array in weights.arrays.items()}
    return Profile(origin, {**arrays, **{name: array.astype(np.float32) for name, array in judged.items()}})


class _LeftOut(NamedTuple):
    """A kind of question, and the fit that never saw it."""

    kind: str
    weights: Weights


def _without(parts: Parts, kind: str) -> Parts:
    """Return the contexts of which anything but questions of a kind is asked, with that alone."""
    return Parts(*([prompt.only(prompt.kinds - {kind}) for prompt in part if prompt.kinds != {kind}] for part in parts))


def _told_of(
    left_out: str | None, prompts: Sequence[CalibrationPrompt], report: Sequence[CalibrationPrompt]
) -> dict[str, Any]:
    """Return what the settings say of kinds of questions, and of the one that was left out of the second fit."""
    told = {"kinds": len(known_kinds(prompts))}
    if left_out is None:
        return told
    kinds = [after.kind for prompt in report for after in prompt.continuations]
    return {**told, "left_out": left_out, "left_out_questions": kinds.count(left_out)}


Measure = Callable[[Reading], Mapping[str, Tensor]]
Measured = Callable[[Measure], Iterable[Arrays]]  # what is measured of some contexts


class _Reader:
    """Reads contexts one at a time, and counts them; of those that were read before what was measured is there."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: ProbeOptions,
        asking: Asking,
        given: Mapping[int, CalibrationPrompt],
        done: Steps,
        steps: int,
        progress: Progress | None,
    ) -> None:
        self.how, self.given, self.done = (options, asking), given, done
        self.loaded, self._ticks = loaded, counted(iter(range(steps)), steps, progress)
        next(self._ticks, None)  # the next one tells that the first is done

    def __call__(
        self, prompts: Sequence[CalibrationPrompt], measure: Measure, policies: Sequence[Policy] = ()
    ) -> Iterator[Arrays]:
        """Yield what `measure` makes of every context."""
        step = self.done.stage()
        for prompt in prompts:
            yield step(partial(self._measured, prompt, measure, policies))
            next(self._ticks, None)

    def _measured(self, prompt: CalibrationPrompt, measure: Measure, policies: Sequence[Policy]) -> Arrays:
        given = self.given[prompt.context].only(prompt.kinds)
        reading = Reading.of(self.loaded, prompt, given, *self.how, policies)
        return {name: values.cpu().numpy() for name, values in measure(reading).items()}


def _chosen(fitted: Fitted, read: Measured, options: ProbeOptions, layers: tuple[int, ...]) -> tuple[Weights, int]:
    """Return the weights of what is best of every head on contexts to choose on, see `_with_spread`."""
    return _with_spread(fitted, _best_fits(fitted, read, options, layers), read, options, layers)


def _best_fits(fitted: Fitted, read: Measured, options: ProbeOptions, layers: tuple[int, ...]) -> Tensor:
    """Return of every head the regression that recalls most, [L, Hkv]."""
    regressions = len(fitted.fits[0]) - 1
    heads = fitted.standards[0][0].shape[0]
    tried = [
        fitted.weights(options.looked_at, layers, torch.full((len(layers), heads), number))
        for number in range(max(1, regressions))
    ]

    def gains(one: Reading) -> dict[str, Tensor]:
        recalls = _recalls(one.largest, [_order(_scores(weights, one)) for weights in tried])
        return {"gain": torch.from_numpy(recalls.mean(1))}

    return torch.from_numpy(np.mean([one["gain"] for one in read(gains)], axis=0).argmax(0))


def _with_spread(
    fitted: Fitted,
    chosen: Tensor,
    read: Measured,
    options: ProbeOptions,
    layers: tuple[int, ...],
) -> tuple[Weights, int]:
    """Return the weights, with an even spread for heads that it moves less, and for how many that is.

    It must move a head less for each target: by answers alone what no question needs, by reconstruction alone what is
    needed once, would not count. Every question counts the same, however large its errors are. All heads keep their
    fits if replies move more with the spread, beyond chance: heads are judged one by one, and lose together.
    """
    fits = fitted.weights(options.looked_at, layers, chosen)
    if SPREAD not in options.features:
        return fits, 0
    last = torch.full_like(chosen, len(fitted.fits[0]) - 1)
    even = fitted.weights(options.looked_at, layers, last)

    def ratios(one: Reading) -> dict[str, Tensor]:
        """Return by target how much less the spread moves every head, log [questions, L, Hkv]."""
        keeps = [one.kept(_scores(weights, one), budget) for weights in (fits, even) for budget in BUDGETS]
        errors = (
            one.head_errors(keeps).clamp(min=LEAST_ERROR).log().view(len(one.asked), 2, len(BUDGETS), *chosen.shape)
        )
        less, targets = (errors[:, 0] - errors[:, 1]).mean(1), [asked.target for asked in one.asked]
        return {name: less[torch.tensor([target == name for target in targets])] for name in dict.fromkeys(targets)}

    found: dict[str, list[Tensor]] = {}
    for measured in read(ratios):
        for target, rows in measured.items():
            found.setdefault(target, []).append(torch.from_numpy(rows))
    better = torch.stack([torch.cat(rows).mean(0) > 0 for rows in found.values()]).all(0)
    mixture = fitted.weights(options.looked_at, layers, torch.where(better, last, chosen))
    both = read(lambda one: {"loss": _losses((fits, mixture), one).mean(-1)})
    lost = torch.from_numpy(np.concatenate([one["loss"] for one in both]))  # [questions, 2]
    worse = lost[:, 1] - lost[:, 0]
    beyond = SURE * float(worse.std(correction=0)) / len(worse) ** 0.5
    return (fits, 0) if float(worse.mean()) > beyond else (mixture, int((better & ~fitted.unseen).sum()))


def _losses(rankings: Sequence[Weights], reading: Reading) -> Tensor:
    """Return how far replies move under each of several fitted rankings, [questions, R, B]."""
    keeps = [reading.kept(_scores(one, reading), budget) for one in rankings for budget in BUDGETS]
    return reading.losses(keeps).view(-1, len(rankings), len(BUDGETS))


def _reported(weights: Weights, read: Measured, held: _LeftOut | None) -> dict[str, Floats]:
    """Return recall [P, B, L, Hkv] and loss [P, B] of the fitted ranking and of the policies that were asked.

    "kind_recall" and "kind_loss" are those for a kind that was left out, [P + 1, ...]: the fit without it is the first.
    """

    def measure(one: Reading) -> dict[str, Tensor]:
        fits, rows = [_scores(weights, one)], [held is not None and asked.kind == held.kind for asked in one.judged]
        if held is not None and any(rows):
            fits.insert(0, _scores(held.weights, one))
        ranks = [one.passed.ranks(number) for number in range(len(COMPARED))]
        keeps = [one.kept(scores, budget) for scores in fits for budget in BUDGETS]
        keeps += [rank < max(1, round(budget * one.length)) for rank in ranks for budget in BUDGETS]
        lost = one.losses(keeps).view(len(rows), -1, len(BUDGETS)).numpy()
        orders = [_order(scores) for scores in fits] + [rank[..., one.free].argsort(-1) for rank in ranks]
        first = len(fits) - 1
        measured = {"recall": _recalls(one.largest, orders[first:]), "loss": lost[:, first:].mean(0)}
        if held is not None and any(rows):
            measured |= {"kind_recall": _recalls(one.largest_of(held.kind), orders), "kind_loss": lost[rows].mean(0)}
        return {name: torch.from_numpy(values) for name, values in measured.items()}

    found: dict[str, list[Floats]] = {}
    for measured in read(measure):
        for name, values in measured.items():
            found.setdefault(name, []).append(values)
    return {name: np.mean(values, axis=0) for name, values in found.items()}


def _recalls(importance: Tensor, orders: Sequence[Tensor]) -> Floats:
    """Return the recall of several orders [L, Hkv, T] of entries, [R, B, L, Hkv]."""
    return np.stack([recall_of(importance.gather(-1, order).numpy()) for order in orders])


def _scores(weights: Weights, reading: Reading) -> Tensor:
    """Return the fitted log importance, [L, Hkv, T]."""
    pairs = zip(weights.layers, reading.features, strict=True)
    return torch.stack([weights.log_importance(x[None], layer)[0] for layer, x in pairs])


def _order(scores: Tensor) -> Tensor:
    """Return the entries in the order of their scores, the best first."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def recall_of(importance: Floats) -> Floats:
    """Return the importance kept at each of `BUDGETS`, as a share of what the oracle keeps there, [B, ...].

    `importance` [..., T] is in the order of the ranking. A head without importance has nothing to lose: 1.
    """
    at = [max(1, round(budget * importance.shape[-1])) for budget in BUDGETS]
    kept, best = recall_curve(importance)[..., at], oracle_recall_curve(importance)[..., at]
    return np.moveaxis(kept / best, -1, 0)
