"""LU-KV: a table of local eviction ratios for every global ratio, from the worth of entries to later answers.

The worth of each entry is measured for every question, in the order in which the policy would keep entries, and all 99
budgets are solved at once by marginal gain. It is the output error that an entry takes away, and then the table is
solved for the mean of the questions; or it is the paper's oracle importance, made comparable across layers, and then
the table is the mean of the questions' tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.budgets.convex import compute_oracle_recall, compute_recall, sort_as_oracle, sum_prefixes
from kvsearch.budgets.lukv import MarginalSolver, solve_grid
from kvsearch.calibration.base import Calibration
from kvsearch.calibration.importance import QUADRATURE_NODES, ImportancePass, compute_error_drops, measure_output_errors
from kvsearch.calibration.options import AnsweredOptions, LukvOptions
from kvsearch.calibration.prompts import (
    CalibrationPrompt,
    Continuation,
    add_own_replies,
    check_lengths,
    encode_prompts,
    split_reply_batches,
)
from kvsearch.calibration.steps import StepCache
from kvsearch.calibration.tables import (
    HELD_OUT,
    RatioTables,
    assign_folds,
    floor_entries,
    has_enough_contexts,
    sample_curves,
)
from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import Work
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO, KEPT, Arrays
from kvsearch.policies import Policy
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.replay.forced_answers import TOGETHER, count_side_by_side
from kvsearch.runtime.speed import scale_to_first

CURVE_POINTS = 101
KEPT_POINTS = 401  # finer: budgets of a few percent are chosen by them


@dataclass(frozen=True)
class MeasuredQuestion:
    """Worth of entries to one question, in the order of the policy's ranking."""

    context: int
    importance: NDArray[np.float32]  # [L, Hkv, T] >= 0
    scale: NDArray[np.float64]  # [L] > 0, what it is divided by to be comparable across layers, or questions
    curves: NDArray[np.float64]  # [R, L, Hkv, KEPT_POINTS] importance that each compared policy keeps at every budget

    @property
    def comparable(self) -> NDArray[np.float64]:
        """Importance in comparable units, [L, Hkv, T]."""
        values: NDArray[np.float64] = self.importance / self.scale[:, None, None]
        return values


MEASURED_FIELDS = tuple(field.name for field in fields(MeasuredQuestion) if field.name != "context")


