"""LU-KV: a table of local eviction ratios for every global ratio, from the true importance of calibration contexts.

For each question: oracle importance of every entry, put in the order in which the policy would keep entries,
made comparable across layers, and all 99 budgets solved at once by marginal gain. The profile is their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.budgets.curves import oracle_recall_curve, recall_curve, without_gap
from kvsearch.budgets.marginal import MarginalSolver, profile_grid
from kvsearch.calibrate.capture import Capture, Captured
from kvsearch.calibrate.data import CalibrationData, Context
from kvsearch.calibrate.options import STABILITY_RATIOS, LukvOptions, Normalization
from kvsearch.calibrate.provenance import provenance
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import GRID, PolicySpec, Profile, ProfileMetadata
from kvsearch.policies import Policy
from kvsearch.runtime.attention import running
from kvsearch.tasks.prompts import PromptFormat

CURVE_POINTS = 101


@dataclass(frozen=True)
class Measured:
    """One question's importance in the order of the policy's ranking, and what may make its layers comparable."""

    importance: NDArray[np.float32]  # [L, Hkv, T]
    scale: NDArray[np.float64]  # [L] divisor of each layer ("effect": the importance beyond the protected entries)
    effect: NDArray[np.float64]  # [L] nats the answer loses without the layer's context; ones where not measured
    context: int


def floor_entries(length: int, policy: Policy, options: LukvOptions) -> int:
    """Entries every head keeps at least: the protected ones, or `minimum` of the context."""
    return max(math.ceil(options.minimum * length - 1e-9), policy.protected(length), 1)


def measure_importance(
    loaded: LoadedModel, data: CalibrationData, policy: Policy, options: LukvOptions
) -> Iterator[Measured]:
    """Measure every question of `data`; the model must run the attention implementation "kvsearch"."""
    for number, (ids, questions) in enumerate(_tokenised(loaded, data, policy, options)):
        capture = Capture(loaded.model, [policy], ids.to(loaded.device), options.group)
        ranks = capture.ranks()
        order = torch.argsort(ranks, dim=-1)
        protected = ranks < policy.protected(ids.shape[1])
        for tokens, answer in questions:
            captured = capture.ask(tokens.to(loaded.device))
            values = captured.importance.gather(-1, order)
            if not bool(values.isfinite().all()) or bool(captured.logits.isnan().any()):
                raise IncompatibleError(f"{loaded.name}: the model computes NaN on calibration context {number}")
            effect = torch.ones(len(values))
            if options.normalization == "effect":
                effect = capture.effects(tokens.to(loaded.device), answer, captured.logits, protected)
            scale = _scale(captured, protected, options.normalization)
            yield Measured(values.numpy(), scale.double().numpy(), effect.double().numpy(), number)


def calibrate_lukv(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    options: LukvOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Calibrate LU-KV for one model and one policy.

    Raises:
        UsageError: a context is too short for the policy's protected entries, or importance cannot be averaged.
        IncompatibleError: the model computes NaN, or a context and its questions do not fit its positions.
    """
    options = options or LukvOptions()
    kept, summary = [], _Summary(policy, options)
    with running(loaded.model):
        for done, measured in enumerate(measure_importance(loaded, data, policy, options)):
            if options.normalization == "effect":
                kept.append(measured)  # the weights come from all questions together
            else:
                summary.add(measured, 1 / measured.scale)
            if progress is not None:
                progress(done + 1, data.questions)
    weights = _effect_weights(kept) if kept else np.ones(0)
    for measured in kept:
        summary.add(measured, weights)
    return Profile(_metadata(loaded, data, policy, options, summary), summary.arrays())


def _effect_weights(measured: Sequence[Measured]) -> NDArray[np.float64]:
    """Nats per unit of importance of each layer, over all questions: effects are noisy one by one, [L]."""
    mass = np.sum([item.scale for item in measured], axis=0)
    effect = np.sum([item.effect for item in measured], axis=0)
    weights: NDArray[np.float64] = np.divide(effect, mass, out=np.zeros_like(mass), where=mass > 0)
    return weights


