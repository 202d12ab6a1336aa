"""LU-KV: a table of local eviction ratios for every global ratio, from the true importance of calibration contexts.

For each question: oracle importance of every entry, put in the order in which the policy would keep entries,
made comparable across layers, and all 99 budgets solved at once by marginal gain. The profile is their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.budgets.convex import oracle_recall_curve, prefix_sums, recall_curve, without_gap
from kvsearch.budgets.lukv import MarginalSolver, profile_grid
from kvsearch.calibration.importance import NODES, ImportancePass, integrated_gradients
from kvsearch.calibration.methods import Calibration
from kvsearch.calibration.options import IN_NATS, AnsweredOptions, LukvOptions, Normalization
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation, check_lengths, prompts_of, with_own_replies
from kvsearch.calibration.steps import StepCache
from kvsearch.calibration.tables import (
    CHECKED_RATIOS,
    FOLDS,
    HELD_OUT,
    RatioTables,
    checkable,
    floor_entries,
    folds_of,
    sampled,
)
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Progress, counted
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import Speed, Work, timed
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import KEPT, Arrays
from kvsearch.policies import Policy
from kvsearch.runtime.attention import running

CURVE_POINTS = 101
KEPT_POINTS = 401  # finer: budgets of a few percent are chosen by them


@dataclass(frozen=True)
class MeasuredQuestion:
    """One question's importance in the order of the policy's ranking, and what may make its layers comparable."""

    context: int
    importance: NDArray[np.float32]  # [L, Hkv, T]
    scale: NDArray[np.float64]  # [L] divisor of each layer (in nats: the importance of the entries that may go)
    effect: NDArray[np.float64]  # [L] nats that the answer loses for lack of the layer's context; ones if not in nats
    curves: NDArray[np.float64]  # [R, L, Hkv, KEPT_POINTS] importance that each compared policy keeps at every budget


MEASURED = tuple(field.name for field in fields(MeasuredQuestion) if field.name != "context")


class LukvCalibration(Calibration[LukvOptions]):
    """LU-KV for the first of the policies.

    With others the profile also has what every head keeps under each of them, for joint plans.

    Where layers are compared in nats, the profile has what the answers lose for lack of each layer's entries, mean over
    the questions: "layer_worth" float32 [2, L], and the standard error of that over the questions.
    """

    def prepare(self) -> list[CalibrationPrompt]:
        options = self.options
        prompts = prompts_of(self.loaded, self.data, answer_tokens=options.answer_tokens, max_length=options.max_length)
        for policy in self.policies:
            check_lengths(prompts, policy, partial(floor_entries, policy=policy, minimum=options.minimum))
        return prompts

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the passes over contexts and over what is asked of them, and own replies.

        What is done beside the passes is timed: the first question is measured.
        """
        times = 1.0  # that what is asked of a context is read
        if self.options.normalization == "integrated":
            times += 3 * NODES  # back takes twice as long as forth
        elif self.options.normalization == "effect":
            times += len(describe(self.loaded.model).full_layers)
        most = self.options.answer_tokens if self.options.answers == "own" else None
        work = sum((prompt.work(times, most) for prompt in prompts), reply_work(prompts, self.options))
        return work + Work(seconds=self._seconds_beside(prompts[0], times) * self.data.questions)

    def _seconds_beside(self, prompt: CalibrationPrompt, times: float) -> float:
        """Measure the first question of a prompt, and return how much longer than its passes that takes, in seconds."""
        policy, *compared_policies = self.policies
        first = [replace(prompt, continuations=prompt.continuations[:1])]
        if self.options.answers == "own":
            first = with_own_replies(self.loaded, [first], self.options.answer_tokens)

        def measure_first() -> None:
            list(measure_importance(self.loaded, first, policy, self.options, compared_policies, StepCache()))

        [seconds] = timed(measure_first, 0)
        return seconds - Speed(self.loaded.model, prompt.length).seconds(first[0].work(times))

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        policy, *compared_policies = self.policies
        options = self.options
        if options.answers == "own":
            prompts = with_own_replies(self.loaded, [prompts], options.answer_tokens, self.steps)
        measuring = measure_importance(self.loaded, prompts, policy, options, compared_policies, self.steps)
        questions = list(counted(measuring, self.data.questions, progress))
        is_checked = options.check and checkable(self.data)
        tables = RatioTables(policy, options.minimum)
        if options.normalization in IN_NATS:
            # the weights come from all questions together: effects are noisy one by one
            effects = np.stack([question.effect for question in questions])
            weights = layer_weights(effects.sum(0), questions)
            arrays = _summarize(questions, [weights] * len(questions), tables, options)
            if is_checked:
                arrays[HELD_OUT] = _held_out(questions, effects, folds_of(self.data), policy, options)
            worth = np.stack([effects.mean(0), effects.std(0) / len(questions) ** 0.5])
            arrays["layer_worth"] = worth.astype(np.float32)
        else:
            arrays = _summarize(questions, [1 / question.scale for question in questions], tables, options)
            if is_checked:
                arrays[HELD_OUT] = tables.held_out(folds_of(self.data))
        settings = {**options.texts(self.data), **options.settings()}
        rivals = [compared.spec for compared in compared_policies]
        floor = tables.floor(tables.length)
        metadata = self.describe(policy.spec, settings, tables.lengths, floor, rivals)
        return Profile(metadata, arrays)


