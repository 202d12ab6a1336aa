"""The contexts of a fit: shared out, and read one at a time."""

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

from kvsearch.calibration.lukv import reply_work
from kvsearch.calibration.methods import Calibration
from kvsearch.calibration.options import COMPARED, LEAST_DRAWN, RankingOptions
from kvsearch.calibration.probe.context_pass import (
    BUDGETS,
    RIVALS,
    ContextPass,
    EntryLook,
    Measure,
    Measured,
    Noting,
    QuestionBuilder,
    by_candidate,
    evenly,
    find_spread_heads,
    recalls,
    report,
    spread_where,
)
from kvsearch.calibration.prompts import CalibrationPrompt, check_lengths, prompts_of, with_own_replies
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import FP32, find_default_memory
from kvsearch.models.speed import Work
from kvsearch.plan import PolicySpec, Profile
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.probe import SINKS
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.replay.forced_answers import TOGETHER
from kvsearch.tasks.splits import group_by_text

LEAST_CONTEXTS = 3
MOST_JUDGED = 32  # contexts to choose on, and to report on
# that contexts are read where they do not fit in memory together
CHOOSING = 3  # for what ranks best, for the spread, and for that in all heads
SCORES = 14  # at most, that are held of an entry of a kv head: of candidates, ranks, importance
REPORTING = 2  # for how good all policies are, and for what the best lose at every size


