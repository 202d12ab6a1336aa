"""LU-KV: a table of local eviction ratios for every global ratio, from the true importance of calibration contexts.

For each question: oracle importance of every entry, put in the order in which the policy would keep entries,
made comparable across layers, and all 99 budgets solved at once by marginal gain. The profile is their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.arrays import Floats
from kvsearch.budgets.curves import oracle_recall_curve, recall_curve, without_gap
from kvsearch.budgets.lukv import MarginalSolver, profile_grid
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.importance import ImportancePass, QuestionImportance
from kvsearch.calibration.layer_mass import effects_under, integrated_gradients, shapley_values
from kvsearch.calibration.options import DECIDING, IN_NATS, RECALL_AT, LukvOptions, Normalization
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation, check_lengths, prompts_of, with_own_replies
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.calibration.tables import (
    CHECKED_RATIOS,
    FOLDS,
    HELD_OUT,
    RatioTables,
    checkable,
    floor_entries,
    folds_of,
)
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.plan.profile import KEPT
from kvsearch.plan.rounding import water_fill
from kvsearch.policies import Policy, create_policy
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running

CURVE_POINTS = 101
KEPT_POINTS = 401  # finer: budgets of a few percent are chosen by them
ROUNDS, REMEASURED_AT, STILL = 4, 0.9, 0.01  # of effects measured under the current plan


@dataclass(frozen=True)
class MeasuredQuestion:
    """One question's importance in the order of the policy's ranking, and what may make its layers comparable."""

    importance: NDArray[np.float32]  # [L, Hkv, T]
    scale: NDArray[np.float64]  # [L] divisor of each layer (in nats: the worth of the entries beyond the protected)
    effect: NDArray[np.float64]  # [L] nats that the answer loses for lack of the layer's context; ones if not in nats
    context: int
    kept: NDArray[np.float64]  # [C, len(RECALL_AT), L] importance that each of `choices` keeps at even budgets
    curves: NDArray[np.float64]  # [R, L, Hkv, KEPT_POINTS] worth that each of R rivals keeps at every budget
    attributed: NDArray[np.float32] | None = None  # [L, Hkv, T] nats, where entries are worth that, not `importance`

    @property
    def worth(self) -> NDArray[np.float32]:
        """What decides about entries, up to a factor for each layer, [L, Hkv, T]."""
        return self.importance if self.attributed is None else self.attributed


def choices(policy: Policy) -> dict[str, Policy]:
    """Return the policy and those of other values of a parameter that decides what it keeps, by NAME=VALUE."""
    found: dict[str, Policy] = {}
    for name, values in DECIDING.get(policy.name, {}).items():
        own = policy.parameters()[name]
        for value in (own, *(value for value in values if value != own)):
            found[f"{name}={value}"] = create_policy(policy.name, {**policy.parameters(), name: value})
    return found


def asked_prompts(
    loaded: LoadedModel, data: CalibrationData, policies: Sequence[Policy], options: LukvOptions
) -> list[CalibrationPrompt]:
    """Return the contexts of `data` with all that is asked of them, own replies where these are wanted.

    Raises:
        UsageError, IncompatibleError: see `calibrate_lukv`.
    """
    prompts = prompts_of(loaded, data, answer_tokens=options.answer_tokens, max_length=options.max_length)
    for policy in policies:
        check_lengths(prompts, policy, partial(floor_entries, policy=policy, minimum=options.minimum))
    if options.aggregate == "importance" and len({prompt.length for prompt in prompts}) > 1:
        raise UsageError("averaging importance needs contexts of one length: use aggregate=ratios")
    return with_own_replies(loaded, prompts, options.answer_tokens) if options.answers == "own" else prompts


def measure_importance(
    loaded: LoadedModel,
    prompts: Sequence[CalibrationPrompt],
    policy: Policy,
    options: LukvOptions,
    rivals: Sequence[Policy] = (),
) -> Iterator[MeasuredQuestion]:
    """Measure every question of `prompts`; `rivals` rank the same entries in the same pass."""
    firsts = accumulate((len(prompt.continuations) for prompt in prompts), initial=0)
    work = partial(_measured, policy=policy, options=options, rivals=rivals)
    for found in loaded.map(work, list(zip(prompts, firsts, strict=False))):
        yield from found


def _measured(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, int],
    policy: Policy,
    options: LukvOptions,
    rivals: Sequence[Policy],
) -> Iterator[MeasuredQuestion]:
    """Measure the questions of one prompt, the first of which has a number among all."""
    with running(loaded.model):
        yield from _questions(loaded, *item, policy, options, rivals)


def _questions(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    first: int,
    policy: Policy,
    options: LukvOptions,
    rivals: Sequence[Policy],
) -> Iterator[MeasuredQuestion]:
    others, refusal = list(choices(policy).values()), prompt.refusal(loaded.name)
    passed = ImportancePass(
        loaded.model, [policy, *others, *rivals], prompt.ids.to(loaded.device), options.group, refusal
    )
    ranks = passed.ranks()
    order = torch.argsort(ranks, dim=-1)
    places = [passed.ranks(number + 1) for number in range(len(others))]
    orders = [passed.ranks(1 + len(others) + number).argsort(-1) for number in range(len(rivals))]
    protected = ranks < policy.protected(prompt.length)
    for number, after in enumerate(prompt.continuations, first):
        found = passed.ask(after.tokens.to(loaded.device))
        values = found.importance.gather(-1, order)
        if not bool(values.isfinite().all()) or bool(found.logits.isnan().any()):
            raise IncompatibleError(refusal)
        effect, entries = _worth(passed, after, found, protected, options, number)
        scale = _scale(found, protected, options.normalization) if entries is None else entries.sum((1, 2))
        kept = np.array([_kept(found.importance, place) for place in places])
        worth = found.importance if entries is None else entries
        curves = np.array([_kept_curve(worth.gather(-1, one).numpy()) for one in orders])
        attributed = None if entries is None else entries.gather(-1, order).numpy()
        yield MeasuredQuestion(values.numpy(), scale.double().numpy(), effect, prompt.context, kept, curves, attributed)


def _worth(
    passed: ImportancePass,
    after: Continuation,
    found: QuestionImportance,
    protected: Tensor,
    options: LukvOptions,
    number: int,
) -> tuple[Floats, Tensor | None]:
    """Return what each layer is worth to an answer in nats, [L], and each entry [L, Hkv, T] where that is measured.

    Ones where layers are not compared in nats, or only later, under plans, see `remeasured_effects`.
    """
    if options.normalization == "effect":
        tokens = after.tokens.to(passed.model.device)
        return passed.effects(tokens, after.answer, found.logits, protected).double().numpy(), None
    if options.normalization == "shapley":
        return shapley_values(passed, after, protected, options.seed + number), None
    if not options.normalization.startswith("integrated"):
        return np.ones(len(protected)), None
    entries = integrated_gradients(passed, after, protected)
    layers = entries.sum((1, 2), dtype=torch.float64).numpy()
    return layers, entries.clamp(min=0) if options.normalization == "integrated_entry" else None


def calibrate_lukv(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    options: LukvOptions | None = None,
    progress: Progress | None = None,
    rivals: Sequence[Policy] = (),
) -> Profile:
    """Calibrate LU-KV for one model and one policy.

    With `rivals` the profile also has what every head keeps under each policy, for joint plans.

    Where layers are compared in nats, the profile has what the answers lose for lack of each layer's entries, mean over
    the questions: "layer_worth" float32 [2, L], and the standard error of that over the questions.

    Raises:
        UsageError: a context is too short for the policy's protected entries, or importance cannot be averaged.
        IncompatibleError: the model computes NaN, or a context and its questions do not fit its positions.
    """
    options = options or LukvOptions()
    kept, summary, worth = [], _Summary(policy, options), {}
    prompts = asked_prompts(loaded, data, [policy, *rivals], options)
    checked = options.check and options.aggregate == "ratios" and checkable(data)
    questions = measure_importance(loaded, prompts, policy, options, rivals)
    for measured in counted(questions, data.questions, progress):
        if options.normalization in IN_NATS:
            kept.append(measured)  # the weights come from all questions together
        else:
            summary.add(measured, 1 / measured.scale)
    if kept:  # over all questions, as effects are noisy one by one
        effects = np.stack([one.effect for one in kept])
        if options.normalization == "remeasured":
            effects = remeasured_effects(loaded, prompts, policy, options, kept)
        weights = layer_weights(effects.sum(0), kept)
        for measured in kept:
            summary.add(measured, weights)
        if checked:
            worth[HELD_OUT] = _held_out(kept, effects, folds_of(data), policy, options)
        worth["layer_worth"] = np.stack([effects.mean(0), effects.std(0) / len(kept) ** 0.5]).astype(np.float32)
    elif checked:
        worth[HELD_OUT] = summary.tables.held_out(folds_of(data))
    settings = {**options.texts(data), **options.settings()}
    if named := tuple(choices(policy)):
        settings["choices"] = named
    tables = summary.tables
    origin = profile_metadata(
        loaded, data, policy.spec, "lukv", options.seed, settings, tables.lengths, tables.floor(tables.length),
        [rival.spec for rival in rivals],
    )  # fmt: skip
    return Profile(origin, {**summary.arrays(), **worth})


def layer_weights(effects: Floats, kept: Sequence[MeasuredQuestion]) -> Floats:
    """Return nats per unit of each layer's worth, [L], of what its entries are worth to all questions, [L] nats."""
    mass = np.sum([one.scale for one in kept], axis=0)
    weights: Floats = np.divide(effects.clip(min=0), mass, out=np.zeros_like(mass), where=mass > 0)
    return weights