def reply_work(prompts: Sequence[CalibrationPrompt], options: AnsweredOptions) -> Work:
    """Return the passes that own replies take, and at most their tokens; nothing where answers are given."""
    if options.answers == "given":
        return Work()
    asked = [prompt for prompt in prompts if prompt.continuations]
    replies = sum(
        continuation.most or options.answer_tokens for prompt in asked for continuation in prompt.continuations
    )
    return Work.over(prompt.length for prompt in asked) + Work.replying(replies)


def measure_importance(
    loaded: LoadedModel,
    prompts: Sequence[CalibrationPrompt],
    policy: Policy,
    options: LukvOptions,
    compared_policies: Sequence[Policy] = (),
    steps: StepCache | None = None,
) -> Iterator[MeasuredQuestion]:
    """Yield the questions of `prompts` as measured, a prompt a step.

    `compared_policies` rank the same entries in the same pass.
    """
    work = partial(_measure_prompt, policy=policy, options=options, compared_policies=compared_policies)

    measured = (steps or StepCache()).stage(prompts, partial(loaded.map, work))
    for prompt, arrays in zip(prompts, measured, strict=True):
        for number in range(len(prompt.continuations)):
            yield MeasuredQuestion(prompt.text, **{name: arrays[f"{number} {name}"] for name in MEASURED})


def _measure_prompt(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    policy: Policy,
    options: LukvOptions,
    compared_policies: Sequence[Policy],
) -> Arrays:
    """Return the questions of one prompt as measured, by number and field of a `MeasuredQuestion`."""
    arrays: dict[str, NDArray[Any]] = {}
    with running(loaded.model):
        refusal = prompt.refusal(loaded.name)
        policies = [policy, *compared_policies]
        context_pass = ImportancePass(loaded.model, policies, prompt.ids.to(loaded.device), options.group, refusal)
        ranks, *others = (context_pass.ranks(number) for number in range(len(policies)))
        order, *compared_orders = (each.to(loaded.device).argsort(-1).cpu() for each in (ranks, *others))
        protected = ranks < policy.protected(prompt.length)
        for number, continuation in enumerate(prompt.continuations):
            importance, logits = context_pass.ask(continuation.tokens.to(loaded.device))
            ordered = importance.gather(-1, order)
            if not bool(ordered.isfinite().all()) or bool(logits.isnan().any()):
                raise IncompatibleError(refusal)
            arrays |= {
                f"{number} importance": ordered.numpy(),
                f"{number} scale": _scale(importance, protected, options.normalization).double().numpy(),
                f"{number} effect": _effects(context_pass, continuation, logits, protected, options.normalization),
                f"{number} curves": np.array(
                    [_kept_curve(importance.gather(-1, order).numpy()) for order in compared_orders]
                ),
            }
    return arrays


def _effects(
    context_pass: ImportancePass,
    continuation: Continuation,
    logits: Tensor,
    protected: Tensor,
    normalization: Normalization,
) -> Floats:
    """Return what each layer is worth to an answer in nats, [L]; ones where layers are not compared in nats."""
    if normalization == "effect":
        tokens = continuation.tokens.to(context_pass.model.device)
        return context_pass.effects(tokens, continuation.answer, logits, protected).double().numpy()
    if normalization == "integrated":
        entries = integrated_gradients(context_pass, continuation, protected)
        return entries.sum((1, 2), dtype=torch.float64).numpy()
    return np.ones(len(protected))