def split(prompts: Sequence[CalibrationPrompt], seed: int) -> tuple[list[CalibrationPrompt], ...]:
    """Return the contexts to fit on, to choose on and to report on.

    A fifth of the texts is to choose on, a fifth to report on, at most `MOST_JUDGED` each.

    Raises:
        UsageError: there are fewer than three.
    """
    texts = group_by_text(prompt.text for prompt in prompts)
    if len(texts) < LEAST_CONTEXTS:
        raise UsageError(
            f"a ranking is fitted, chosen and reported on different contexts, and there are {len(texts)}: give at "
            f"least {LEAST_CONTEXTS}, better dozens"
        )
    shuffled = random.Random(seed).sample(texts, len(texts))
    size = min(max(1, len(texts) // 5), MOST_JUDGED)
    parts = shuffled[2 * size :], shuffled[:size], shuffled[size : 2 * size]
    return tuple([prompts[number] for text in part for number in text] for part in parts)


class FitContexts:
    """The contexts to fit on, to choose on and to report on, with own replies if options say so; how they are asked.

    `calibration` is one of those that read them, which ask the same.

    Raises:
        UsageError: a finished step is damaged, or of another fit.
    """

    def __init__(
        self, calibration: RankingCalibration[Any], prompts: Sequence[CalibrationPrompt], progress: Progress | None
    ) -> None:
        options = calibration.options
        self.calibration = calibration
        self.builder = calibration.builder(prompts)
        self.given = {prompt.context: prompt for prompt in prompts}  # with the right answers
        if options.answers == "own" and "answers" in self.builder.targets:
            together = [prompts[first : first + TOGETHER] for first in range(0, len(prompts), TOGETHER)]
            replied = with_own_replies(calibration.loaded, together, options.answer_tokens, calibration.steps)
            prompts = list(replied)
        self.prompts = prompts
        self.fit, self.choose, self.report = split(prompts, options.seed)
        passes = len(self.fit) + CHOOSING * len(self.choose) + REPORTING * len(self.report)
        self.ticks = with_progress(iter(range(passes)), passes, progress)
        next(self.ticks, None)  # the next one tells that the first is done

    def reader(self, prompts: Sequence[CalibrationPrompt], noting: Noting) -> Measured:
        """Return a function that yields what a measure makes of every context, or what is kept of that.

        Contexts are read under the full cache when they are first measured, and stay in memory as long as the function
        does, if there is room for all of them.
        """
        held: dict[int, ContextPass] | None = {} if self.calibration.fit_in_memory(prompts) else None
        read = partial(_read, noting=noting, options=self.calibration.options, builder=self.builder)

        def measured(measure: Measure) -> Iterator[Arrays]:
            work = partial(_measured, measure=measure, read=read, held=held)

            def make(some: Sequence[CalibrationPrompt]) -> Iterator[Arrays]:
                return self.calibration.loaded.map(work, [(prompt, self.given[prompt.context]) for prompt in some])

            for arrays in self.calibration.steps.stage(prompts, make):
                yield arrays
                next(self.ticks, None)

        return measured

    def profile(
        self,
        calibration: RankingCalibration[Any],
        arrays: Mapping[str, Floats],
        settings: Mapping[str, Any],
        even: Tensor,
        unseen: Tensor,
        judged: tuple[str, ...] = (),
    ) -> Profile:
        """Return what a calibration fitted as a profile, with what is common to all fits among its settings.

        `judged` are the rankings whose losses are reported. `even` and `unseen` [L, Hkv] mark heads that are ranked
        evenly, and those that nothing which is asked looks at.
        """
        options = calibration.options
        layers = describe(calibration.loaded.model).full_layers
        parts = (self.fit, self.choose, self.report)
        common = {
            "data": self.calibration.data.name, **options.settings(), WRITTEN_FOR: VERSION,
            "rankings": (options.method, *COMPARED), "judged": judged, "targets": self.builder.targets,
            "without_questions": sum(not prompt.continuations for prompt in self.prompts), "at": BUDGETS,
            "contexts": tuple(map(len, parts)), "spread_heads": int((even & ~unseen).sum()),
            "unseen_heads": tuple(f"{layers[row]}.{head}" for row, head in unseen.nonzero().tolist()),
        }  # fmt: skip
        lengths = [prompt.length for prompt in self.prompts]
        policy = PolicySpec(name=options.method, params={"sinks": SINKS, "protect": options.protect})
        floor = SINKS + options.protect
        metadata = calibration.describe(policy, {**common, **settings}, lengths, floor)
        return Profile(metadata, dict(arrays))


def _read(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    noting: Noting,
    options: RankingOptions,
    builder: QuestionBuilder,
) -> ContextPass:
    """Read a context; the `item` is it with what is asked, and with the right answers."""
    return ContextPass(loaded, *item, options, builder, noting)


def _measured(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    measure: Measure,
    read: Callable[[LoadedModel, tuple[CalibrationPrompt, CalibrationPrompt]], ContextPass],
    held: dict[int, ContextPass] | None,
) -> Arrays:
    """Return what `measure` makes of a context, which is read unless it is `held`, by its number."""
    with torch.no_grad(), run_attention(loaded.model):
        number = item[0].context
        context_pass = read(loaded, item) if held is None or number not in held else held[number]
        if held is not None:
            held[number] = context_pass
        return {name: values.cpu().numpy() for name, values in measure(context_pass).items()}


AnyRanking = TypeVar("AnyRanking", bound=RankingOptions)


class RankingCalibration(Calibration[AnyRanking]):
    """A ranking that is fitted, and compared with built-in policies; several may be fitted in one pass.

    `fit_rankings` calls `draw`, `sampler`, `fit`, `choose` and `finish` in this order.
    """

    fits_importance: ClassVar[bool] = True  # whether the importance of entries is fitted

    @abstractmethod
    def draw(self, contexts: FitContexts) -> Noting:
        """Draw what the ranking is fitted on, and return what to note of the contexts to fit on."""

    @abstractmethod
    def sampler(self) -> Measure:
        """Return a function that takes what was drawn of a context; it has no model, as it is sent to processes."""

    @abstractmethod
    def fit(self, samples: Sequence[Arrays], contexts: FitContexts) -> Candidates:
        """Fit candidates to what was drawn of all contexts."""

    @abstractmethod
    def choose(self, gains: Floats) -> Tensor:
        """Return the number of the best candidate of every head [L, Hkv], by the mean recall of all [C, L, Hkv]."""

    @abstractmethod
    def finish(self, chosen: Tensor, even: Tensor, contexts: FitContexts) -> FittedRanking:
        """Return the ranking by the candidates `chosen` [L, Hkv], with an even spread in heads that are `even`."""

    @property
    def may_spread(self) -> bool:
        """Whether heads may be ranked by an even spread that something looks at."""
        return True

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        (profile,) = fit_rankings([self], prompts, progress)
        return profile

    def prepare(self) -> list[CalibrationPrompt]:
        options = self.options
        check_rotary(self.loaded.model, self.policies)
        prompts = prompts_of(self.loaded, self.data, answer_tokens=options.answer_tokens, max_length=options.max_length)
        most = -(-options.drawn // LEAST_DRAWN) + 2 * MOST_JUDGED  # each is to give enough to be worth a pass
        drawn = random.Random(options.seed).sample(range(len(prompts)), min(most, len(prompts)))
        prompts = [prompts[number] for number in sorted(drawn)]
        check_lengths(prompts, create_policy("snapkv", {"sinks": SINKS}), lambda _: SINKS + options.protect)
        split(prompts, options.seed)
        self.builder(prompts)
        return prompts

    def builder(self, prompts: Sequence[CalibrationPrompt]) -> QuestionBuilder:
        """Return how contexts are asked; errors as `QuestionBuilder`."""
        return QuestionBuilder(self.loaded, prompts, self.data.prompt, self.options.targets)

    def fit_in_memory(self, prompts: Sequence[CalibrationPrompt]) -> bool:
        """Return whether all contexts may stay in memory once they are read: what is held of them by layer fits.

        These are keys, values, norms and scores. Other processes, which read them in turn, hold none.
        """
        shape = describe(self.loaded.model)
        entry = self.loaded.model.dtype.itemsize * 2 * shape.kv_heads * shape.head_dim
        entry += FP32 * (shape.query_heads + SCORES * shape.kv_heads)
        held = len(shape.full_layers) * entry * sum(prompt.length for prompt in prompts)
        return self.loaded.workers is None and held <= find_default_memory(self.loaded.device)

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        return estimate_rankings([self], prompts)

    def estimate_fit(self, contexts: int) -> Work:  # noqa: ARG002
        """Return the work of a fit to what was drawn of so many contexts, beside their passes."""
        return Work()


class Candidates(NamedTuple):
    """What was fitted, before it is chosen of."""

    compared: int
    look: EntryLook  # at the scores of entries under each
    unseen: Tensor | None  # heads whose context nothing looks at, [L, Hkv] bool; None: not known yet


class FittedRanking(NamedTuple):
    """A ranking that is fitted and chosen."""

    look: EntryLook  # at the scores of entries
    arrays: Mapping[str, Floats]  # of its profile
    settings: Mapping[str, Any]


@torch.no_grad()
def fit_rankings(
    calibrations: Sequence[RankingCalibration[Any]],
    prompts: Sequence[CalibrationPrompt],
    progress: Progress | None = None,
) -> list[Profile]:
    """Fit rankings that ask the same of the same contexts, which are read for all of them together; their profiles.

    Steps are kept by the first one. Errors are those of `Calibration.measure`.
    """
    contexts = FitContexts(calibrations[0], prompts, progress)
    by_name = {calibration.options.method: calibration for calibration in calibrations}
    drawn = [calibration.draw(contexts) for calibration in calibrations]
    samplers = {name: calibration.sampler() for name, calibration in by_name.items()}

    def sample(context_pass: ContextPass) -> dict[str, Tensor]:
        parts = {name: take(context_pass) for name, take in samplers.items()}
        return {f"{name}.{part}": values for name, taken in parts.items() for part, values in taken.items()}

    noting = Noting(
        {name: look for noting in drawn for name, look in noting.looks.items()},
        queries={context: places for noting in drawn for context, places in noting.queries.items()},
        importance=any(calibration.fits_importance for calibration in calibrations),
    )
    samples = list(contexts.reader(contexts.fit, noting)(sample))
    tried: dict[str, Candidates] = {}
    for name, calibration in by_name.items():
        lead = f"{name}."
        mine = [
            {part.removeprefix(lead): array for part, array in arrays.items() if part.startswith(lead)}
            for arrays in samples
        ]
        tried[name] = calibration.fit(mine, contexts)
    del samples, mine

    def gains(context_pass: ContextPass) -> dict[str, Tensor]:
        found = {"unseen": (context_pass.largest == 0).all(-1)}
        for name, candidates in tried.items():
            found[name] = recalls(context_pass.noted(name).unbind(1)[: candidates.compared], context_pass).mean(1)
        return found

    read = contexts.reader(contexts.choose, Noting({name: candidates.look for name, candidates in tried.items()}))
    found = list(read(gains))
    blind = torch.from_numpy(np.all([arrays["unseen"] for arrays in found], axis=0))
    unseen = {name: blind if candidates.unseen is None else candidates.unseen for name, candidates in tried.items()}
    chosen = {name: by_name[name].choose(np.mean([arrays[name] for arrays in found], axis=0)) for name in tried}
    some = [name for name in tried if by_name[name].may_spread]
    rankings = [spread_where(unseen[name], by_candidate(name, chosen[name])) for name in some]
    spread = dict(zip(some, find_spread_heads(rankings, read), strict=True))
    even = {name: spread.get(name, torch.zeros_like(blind)) | unseen[name] for name in tried}
    fitted = {name: by_name[name].finish(chosen[name], even[name], contexts) for name in tried}

    noting = Noting({name: ranking.look for name, ranking in fitted.items()}, calibrations[0].policies)
    first = torch.zeros_like(blind, dtype=torch.long)
    compare = calibrations[0].options.compare
    fits = {name: by_candidate(name, first) for name in fitted}
    judged = report(fits, contexts.reader(contexts.report, noting), compare)
    profiles = []
    for name, ranking in fitted.items():
        arrays, names = judged[name]
        arrays = {**ranking.arrays, **arrays}
        profiles.append(contexts.profile(by_name[name], arrays, ranking.settings, even[name], unseen[name], names))
    return profiles


def estimate_rankings(calibrations: Sequence[RankingCalibration[Any]], prompts: Sequence[CalibrationPrompt]) -> Work:
    """Return the work of `fit_rankings`: passes over contexts and what is asked of them, own replies, and the fits."""
    calibration = calibrations[0]
    builder = calibration.builder(prompts)
    fit, choose, reported = split(prompts, calibration.options.seed)
    work = sum((each.estimate_fit(len(fit)) for each in calibrations), Work())
    if "answers" in builder.targets:
        work += reply_work(prompts, calibration.options)
    count = len(calibrations)
    middle = 1 + count + len(COMPARED) if calibration.options.compare == "all" else 0
    readings = (  # contexts, times that they are measured, and that what is judged is read in all
        (fit, 1, 0),
        (choose, CHOOSING, 1 + 2 * count * len(BUDGETS)),  # replies under the full cache and two rankings
        (reported, REPORTING, middle + 1 + (RIVALS + count) * len(BUDGETS)),
    )
    for some, measured, times in readings:
        readings_of = 1 if calibration.fit_in_memory(some) else measured
        for prompt in some:
            asked = builder.build(prompt, "cpu")
            judged = asked.get("answers") or evenly(asked["reconstruction"])
            work += Work.over([prompt.length], readings_of)
            read = chain.from_iterable(asked.values())
            work += Work.over((after.tokens.shape[1] for after in read), behind=prompt.length)
            work += Work.over((after.tokens.shape[1] for after in judged), times)
    return work