def remeasured_effects(
    loaded: LoadedModel,
    prompts: Sequence[CalibrationPrompt],
    policy: Policy,
    options: LukvOptions,
    kept: Sequence[MeasuredQuestion],
) -> Floats:
    """Measure what each question loses without one layer while the others are as the current plan has them, [M, L].

    The first plan has even budgets; each next one is solved with the mean of all rounds so far, so that layers which
    stand in for each other do not take turns. Plans evict `REMEASURED_AT`; it ends when one moves less than `STILL` of
    the entries, and after `ROUNDS`. Every round takes a pass over each context, and 2 L over each question.
    """
    shares, rounds = np.full(kept[0].importance.shape[:2], 1 - REMEASURED_AT), list[Floats]()
    for _ in range(ROUNDS):
        found = loaded.map(partial(_effects, shares=shares, policy=policy, options=options), prompts)
        rounds.append(np.stack([effects for some in found for effects in some]))
        effects: Floats = np.mean(rounds, axis=0)
        before, shares = (
            shares,
            _solved_shares(kept, layer_weights(effects.sum(0), kept), policy, options, REMEASURED_AT),
        )
        if np.abs(shares - before).sum() / 2 < STILL * shares.sum():
            break
    return effects


def _effects(
    loaded: LoadedModel, prompt: CalibrationPrompt, shares: Floats, policy: Policy, options: LukvOptions
) -> list[Floats]:
    """Measure the effects of all questions of a prompt under a plan of `shares` [L, Hkv], [L] each."""
    with running(loaded.model):
        passed = ImportancePass(loaded.model, [policy], prompt.ids.to(loaded.device), options.group)
        ranks, length = passed.ranks(), prompt.length
        floor = floor_entries(length, policy, options.minimum)
        total = max(round((1 - REMEASURED_AT) * length * shares.size), floor * shares.size)
        budgets = torch.from_numpy(water_fill(shares, total, floor, length))
        plan, protected = ranks < budgets[..., None], ranks < policy.protected(length)
        return [effects_under(passed, after, plan, protected) for after in prompt.continuations]


