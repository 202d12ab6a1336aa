"""Calibrate a ranking: fit what entries are worth to later questions, choose the fit, and report how good it is.

Three disjoint parts of the contexts: one to fit on, one to choose form and regularisation of every head on, one to
report recall on. Importance is LU-KV's (Eq. 4), the largest over all that is asked of a context: the questions, and
the context itself, chunk by chunk, so that what no question asks for is worth something, too (KVzip, arXiv 2505.23416).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.budgets.curves import oracle_recall_curve, recall_curve
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.options import COMPARED, ProbeOptions, RankingOptions
from kvsearch.calibration.probe.fit import Fit, fit_network, fit_ridge, log_importance, mixed, standardised
from kvsearch.calibration.prompts import CalibrationPrompt, check_lengths, prompts_of, with_own_replies
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PolicySpec, Profile
from kvsearch.policies import Observation, Policy, create_policy
from kvsearch.policies.probe import METHOD, SINKS, Weights, features_of, needs_of
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running
from kvsearch.tasks.prompts import PromptFormat

BUDGETS = (0.05, 0.1, 0.2)  # at which recall is measured
RIDGE = (1e-4, 1e-2, 1.0)  # strengths that are tried
WIDTH, STEPS, BATCH, DECAY = 32, 1200, 1024, 1e-2
LEAST_CONTEXTS = 3
REPEAT = "Repeat the text above, word for word."
CHUNK, LEAST_CHUNK = 256, 16  # tokens of the context that are asked for at a time


class Parts(NamedTuple):
    """The contexts to fit on, to choose on and to report on."""

    fit: list[CalibrationPrompt]
    choose: list[CalibrationPrompt]
    report: list[CalibrationPrompt]


class MeasuredContext(NamedTuple):
    """The entries of a context between its sinks and the recent ones, T of them."""

    features: list[Tensor]  # by layer: [Hkv, T, F]
    importance: Tensor  # [L, Hkv, T]
    ranks: Tensor  # [P, L, Hkv, T] of the policies that were asked


def split(prompts: Sequence[CalibrationPrompt], seed: int) -> Parts:
    """Share out contexts: a fifth to choose on, a fifth to report on, the others to fit on.

    Raises:
        UsageError: there are fewer than three.
    """
    if len(prompts) < LEAST_CONTEXTS:
        raise UsageError(
            f"a ranking is fitted, chosen and reported on different contexts, and there are {len(prompts)}: give at "
            f"least {LEAST_CONTEXTS}, better dozens"
        )
    mixed_up = random.Random(seed).sample(list(prompts), len(prompts))
    part = max(1, len(prompts) // 5)
    return Parts(mixed_up[2 * part :], mixed_up[:part], mixed_up[part : 2 * part])


def calibrate_probe(
    loaded: LoadedModel, data: CalibrationData, options: ProbeOptions, progress: Progress | None = None
) -> Profile:
    """Fit a ranking; the profile has the weights, and "recall" [P, B, L, Hkv] of it and of other policies.

    Recall is the importance that a ranking keeps at a budget, as a share of what the oracle keeps there, on the
    contexts to report on. Its policies are the setting "rankings" of the provenance, the probe first.

    Raises:
        UsageError: fewer than three contexts, or one too short.
        IncompatibleError: the model computes NaN, or a context and what is asked of it do not fit its positions.
    """
    prompts = prompts_of(loaded, data, answer_tokens=options.answer_tokens, max_length=options.max_length)
    check_lengths(prompts, create_policy("snapkv", {"sinks": SINKS}), lambda _: SINKS + options.protect)
    repeat = PromptFormat(loaded.tokenizer, data.prompt).question(REPEAT)
    chunk = _chunk(loaded, prompts, repeat) if "reconstruction" in options.targets else 0
    others = options.policies()
    with running(loaded.model):
        if options.answers == "own" and "answers" in options.targets:
            prompts = with_own_replies(loaded, prompts, options.answer_tokens)
        parts = split(prompts, options.seed)
        work = (
            _measured(loaded, prompt, options, (repeat, chunk), others if part is parts.report else [])
            for part in parts
            for prompt in part
        )
        measured = counted(work, len(prompts), progress)
        sampled = _Sample(options, len(parts.fit))
        for _ in parts.fit:
            sampled.add(next(measured))
        candidates = sampled.fits()
        choose = [next(measured) for _ in parts.choose]
        gain = np.mean([_recalls(candidates, one, sampled).mean(1) for one in choose], axis=0)  # [C, L, Hkv]
        weights = sampled.weights(candidates, torch.from_numpy(gain.argmax(0)), describe(loaded.model).full_layers)
        recall = np.mean([_reported(weights, context) for context in measured], axis=0)
    settings = {
        "data": data.name, **options.settings(), "features": options.features, "rankings": (METHOD, *COMPARED),
        "at": BUDGETS, "contexts": tuple(map(len, parts)),
    }  # fmt: skip
    lengths = [prompt.length for prompt in prompts]
    policy = PolicySpec(name=METHOD, params={"sinks": SINKS, "protect": options.protect})
    origin = profile_metadata(loaded, data, policy, METHOD, options.seed, settings, lengths, SINKS + options.protect)
    arrays = {name: array.numpy() for name, array in weights.arrays.items()}
    return Profile(origin, {**arrays, "recall": recall.astype(np.float32)})


class _Sample:
    """Entries drawn from the contexts that are fitted on, as many of each; `options.entries` of a head in all."""

    def __init__(self, options: ProbeOptions, contexts: int) -> None:
        self.options, self.each = options, -(-options.entries // contexts)
        self._random = torch.Generator().manual_seed(options.seed)
        self._features: list[list[Tensor]] = []
        self._targets: list[Tensor] = []  # of each context, [L, Hkv, n]

    def add(self, context: MeasuredContext) -> None:
        """Draw entries of one more context."""
        length = context.importance.shape[-1]
        some = torch.randperm(length, generator=self._random)[: self.each].sort().values
        self._features.append([x[:, some] for x in context.features])
        self._targets.append(log_importance(context.importance)[..., some])

    def fits(self) -> list[list[Fit]]:
        """Return the fits of every layer that are tried: linear ones, and a network."""
        targets, found = torch.cat(self._targets, -1), []
        self.standards = []
        for row, target in enumerate(targets):
            x = torch.cat([context[row] for context in self._features], 1)
            center, scale = standardised(x)
            z = (x - center[:, None]) / scale[:, None]
            forms = [fit_ridge(z, target, strength) for strength in RIDGE]
            if self.options.form == "network":
                forms.append(fit_network(z, target, WIDTH, STEPS, BATCH, DECAY, self.options.seed))
            found.append(forms)
            self.standards.append((center, scale))
        return found

    def weights(self, fits: Sequence[Sequence[Fit]], chosen: Tensor, layers: tuple[int, ...]) -> Weights:
        """Return the weights of the fits `chosen` [L, Hkv]."""
        width = max(fit.output.shape[-1] for forms in fits for fit in forms)
        picked = [mixed(forms, row, width) for forms, row in zip(fits, chosen, strict=True)]
        arrays = {name: torch.stack([getattr(fit, name) for fit in picked]) for name in Fit._fields}
        center, scale = (torch.stack(parts) for parts in zip(*self.standards, strict=True))
        return Weights(self.options.features, layers, {"center": center, "scale": scale, **arrays})


def _chunk(loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], repeat: Tensor) -> int:
    """Return how many tokens of the contexts can be asked for at a time; UsageError if next to none."""
    limit, longest = describe(loaded.model).max_positions, max(prompt.length for prompt in prompts)
    room = limit - longest - repeat.shape[1] if limit else CHUNK
    if room < LEAST_CHUNK:
        raise UsageError(
            f"a context of {longest} tokens leaves no room to ask for it again ({loaded.name} takes {limit}): give "
            f"--max-length {limit - CHUNK - repeat.shape[1]}, or --targets answers"
        )
    return min(CHUNK, room)


def _measured(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    options: ProbeOptions,
    again: tuple[Tensor, int],
    policies: Sequence[Policy],
) -> MeasuredContext:
    """Read a context and ask of it all that is to be asked."""
    refusal = prompt.refusal(loaded.name)
    free = slice(SINKS, prompt.length - options.protect)

    def look(observation: Observation) -> Tensor:
        return features_of(observation, options.features)[0, :, free].cpu()

    ids = prompt.ids.to(loaded.device)
    passed = ImportancePass(loaded.model, policies, ids, options.group, refusal, (needs_of(options.features), look))
    asked = [found.importance for found in map(passed.ask, _questions(prompt, options, again, ids))]
    importance = torch.stack(asked).amax(0)[..., free]
    features = [context.noted for context in passed.noted]
    if not bool(importance.isfinite().all()) or not all(bool(x.isfinite().all()) for x in features):
        raise IncompatibleError(refusal)
    ranks = [passed.ranks(number)[..., free] for number in range(len(policies))]
    return MeasuredContext(features, importance, torch.stack(ranks) if ranks else torch.empty(0))


def _questions(
    prompt: CalibrationPrompt, options: RankingOptions, again: tuple[Tensor, int], ids: Tensor
) -> Iterator[Tensor]:
    """Yield what is asked of a context, ids [1, K]; `again` is how it is asked for, and how many tokens at a time."""
    repeat, size = again
    if "answers" in options.targets:
        yield from (after.tokens.to(ids.device) for after in prompt.continuations)
    if "reconstruction" in options.targets:
        yield from (torch.cat([repeat.to(ids.device), chunk], 1) for chunk in torch.split(ids, size, 1))


def recall_of(importance: Floats) -> Floats:
    """Return the importance kept at each of `BUDGETS`, as a share of what the oracle keeps there, [B, ...].

    `importance` [..., T] is in the order of the ranking. A head without importance has nothing to lose: 1.
    """
    at = [max(1, round(budget * importance.shape[-1])) for budget in BUDGETS]
    kept, best = recall_curve(importance)[..., at], oracle_recall_curve(importance)[..., at]
    return np.moveaxis(kept / best, -1, 0)


def _recalls(fits: Sequence[Sequence[Fit]], context: MeasuredContext, sampled: _Sample) -> Floats:
    """Return the recall of every candidate, [C, B, L, Hkv]."""
    found = []
    for number in range(len(fits[0])):
        chosen = torch.full(context.importance.shape[:2], number)
        found.append(_recall(sampled.weights(fits, chosen, tuple(range(len(fits)))), context))
    return np.stack(found)


def _recall(weights: Weights, context: MeasuredContext) -> Floats:
    """Return the recall [B, L, Hkv] of a fitted ranking."""
    pairs = zip(weights.layers, context.features, strict=True)
    scores = torch.stack([weights.log_importance(x[None], layer)[0] for layer, x in pairs])
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return recall_of(context.importance.gather(-1, order).numpy())


def _reported(weights: Weights, context: MeasuredContext) -> Floats:
    """Return the recall [P, B, L, Hkv] of the fitted ranking and of the policies that were asked."""
    others = [recall_of(context.importance.gather(-1, ranks.argsort(-1)).numpy()) for ranks in context.ranks]
    return np.stack([_recall(weights, context), *others])