class _Summary:
    """Running means over the questions, so that one question's importance is in memory at a time."""

    def __init__(self, policy: Policy, options: LukvOptions) -> None:
        self.policy, self.options = policy, options
        self.lengths: list[int] = []
        self.contexts: list[int] = []
        self._grid: list[NDArray[np.float32]] = []
        self._curves: list[NDArray[np.float64]] = []  # [3, L, Hkv, 101]: recall, the oracle's, importance kept
        self._mean: NDArray[np.float64] | None = None

    def add(self, measured: Measured, weights: NDArray[np.float64]) -> None:
        """Take in one question; `weights` [L] make its layers comparable."""
        values = measured.importance.astype(np.float64) * weights[:, None, None]
        length = values.shape[-1]
        self.lengths.append(length)
        self.contexts.append(measured.context)
        recall = _sampled(recall_curve(measured.importance))
        oracle, mass = _sampled(oracle_recall_curve(measured.importance)), values.sum(-1, keepdims=True)
        self._curves.append(np.stack([recall, oracle, recall * mass]))
        if not self.options.gap:
            values = without_gap(values)
        self._grid.append(profile_grid(MarginalSolver(values, self.floor(length))))
        if self.options.aggregate == "importance":
            self._mean = values if self._mean is None else self._mean + values

    def floor(self, length: int) -> int:
        return floor_entries(length, self.policy, self.options)

    @property
    def length(self) -> int:
        return max(self.lengths)

    def _mean_ratios(self) -> NDArray[np.float32]:
        """Local ratios [99, L, Hkv], each row over the questions whose context can be cut that far."""
        reach = np.array([1 - self.floor(length) / length for length in self.lengths])
        rows = np.arange(1, GRID + 1) / (GRID + 1)
        able = reach[:, None] >= np.minimum(rows, reach.max()) - 1e-9  # [M, 99]
        shares = able / able.sum(0)
        mean: NDArray[np.float64] = np.einsum("mr,mrlh->rlh", shares, np.stack(self._grid))
        return mean.astype(np.float32)

    def arrays(self) -> dict[str, NDArray[Any]]:
        table = self._mean_ratios()
        if self._mean is not None:
            table = profile_grid(MarginalSolver(self._mean / len(self.lengths), self.floor(self.length)))
        rows = [round(100 * ratio) - 1 for ratio in STABILITY_RATIOS]
        curves = np.mean(self._curves, axis=0).astype(np.float32)
        return {
            "evicted_ratio": table,
            "question_ratio": np.stack(self._grid)[:, rows],  # [M, 9, L, Hkv] at 0.1 ... 0.9
            "question_context": np.array(self.contexts, dtype=np.int32),
            "recall": curves[0],  # [L, Hkv, 101] share of importance kept by the policy at budget i% of the context
            "oracle_recall": curves[1],
            "mass": curves[2],  # [L, Hkv, 101] importance kept, in comparable units
        }


def _sampled(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """A curve over budgets 0 ... T read at 0%, 1%, ... 100% of T, linear between entries."""
    position = np.linspace(0, curve.shape[-1] - 1, CURVE_POINTS)
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, curve.shape[-1] - 1)
    share = position - below
    sampled: NDArray[np.float64] = (1 - share) * curve[..., below] + share * curve[..., above]
    return sampled


def _tokenised(
    loaded: LoadedModel, data: CalibrationData, policy: Policy, options: LukvOptions
) -> list[tuple[Tensor, list[tuple[Tensor, int]]]]:
    """Every context as ids [1, T] with its questions, checked before anything is measured."""
    prompt = PromptFormat(loaded.tokenizer, data.prompt)
    contexts = []
    for context in data.contexts:
        ids, questions = prompt.context(context.text), list(_question_tokens(prompt, context, options))
        _check_length(loaded, ids.shape[1], max(row.shape[1] for row, _ in questions), policy, options)
        contexts.append((ids, questions))
    if options.aggregate == "importance" and len({ids.shape[1] for ids, _ in contexts}) > 1:
        raise UsageError("averaging importance needs contexts of one length: use aggregate=ratios")
    return contexts


def _question_tokens(prompt: PromptFormat, context: Context, options: LukvOptions) -> Iterator[tuple[Tensor, int]]:
    """Question and answer as one row of ids, and where the answer starts."""
    for pair in context.questions:
        question, answer = prompt.question(pair.question), prompt.answer(pair.answer)
        yield torch.cat([question, answer[:, : options.answer_tokens]], 1), question.shape[1]


def _scale(captured: Captured, protected: Tensor, normalization: Normalization) -> Tensor:
    """What the importance of each layer is measured against, [L]."""
    importance = captured.importance
    if normalization == "effect":
        return importance.masked_fill(protected, 0.0).sum((1, 2))
    scales = {
        "layer": importance.sum((1, 2)),
        "layer_max": importance.amax((1, 2)),
        "output": captured.output_norm,
        "residual": captured.residual_norm,
        "none": torch.ones(importance.shape[0]),
    }
    scale = scales[normalization]
    return torch.where(scale > 0, scale, 1.0)


def _check_length(loaded: LoadedModel, length: int, asked: int, policy: Policy, options: LukvOptions) -> None:
    # unlike `protected`, not clipped to a short context: the advice must name a length that is enough
    floor = max(floor_entries(length, policy, options), policy.sink_count + policy.window_count)
    if length <= 2 * floor:
        raise UsageError(
            f"a calibration context of {length} tokens is too short for {policy.name}: {floor} entries are always "
            f"kept, so there is next to nothing to decide; give at least {4 * floor} tokens"
        )
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if limit and length + asked > limit:
        raise IncompatibleError(
            f"a calibration context has {length} tokens and up to {asked} of question and answer: "
            f"{loaded.name} takes at most {limit}"
        )


def _metadata(
    loaded: LoadedModel, data: CalibrationData, policy: Policy, options: LukvOptions, summary: _Summary
) -> ProfileMetadata:
    from kvsearch.models.architecture import describe

    settings = {key: value for key, value in asdict(options).items() if key != "seed"}
    return ProfileMetadata(
        model=loaded.fingerprint,
        method="lukv",
        policy=PolicySpec(name=policy.name, params=policy.parameters()),
        length=summary.length,
        questions=len(summary.lengths),
        layers=describe(loaded.model).full_layers,
        floor=summary.floor(summary.length),
        provenance=provenance("lukv", options.seed, data.sha256, {"data": data.name, **settings}),
    )