def _solved_shares(
    kept: Sequence[MeasuredQuestion], weights: Floats, policy: Policy, options: LukvOptions, ratio: float
) -> Floats:
    """Return the share of a prompt that heads keep where `ratio` is evicted, [L, Hkv], mean over the questions."""
    found = []
    for one in kept:
        values = solved_worth(one, weights, policy, options)
        length, heads = values.shape[-1], values.shape[0] * values.shape[1]
        floor = floor_entries(length, policy, options.minimum)
        total = max(round((1 - ratio) * length * heads), floor * heads)
        found.append(MarginalSolver(values, floor).solve(total) / length)
    mean: Floats = np.mean(found, axis=0)
    return mean


def solved_worth(
    measured: MeasuredQuestion, weights: Floats, policy: Policy, options: LukvOptions
) -> NDArray[np.float64]:
    """Return what budgets are solved with, [L, Hkv, T]; `weights` [L] make layers comparable."""
    values: NDArray[np.float64] = measured.worth.astype(np.float64) * weights[:, None, None]
    return values if options.gap else without_gap(values, policy.protected(values.shape[-1]))


def _held_out(
    kept: Sequence[MeasuredQuestion], effects: Floats, folds: Sequence[int], policy: Policy, options: LukvOptions
) -> NDArray[np.float32]:
    """Return what `RatioTables.held_out` does where layers are compared by all questions: by those of the others."""
    found = []
    for fold in range(FOLDS):
        others = [number for number, one in enumerate(kept) if folds[one.context] != fold]
        part = [kept[number] for number in others]
        weights = layer_weights(effects[others].sum(0), part)
        found.append([1 - _solved_shares(part, weights, policy, options, ratio) for ratio in CHECKED_RATIOS])
    return np.array(found, dtype=np.float32)


