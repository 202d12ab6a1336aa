"""Contexts of a fitted ranking: split for fitting, choosing and reporting, and read one at a time."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.base import Calibration
from kvsearch.calibration.lukv import estimate_replies
from kvsearch.calibration.options import MIN_DRAWN_PER_CONTEXT, RankingOptions
from kvsearch.calibration.probe.context_pass import (
    JUDGED_CHUNKS,
    JUDGED_SHARES,
    REPORTED_RIVALS,
    ContextPass,
    EntryLook,
    Measure,
    Measured,
    Noting,
    QuestionBuilder,
    find_spread_heads,
    measure_recalls,
    pick_evenly,
    rank_by_candidate,
    rank_with_spread,
    report,
)
from kvsearch.calibration.prompts import (
    CalibrationPrompt,
    add_own_replies,
    check_lengths,
    encode_prompts,
    split_reply_batches,
)
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import FP32, find_default_memory
from kvsearch.models.work import Work
from kvsearch.plan import PolicySpec, Profile
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.probe import SINKS
from kvsearch.policies.registry import list_rivals
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.speed import scale_to_first
from kvsearch.tasks.splits import group_by_text

MIN_CONTEXTS_TO_FIT = 3
MAX_JUDGED_CONTEXTS = 32  # contexts to choose on, and to report on
# that contexts are read where they do not fit in memory together
CHOICE_READINGS = 3  # for what ranks best, for the spread, and for that in all heads
HELD_SCORES = 14  # at most, that are held of an entry of a kv head: of candidates, ranks, importance
REPORT_READINGS = 2  # for how good all policies are, and for what the best lose at every size


def split_contexts(prompts: Sequence[CalibrationPrompt], seed: int) -> tuple[list[CalibrationPrompt], ...]:
    """Split contexts into those to fit on, to choose on and to report on.

    A fifth of the texts is to choose on, a fifth to report on, at most `MAX_JUDGED_CONTEXTS` each.

    Raises:
        UsageError: there are fewer than three.
    """
    texts = group_by_text(prompt.text for prompt in prompts)
    if len(texts) < MIN_CONTEXTS_TO_FIT:
        raise UsageError(
            f"a ranking is fitted, chosen and reported on different contexts, and there are {len(texts)}: give at "
            f"least {MIN_CONTEXTS_TO_FIT}, better dozens"
        )
    shuffled = random.Random(seed).sample(texts, len(texts))
    size = min(max(1, len(texts) // 5), MAX_JUDGED_CONTEXTS)
    parts = shuffled[2 * size :], shuffled[:size], shuffled[size : 2 * size]
    return tuple([prompts[number] for text in part for number in text] for part in parts)


class FitContexts:
    """The contexts to fit on, to choose on and to report on, with own replies if options say so.

    `calibration` is any of the calibrations that share them.

    Raises:
        UsageError: a finished step is damaged, or of another fit.
    """

    def __init__(
        self, calibration: RankingCalibration[Any], prompts: Sequence[CalibrationPrompt], progress: Progress | None
    ) -> None:
        self.calibration = calibration
        self.builder = calibration.make_builder(prompts)
        self.prompts = prompts
        self.fit, self.choose, self.report = split_contexts(prompts, calibration.options.seed)
        passes = len(self.fit) + CHOICE_READINGS * len(self.choose) + REPORT_READINGS * len(self.report)
        self.ticks = with_progress(iter(range(passes)), passes, progress)
        next(self.ticks, None)  # the next one tells that the first is done

    def make_reader(self, prompts: Sequence[CalibrationPrompt], noting: Noting) -> Measured:
        """Make a function that applies a measure to every context, or reads its stored steps.

        Contexts are read under the full cache when they are first measured, with own replies if options say so. They
        stay in memory as long as the function does, if there is room for all of them.
        """
        calibration = self.calibration
        loaded = calibration.loaded
        read = partial(ContextPass, options=calibration.options, builder=self.builder, noting=noting)
        holds_all = calibration.fit_in_memory(prompts)
        passes: dict[int, ContextPass] = {}  # by context
        replied: list[CalibrationPrompt] = []  # complete once the contexts were measured

        def find_pass(loaded: LoadedModel, prompt: CalibrationPrompt) -> ContextPass:
            context_pass = passes.pop(prompt.context, None) or read(loaded, prompt)
            if holds_all:
                passes[prompt.context] = context_pass
            return context_pass

        def read_for_replies(prompt: CalibrationPrompt) -> DensePass[Any]:
            passes[prompt.context] = read(loaded, prompt)
            return passes[prompt.context].importance_pass

        def add_replies() -> Iterator[CalibrationPrompt]:
            for prompt in self._add_own_replies(prompts, read_for_replies if loaded.workers is None else None):
                replied.append(prompt)
                yield prompt

        def measured(measure: Measure) -> Iterator[Arrays]:
            with_replies = iter(list(replied)) if replied else add_replies()

            def make(missing: Sequence[CalibrationPrompt]) -> Iterator[Arrays]:
                given = {prompt.context: prompt for prompt in missing}
                pairs = ((given[prompt.context], prompt) for prompt in with_replies if prompt.context in given)
                if loaded.workers is not None:
                    yield from loaded.map(partial(_measure_context, measure=measure, find=read), list(pairs))
                    return
                for pair in pairs:
                    yield _measure_context(loaded, pair, measure, find_pass)

            for arrays in calibration.steps.stage(prompts, make):
                yield arrays
                next(self.ticks, None)
            for _ in with_replies:  # whose measures were stored, and which later measures ask
                pass

        return measured

    def _add_own_replies(
        self, prompts: Sequence[CalibrationPrompt], read: Callable[[CalibrationPrompt], DensePass[Any]] | None
    ) -> Iterator[CalibrationPrompt]:
        """Yield prompts with own replies in place of given answers, if options say so.

        Replies go on from the passes over prompts that `read` returns; None: prompts are read for replies alone.
        """
        calibration = self.calibration
        options = calibration.options
        if options.answers == "given" or "answers" not in self.builder.targets:
            return iter(prompts)
        parts = list(split_reply_batches(calibration.loaded.model, prompts))
        return add_own_replies(calibration.loaded, parts, options.answer_tokens, calibration.steps, read)

    def make_profile(
        self,
        calibration: RankingCalibration[Any],
        arrays: Mapping[str, Floats],
        settings: Mapping[str, Any],
        even: Tensor,
        unseen: Tensor,
        judged: tuple[str, ...] = (),
    ) -> Profile:
        """Make the profile of a fitted ranking, with the settings that all fits share.

        `judged` are the rankings whose losses are reported. `even` and `unseen` [L, Hkv] mark heads that are ranked
        evenly, and heads without any attention from questions.
        """
        options = calibration.options
        layers = describe(calibration.loaded.model).full_layers
        parts = (self.fit, self.choose, self.report)
        common = {
            "data": self.calibration.data.name, **options.settings(), WRITTEN_FOR: VERSION,
            "rankings": (options.method, *list_rivals()), "judged": judged, "targets": self.builder.targets,
            "without_questions": sum(not prompt.continuations for prompt in self.prompts), "at": JUDGED_SHARES,
            "contexts": tuple(map(len, parts)), "spread_heads": int((even & ~unseen).sum()),
            "unseen_heads": tuple(f"{layers[row]}.{head}" for row, head in unseen.nonzero().tolist()),
        }  # fmt: skip
        lengths = [prompt.length for prompt in self.prompts]
        policy = PolicySpec(name=options.method, params={"sinks": SINKS, "protect": options.protect})
        floor = SINKS + options.protect
        metadata = calibration.describe(policy, {**common, **settings}, lengths, floor)
        return Profile(metadata, dict(arrays))


def _measure_context(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    measure: Measure,
    find: Callable[[LoadedModel, CalibrationPrompt], ContextPass],
) -> Arrays:
    """Apply `measure` to a context; the `item` is its prompt with the right answers, and with own replies.

    `find` reads the context, or finds the pass over it.
    """
    given, replied = item
    with torch.no_grad(), run_attention(loaded.model):
        context_pass = find(loaded, given)
        context_pass.ask(replied)
        return {name: values.cpu().numpy() for name, values in measure(context_pass).items()}


AnyRanking = TypeVar("AnyRanking", bound=RankingOptions)


class RankingCalibration(Calibration[AnyRanking]):
    """Fits a ranking and compares it with built-in policies; several may be fitted in one pass.

    `fit_rankings` calls `draw`, `make_sampler`, `fit`, `choose` and `finish` in this order.
    """

    fits_importance: ClassVar[bool] = True  # whether the importance of entries is fitted

    @abstractmethod
    def draw(self, contexts: FitContexts) -> Noting:
        """Draw the entries or tokens to fit on; return what to note of the contexts."""

    @abstractmethod
    def make_sampler(self) -> Measure:
        """Make a function that samples a context; it holds no model, as it is sent to other processes."""

    @abstractmethod
    def fit(self, samples: Sequence[Arrays], contexts: FitContexts) -> FitCandidates:
        """Fit candidates to the samples of all contexts."""

    @abstractmethod
    def choose(self, gains: Floats) -> Tensor:
        """Choose the best candidate of every head [L, Hkv], by the mean recall of all [C, L, Hkv]."""

    @abstractmethod
    def finish(self, chosen: Tensor, even: Tensor, contexts: FitContexts) -> FittedRanking:
        """Make the ranking by the candidates `chosen` [L, Hkv], with an even spread in `even` heads."""

    @property
    def may_spread(self) -> bool:
        """Whether heads with attention from questions may be ranked by an even spread, too."""
        return True

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        (profile,) = fit_rankings([self], prompts, progress)
        return profile

    def prepare(self) -> list[CalibrationPrompt]:
        options = self.options
        check_rotary(self.loaded.model, self.policies)
        prompts = encode_prompts(
            self.loaded, self.data, answer_tokens=options.answer_tokens, max_length=options.max_length
        )
        maximum = (
            -(-options.drawn // MIN_DRAWN_PER_CONTEXT) + 2 * MAX_JUDGED_CONTEXTS
        )  # each is to give enough to be worth a pass
        drawn = random.Random(options.seed).sample(range(len(prompts)), min(maximum, len(prompts)))
        prompts = [prompts[number] for number in sorted(drawn)]
        check_lengths(prompts, create_policy("snapkv", {"sinks": SINKS}), lambda _: SINKS + options.protect)
        split_contexts(prompts, options.seed)
        self.make_builder(prompts)
        return prompts

    def make_builder(self, prompts: Sequence[CalibrationPrompt]) -> QuestionBuilder:
        """Make the builder of questions on contexts; errors as `QuestionBuilder`."""
        return QuestionBuilder(self.loaded, prompts, self.data.prompt, self.options.targets)

    def fit_in_memory(self, prompts: Sequence[CalibrationPrompt]) -> bool:
        """Tell whether the passes over all contexts fit into memory together.

        These are keys, values, norms and scores. Other processes, which read them in turn, hold none.
        """
        shape = describe(self.loaded.model)
        entry = self.loaded.model.dtype.itemsize * 2 * shape.kv_heads * shape.head_dim
        entry += FP32 * (shape.query_heads + HELD_SCORES * shape.kv_heads)
        held = len(shape.full_layers) * entry * sum(prompt.length for prompt in prompts)
        return self.loaded.workers is None and held <= find_default_memory(self.loaded.device)

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        return estimate_rankings([self], prompts)

    @classmethod
    def estimate_together(cls, calibrations: Sequence[Any], prompts: Sequence[CalibrationPrompt]) -> Work:
        return estimate_rankings(calibrations, prompts)

    @classmethod
    def measure_together(
        cls, calibrations: Sequence[Any], prompts: Sequence[CalibrationPrompt], progress: Progress | None = None
    ) -> list[Profile]:
        """Fit several rankings in shared passes over the same contexts, see `fit_rankings`."""
        return fit_rankings(calibrations, prompts, progress)

    def estimate_fit(self, contexts: int) -> Work:  # noqa: ARG002
        """Estimate the work of a fit to samples of so many contexts, besides their passes."""
        return Work()


class FitCandidates(NamedTuple):
    """Fitted candidates, before the choice among them."""

    compared: int
    look: EntryLook  # at the scores of entries under each
    unseen: Tensor | None  # heads whose context nothing looks at, [L, Hkv] bool; None: not known yet


class FittedRanking(NamedTuple):
    """The fitted and chosen ranking."""

    look: EntryLook  # at the scores of entries
    arrays: Mapping[str, Floats]  # of its profile
    settings: Mapping[str, Any]


def make_sampling(calibrations: Sequence[RankingCalibration[Any]], contexts: FitContexts) -> tuple[Noting, Measure]:
    """Make what several rankings note of the contexts to fit on, and the function that samples a context for all."""
    drawn = [calibration.draw(contexts) for calibration in calibrations]
    samplers = {calibration.options.method: calibration.make_sampler() for calibration in calibrations}

    def sample(context_pass: ContextPass) -> dict[str, Tensor]:
        parts = {name: take(context_pass) for name, take in samplers.items()}
        return {f"{name}.{part}": values for name, taken in parts.items() for part, values in taken.items()}

    noting = Noting(
        {name: look for noting in drawn for name, look in noting.looks.items()},
        draw_queries=next((noting.draw_queries for noting in drawn if noting.draw_queries is not None), None),
        importance=any(calibration.fits_importance for calibration in calibrations),
    )
    return noting, sample


@torch.no_grad()
def fit_rankings(
    calibrations: Sequence[RankingCalibration[Any]],
    prompts: Sequence[CalibrationPrompt],
    progress: Progress | None = None,
) -> list[Profile]:
    """Fit rankings with the same questions on the same contexts in shared passes; return their profiles.

    Steps are kept by the first one. It raises what `Calibration.measure` does.
    """
    contexts = FitContexts(calibrations[0], prompts, progress)
    by_name = {calibration.options.method: calibration for calibration in calibrations}
    noting, sample = make_sampling(calibrations, contexts)
    samples = list(contexts.make_reader(contexts.fit, noting)(sample))
    trials: dict[str, FitCandidates] = {}
    for name, calibration in by_name.items():
        lead = f"{name}."
        own_samples = [
            {part.removeprefix(lead): array for part, array in arrays.items() if part.startswith(lead)}
            for arrays in samples
        ]
        trials[name] = calibration.fit(own_samples, contexts)
    del samples, own_samples

    def gains(context_pass: ContextPass) -> dict[str, Tensor]:
        measured = {"unseen": (context_pass.largest == 0).all(-1)}
        for name, candidates in trials.items():
            measured[name] = measure_recalls(
                context_pass.stack_noted(name).unbind(1)[: candidates.compared], context_pass
            ).mean(1)
        return measured

    looks = {name: candidates.look for name, candidates in trials.items()}
    read = contexts.make_reader(contexts.choose, Noting(looks, every=JUDGED_CHUNKS))
    measured = list(read(gains))
    blind = torch.from_numpy(np.all([arrays["unseen"] for arrays in measured], axis=0))
    unseen = {name: blind if candidates.unseen is None else candidates.unseen for name, candidates in trials.items()}
    chosen = {name: by_name[name].choose(np.mean([arrays[name] for arrays in measured], axis=0)) for name in trials}
    spreadable = [name for name in trials if by_name[name].may_spread]
    rankings = [rank_with_spread(unseen[name], rank_by_candidate(name, chosen[name])) for name in spreadable]
    spread = dict(zip(spreadable, find_spread_heads(rankings, read), strict=True))
    even = {name: spread.get(name, torch.zeros_like(blind)) | unseen[name] for name in trials}
    fitted = {name: by_name[name].finish(chosen[name], even[name], contexts) for name in trials}

    looks = {name: ranking.look for name, ranking in fitted.items()}
    noting = Noting(looks, calibrations[0].policies, every=JUDGED_CHUNKS)
    first = torch.zeros_like(blind, dtype=torch.long)
    compare = calibrations[0].options.compare
    fits = {name: rank_by_candidate(name, first) for name in fitted}
    judged = report(fits, contexts.make_reader(contexts.report, noting), compare)
    profiles = []
    for name, ranking in fitted.items():
        arrays, names = judged[name]
        arrays = {**ranking.arrays, **arrays}
        profiles.append(contexts.make_profile(by_name[name], arrays, ranking.settings, even[name], unseen[name], names))
    return profiles


def estimate_rankings(calibrations: Sequence[RankingCalibration[Any]], prompts: Sequence[CalibrationPrompt]) -> Work:
    """Estimate the work of `fit_rankings`: passes over contexts and questions, own replies, and the fits.

    The first context to fit on is measured for that.
    """
    calibration = calibrations[0]
    contexts = FitContexts(calibration, prompts, None)
    builder = contexts.builder
    fit, choose, reported = contexts.fit, contexts.choose, contexts.report
    work = sum((member.estimate_fit(len(fit)) for member in calibrations), Work())
    if "answers" in builder.targets and calibration.options.answers == "own":
        work += estimate_replies(prompts, calibration.options, read=calibration.loaded.workers is not None)
        tokens = calibration.options.answer_tokens
        fit, choose, reported = (
            [prompt.lengthen_answers(tokens) for prompt in part] for part in (fit, choose, reported)
        )
    count = len(calibrations)
    middle = 1 + count + len(list_rivals()) if calibration.options.compare == "all" else 0
    # contexts, times that they are measured, that what is judged is read in all, and chunks for one that is repeated
    readings = (
        (fit, 1, 0, 1),
        # replies under the full cache and two rankings
        (choose, CHOICE_READINGS, 1 + 2 * count * len(JUDGED_SHARES), JUDGED_CHUNKS),
        (reported, REPORT_READINGS, middle + 1 + (REPORTED_RIVALS + count) * len(JUDGED_SHARES), JUDGED_CHUNKS),
    )
    works = []
    for part, measured, times, every in readings:
        readings_of = 1 if calibration.fit_in_memory(part) else measured
        for prompt in part:
            questions = builder.build(prompt, "cpu", every)
            judged = questions.get("answers") or pick_evenly(questions["reconstruction"])
            read = chain.from_iterable(questions.values())
            answering = Work.over((question.tokens.shape[1] for question in read), behind=prompt.length)
            judging = Work.over((question.tokens.shape[1] for question in judged), times)
            works.append(Work.over([prompt.length], readings_of) + answering + judging)
    noting, sample = make_sampling(calibrations, contexts)

    def measure_first() -> None:
        with torch.no_grad(), run_attention(calibration.loaded.model):
            sample(ContextPass(calibration.loaded, fit[0], calibration.options, builder, noting))

    return work + scale_to_first(calibration.loaded.model, works, measure_first)