def layer_weights(effects: Floats, questions: Sequence[MeasuredQuestion]) -> Floats:
    """Return nats per unit of each layer's importance, [L]; `effects` are nats of all questions together, [L]."""
    mass = np.sum([question.scale for question in questions], axis=0)
    weights: Floats = np.divide(effects.clip(min=0), mass, out=np.zeros_like(mass), where=mass > 0)
    return weights


def _solved_shares(
    questions: Sequence[MeasuredQuestion], weights: Floats, policy: Policy, options: LukvOptions, ratio: float
) -> Floats:
    """Return the share of a prompt that heads keep where `ratio` is evicted, [L, Hkv], mean over the questions."""
    shares = []
    for question in questions:
        values = comparable_importance(question, weights, policy, options)
        length = values.shape[-1]
        heads = values.shape[0] * values.shape[1]
        floor = floor_entries(length, policy, options.minimum)
        total = max(round((1 - ratio) * length * heads), floor * heads)
        shares.append(MarginalSolver(values, floor).solve(total) / length)
    mean: Floats = np.mean(shares, axis=0)
    return mean


def comparable_importance(
    question: MeasuredQuestion, weights: Floats, policy: Policy, options: LukvOptions
) -> NDArray[np.float64]:
    """Return what budgets are solved with, [L, Hkv, T]; `weights` [L] make layers comparable."""
    values: NDArray[np.float64] = question.importance.astype(np.float64) * weights[:, None, None]
    return values if options.gap else without_gap(values, policy.protected(values.shape[-1]))


def _held_out(
    questions: Sequence[MeasuredQuestion], effects: Floats, folds: Sequence[int], policy: Policy, options: LukvOptions
) -> NDArray[np.float32]:
    """Return what `RatioTables.held_out` does where layers are compared by all questions: by those of the others."""
    tables = []
    for fold in range(FOLDS):
        numbers = [number for number, question in enumerate(questions) if folds[question.context] != fold]
        others = [questions[number] for number in numbers]
        weights = layer_weights(effects[numbers].sum(0), others)
        tables.append([1 - _solved_shares(others, weights, policy, options, ratio) for ratio in CHECKED_RATIOS])
    return np.array(tables, dtype=np.float32)


def _summarize(
    questions: Sequence[MeasuredQuestion], weights: Sequence[Floats], tables: RatioTables, options: LukvOptions
) -> dict[str, NDArray[Any]]:
    """Return what the questions say together; `weights` [L] make the layers of each comparable.

    The table of every question goes into `tables`.
    """
    curves = []  # [3, L, Hkv, 101]: recall, the oracle's, importance kept
    by_policy = []  # [1 + R, L, Hkv, KEPT_POINTS]
    for question, weight in zip(questions, weights, strict=True):
        values = question.importance.astype(np.float64) * weight[:, None, None]
        length = values.shape[-1]
        if len(question.curves):
            kept = np.concatenate([_kept_curve(question.importance)[None], question.curves])
            by_policy.append(kept * weight[:, None, None])
        recall = sampled(recall_curve(question.importance), CURVE_POINTS)
        oracle = sampled(oracle_recall_curve(question.importance), CURVE_POINTS)
        mass = sampled(recall_curve(values), CURVE_POINTS) * values.sum(-1, keepdims=True)
        curves.append(np.stack([recall, oracle, mass]))
        values = comparable_importance(question, weight, tables.policy, options)
        tables.add(profile_grid(MarginalSolver(values, tables.floor(length))), length, question.context)
    arrays = tables.arrays()
    if by_policy:
        arrays[KEPT] = (np.sum(by_policy, axis=0) / len(questions)).astype(np.float32)
    # [L, Hkv, 101]: shares of importance that the policy and the best ranking keep at budget i% of the context, and
    # importance kept in comparable units
    names = ("recall", "oracle_recall", "mass")
    return {**arrays, **dict(zip(names, np.mean(curves, axis=0).astype(np.float32), strict=True))}


def _kept_curve(importance: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return what heads keep of ranked importance [L, Hkv, T] at budgets 0 ... T, read at `KEPT_POINTS` of them."""
    return sampled(prefix_sums(importance), KEPT_POINTS)


def _scale(importance: Tensor, protected: Tensor, normalization: Normalization) -> Tensor:
    """Return what the importance [L, Hkv, T] of each layer is measured against, [L]."""
    if normalization in IN_NATS:
        return importance.masked_fill(protected, 0.0).sum((1, 2))
    if normalization == "layer":
        scale = importance.sum((1, 2))
        return torch.where(scale > 0, scale, 1.0)
    return torch.ones(importance.shape[0])