class _Summary:
    """Running means over the questions, so that one question's importance is in memory at a time."""

    def __init__(self, policy: Policy, options: LukvOptions) -> None:
        self.options, self.tables = options, RatioTables(policy, options.minimum)
        self._curves: list[NDArray[np.float64]] = []  # [3, L, Hkv, 101]: recall, the oracle's, importance kept
        self._mean: NDArray[np.float64] | None = None
        self._kept: list[NDArray[np.float64]] = []  # [C, len(RECALL_AT)] shares of the comparable importance
        self._by_policy: NDArray[np.float64] | None = None  # [1 + R, L, Hkv, KEPT_POINTS], a sum over the questions

    def add(self, measured: MeasuredQuestion, weights: NDArray[np.float64]) -> None:
        """Take in one question; `weights` [L] make its layers comparable."""
        values = measured.worth.astype(np.float64) * weights[:, None, None]
        length = values.shape[-1]
        worth, whole = values.sum((1, 2)), measured.importance.sum((1, 2), dtype=np.float64)
        if measured.kept.size and worth.sum() > 0:
            self._kept.append(
                measured.kept @ np.divide(worth, whole, out=np.zeros_like(whole), where=whole > 0) / worth.sum()
            )
        if len(measured.curves):
            curves = np.concatenate([_kept_curve(measured.worth)[None], measured.curves])
            curves *= weights[:, None, None]
            self._by_policy = curves if self._by_policy is None else self._by_policy + curves
        recall = _sampled(recall_curve(measured.importance))
        kept_worth = _sampled(recall_curve(values))
        oracle, mass = _sampled(oracle_recall_curve(measured.importance)), values.sum(-1, keepdims=True)
        self._curves.append(np.stack([recall, oracle, kept_worth * mass]))
        values = solved_worth(measured, weights, self.tables.policy, self.options)
        table = profile_grid(MarginalSolver(values, self.tables.floor(length)))
        self.tables.add(table, length, measured.context)
        if self.options.aggregate == "importance":
            self._mean = values if self._mean is None else self._mean + values

    def arrays(self) -> dict[str, NDArray[Any]]:
        arrays, tables = self.tables.arrays(), self.tables
        if self._mean is not None:
            solver = MarginalSolver(self._mean / len(tables.lengths), tables.floor(tables.length))
            arrays["evicted_ratio"] = profile_grid(solver)
        if self._by_policy is not None:
            arrays[KEPT] = (self._by_policy / len(tables.lengths)).astype(np.float32)
        if self._kept:
            arrays["choice_recall"] = np.mean(self._kept, axis=0).astype(np.float32)
        curves = np.mean(self._curves, axis=0).astype(np.float32)
        return {
            **arrays,
            "recall": curves[0],  # [L, Hkv, 101] share of importance kept by the policy at budget i% of the context
            "oracle_recall": curves[1],
            "mass": curves[2],  # [L, Hkv, 101] importance kept, in comparable units
        }


def _kept(importance: Tensor, ranks: Tensor) -> list[NDArray[np.float64]]:
    """Return what every layer keeps of the importance [L, Hkv, T] under `ranks` at each budget of `RECALL_AT`, [L]."""
    length = importance.shape[-1]
    taken = (ranks < max(1, round(share * length)) for share in RECALL_AT)
    return [importance.double().masked_fill(~kept, 0.0).sum((1, 2)).numpy() for kept in taken]


def _kept_curve(importance: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return what heads keep of ranked importance [L, Hkv, T] at budgets 0 ... T, read at `KEPT_POINTS` of them."""
    kept = np.zeros((*importance.shape[:-1], importance.shape[-1] + 1))
    np.cumsum(importance, axis=-1, dtype=np.float64, out=kept[..., 1:])
    return _sampled(kept, KEPT_POINTS)


def _sampled(curve: NDArray[np.float64], points: int = CURVE_POINTS) -> NDArray[np.float64]:
    """Read a curve over budgets 0 ... T at `points` of them, 0%, 1%, ... 100% of T, linear between entries."""
    position = np.linspace(0, curve.shape[-1] - 1, points)
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, curve.shape[-1] - 1)
    share = position - below
    sampled: NDArray[np.float64] = (1 - share) * curve[..., below] + share * curve[..., above]
    return sampled


def _scale(found: QuestionImportance, protected: Tensor, normalization: Normalization) -> Tensor:
    """Return what the importance of each layer is measured against, [L]."""
    importance = found.importance
    if normalization in IN_NATS:
        return importance.masked_fill(protected, 0.0).sum((1, 2))
    scales = {
        "layer": importance.sum((1, 2)),
        "layer_max": importance.amax((1, 2)),
        "output": found.output_norm,
        "residual": found.residual_norm,
        "none": torch.ones(importance.shape[0]),
    }
    scale = scales[normalization]
    return torch.where(scale > 0, scale, 1.0)