class LukvCalibration(Calibration[LukvOptions]):
    """LU-KV calibration for the first of the policies.

    With several policies the profile also has the kept importance of every head under each of them, for joint plans.
    """

    def prepare(self) -> list[CalibrationPrompt]:
        options = self.options
        prompts = encode_prompts(
            self.loaded, self.data, answer_tokens=options.answer_tokens, max_length=options.max_length
        )
        for policy in self.policies:
            check_lengths(prompts, policy, partial(floor_entries, policy=policy, minimum=options.minimum))
        return prompts

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Estimate the passes over contexts and questions, and own replies; the first context is measured for that."""
        options = self.options
        times = 1.0  # that what is asked of a context is read
        if options.normalization == "error":
            times += 1 + 2 * QUADRATURE_NODES  # rows of a pass; back it takes as long again
        replies = estimate_replies(prompts, options, read=False)
        if options.answers == "own":
            prompts = [prompt.lengthen_answers(options.answer_tokens) for prompt in prompts]
        works = []
        for prompt in prompts:
            context = prompt.work()
            whole = prompt.work(1)
            tokens = context.tokens + (whole.tokens - context.tokens) * times
            passes = 3 if options.normalization == "error" else whole.passes  # of all questions together, and back
            works.append(replace(whole, passes=passes, tokens=tokens))
        measure_first = partial(_measure_prompt, self.loaded, prompts[0], self.policies, options)
        return scale_to_first(self.loaded.model, works, measure_first) + replies

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        policy, *compared_policies = self.policies
        options = self.options
        measuring = measure_importance(self.loaded, prompts, policy, options, compared_policies, self.steps)
        questions = list(with_progress(measuring, self.data.questions, progress))
        tables = RatioTables(policy, options.minimum)
        arrays = _summarize(questions, tables, options)
        table_of = None
        if options.normalization == "error":
            table_of = partial(_solve_mean_table, questions, tables, options)
            arrays[EVICTED_RATIO] = table_of(range(len(questions)))
        if options.check and has_enough_contexts(self.data):
            arrays[HELD_OUT] = tables.held_out(assign_folds(self.data), table_of)
        settings = {**options.texts(self.data), **options.settings()}
        rivals = [compared.spec for compared in compared_policies]
        floor = tables.floor(tables.length)
        metadata = self.describe(policy.spec, settings, tables.lengths, floor, rivals)
        return Profile(metadata, arrays)


def estimate_replies(prompts: Sequence[CalibrationPrompt], options: AnsweredOptions, *, read: bool = True) -> Work:
    """Estimate the passes and tokens of own replies, at most; nothing where answers are given.

    The prompts are `read` for them, unless replies go on from other passes over them.
    """
    if options.answers == "given":
        return Work()
    answered = [prompt for prompt in prompts if prompt.may_reply]
    work = Work.over(prompt.length for prompt in answered) if read else Work()
    for first in range(0, len(answered), TOGETHER):
        part = answered[first : first + TOGETHER]
        limits = [[after.limit_reply(options.answer_tokens) for after in prompt.continuations] for prompt in part]
        questions = max(map(len, limits))
        turns = -(-questions // count_side_by_side(len(part), questions))
        # a batch decodes until its longest reply is complete
        steps = turns * max(chain.from_iterable(limits))
        work += Work.replying(sum(chain.from_iterable(limits)), steps)
    return work


def measure_importance(
    loaded: LoadedModel,
    prompts: Sequence[CalibrationPrompt],
    policy: Policy,
    options: LukvOptions,
    compared_policies: Sequence[Policy] = (),
    steps: StepCache | None = None,
) -> Iterator[MeasuredQuestion]:
    """Measure the questions of `prompts`, one step per prompt.

    `compared_policies` rank the same entries in the same pass. Own replies, if options ask for them, go on from it, and
    are a step for each of `split_reply_batches`.
    """
    steps = steps or StepCache()
    policies = [policy, *compared_policies]
    passes: dict[int, ImportancePass] = {}  # by context, until it is measured

    def read(prompt: CalibrationPrompt) -> ImportancePass:
        passes[prompt.context] = _read_context(loaded, prompt, policies, options)
        return passes[prompt.context]

    def make(missing_prompts: Sequence[CalibrationPrompt]) -> Iterator[Arrays]:
        replied: Iterable[CalibrationPrompt] = prompts
        if options.answers == "own":
            parts = list(split_reply_batches(loaded.model, prompts))
            continued = read if loaded.workers is None else None
            replied = add_own_replies(loaded, parts, options.answer_tokens, steps, continued)
        missing = {prompt.context for prompt in missing_prompts}
        if loaded.workers is not None:
            wanted = [prompt for prompt in replied if prompt.context in missing]
            yield from loaded.map(partial(_measure_prompt, policies=policies, options=options), wanted)
            return
        for prompt in replied:
            context_pass = passes.pop(prompt.context, None)
            if prompt.context in missing:
                yield _measure_prompt(loaded, prompt, policies, options, context_pass)

    for prompt, arrays in zip(prompts, steps.stage(prompts, make), strict=True):
        for number in range(len(prompt.continuations)):
            yield MeasuredQuestion(prompt.text, **{name: arrays[f"{number} {name}"] for name in MEASURED_FIELDS})


def _read_context(
    loaded: LoadedModel, prompt: CalibrationPrompt, policies: Sequence[Policy], options: LukvOptions
) -> ImportancePass:
    ids = prompt.ids.to(loaded.device)
    return ImportancePass(loaded.model, policies, ids, options.group, prompt.refusal(loaded.name))


def _measure_prompt(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    policies: Sequence[Policy],
    options: LukvOptions,
    context_pass: ImportancePass | None = None,
) -> Arrays:
    """Measure the questions of one prompt; return arrays by number and field of a `MeasuredQuestion`.

    The prompt is read, unless there is a pass over it.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with run_attention(loaded.model):
        context_pass = context_pass or _read_context(loaded, prompt, policies, options)
        ranks = [context_pass.ranks(number) for number in range(len(policies))]
        orders = [of_policy.to(loaded.device).argsort(-1).cpu() for of_policy in ranks]
        measure = partial(_measure_importance, by_layer=options.normalization == "layer")
        if options.normalization == "error":
            measure = partial(_measure_errors, protected=ranks[0] < policies[0].protected(prompt.length))
        measured = measure(context_pass, prompt.continuations, orders)
        for number, ((worth, *compared_worths), scale) in enumerate(measured):
            if not bool(worth.isfinite().all()):
                raise IncompatibleError(prompt.refusal(loaded.name))
            arrays |= {
                f"{number} importance": worth.numpy(),
                f"{number} scale": torch.where(scale > 0, scale, 1.0).double().numpy(),
                f"{number} curves": np.array([_compute_kept_curve(compared.numpy()) for compared in compared_worths]),
            }
    return arrays


def _measure_errors(
    context_pass: ImportancePass, questions: Sequence[Continuation], orders: Sequence[Tensor], protected: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each question the error drop of entries, and the scale that makes it comparable.

    By order, [n, L, Hkv, T], and by layer, [L].
    """
    always = int(protected[0, 0].sum())
    for errors in measure_output_errors(context_pass, questions, protected, orders):
        total = errors[0, ..., always].sum()  # the error of what may go: questions weigh alike
        yield compute_error_drops(errors, always), total.expand(len(protected))


def _measure_importance(
    context_pass: ImportancePass, questions: Sequence[Continuation], orders: Sequence[Tensor], *, by_layer: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each question the importance of entries by order, [n, L, Hkv, T], and its scale, [L].

    It is NaN if the model computes NaN.
    """
    for question in questions:
        importance, logits = context_pass.ask(question.tokens.to(context_pass.model.device))
        mass = importance.sum((1, 2))
        scale = mass if by_layer else torch.ones_like(mass)
        ordered = torch.stack([importance.gather(-1, order) for order in orders])
        yield ordered.masked_fill(logits.isnan().any().cpu(), torch.nan), scale


def _comparable(question: MeasuredQuestion, policy: Policy, options: LukvOptions) -> NDArray[np.float64]:
    """Return the importance for solving budgets, [L, Hkv, T]."""
    values = question.comparable
    return values if options.gap else sort_as_oracle(values, policy.protected(values.shape[-1]))


def _solve_mean_table(
    questions: Sequence[MeasuredQuestion], tables: RatioTables, options: LukvOptions, numbers: Sequence[int]
) -> NDArray[np.float32]:
    """Solve the table that keeps most mean importance of a subset of questions, float32 [99, L, Hkv].

    Where questions need different heads it gives to all of these, in proportion to how much and how often; a mean of
    the questions' tables would give every head something of what any question has to spare.
    Shorter questions are stretched to the longest.
    """
    length = max(questions[number].importance.shape[-1] for number in numbers)
    kept = np.zeros((*questions[0].importance.shape[:2], length + 1))
    for number in numbers:
        kept += sample_curves(sum_prefixes(_comparable(questions[number], tables.policy, options)), length + 1)
    gains = np.diff(kept / len(numbers)).clip(min=0.0)
    return solve_grid(MarginalSolver(gains, tables.floor(length)))


def _summarize(
    questions: Sequence[MeasuredQuestion], tables: RatioTables, options: LukvOptions
) -> dict[str, NDArray[Any]]:
    """Average the curves of all questions, and add the table of each question to `tables`."""
    curves = []  # [3, L, Hkv, 101]: recall, the oracle's, importance kept
    by_policy = []  # [1 + R, L, Hkv, KEPT_POINTS]
    for question in questions:
        values = question.comparable
        length = values.shape[-1]
        if len(question.curves):
            kept = np.concatenate([_compute_kept_curve(question.importance)[None], question.curves])
            by_policy.append(kept / question.scale[:, None, None])
        recall = sample_curves(compute_recall(question.importance), CURVE_POINTS)
        oracle = sample_curves(compute_oracle_recall(question.importance), CURVE_POINTS)
        mass = sample_curves(compute_recall(values), CURVE_POINTS) * values.sum(-1, keepdims=True)
        curves.append(np.stack([recall, oracle, mass]))
        solver = MarginalSolver(_comparable(question, tables.policy, options), tables.floor(length))
        tables.add(solve_grid(solver), length, question.context)
    arrays = tables.arrays()
    if by_policy:
        arrays[KEPT] = (np.sum(by_policy, axis=0) / len(questions)).astype(np.float32)
    # [L, Hkv, 101]: shares of importance that the policy and the best ranking keep at budget i% of the context, and
    # importance kept in comparable units
    names = ("recall", "oracle_recall", "mass")
    return {**arrays, **dict(zip(names, np.mean(curves, axis=0).astype(np.float32), strict=True))}


def _compute_kept_curve(importance: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute the kept part of ranked importance [L, Hkv, T] at `KEPT_POINTS` budgets from 0 to T."""
    return sample_curves(sum_prefixes(importance), KEPT_POINTS)
