"""The contexts of a fit: shared out, and read one at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

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
    QuestionBuilder,
    evenly,
)
from kvsearch.calibration.prompts import CalibrationPrompt, check_lengths, prompts_of, with_own_replies
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError
from kvsearch.core.items import Progress, counted
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import FP32, default_memory
from kvsearch.models.speed import Work
from kvsearch.plan import PolicySpec, Profile
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.probe import SINKS
from kvsearch.runtime.attention import running
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.replay.forced_answers import TOGETHER
from kvsearch.tasks.splits import group_by_text

LEAST_CONTEXTS = 3
MOST_JUDGED = 32  # contexts to choose on, and to report on
# that contexts are read where they do not fit in memory together
CHOOSING = 3  # for what ranks best, for the spread, and for that in all heads
SCORES = 10  # at most, that are held of an entry of a kv head: of candidates, ranks, importance
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
        self.ticks = counted(iter(range(passes)), passes, progress)
        next(self.ticks, None)  # the next one tells that the first is done

    def reader(
        self, prompts: Sequence[CalibrationPrompt], policies: Sequence[Policy] = (), look: EntryLook | None = None
    ) -> Measured:
        """Return a function that yields what a measure makes of every context, or what is kept of that.

        Contexts are read under the full cache when they are first measured, and stay in memory as long as the function
        does, if there is room for all of them.
        """
        options = self.calibration.options
        held: dict[int, ContextPass] | None = {} if self.calibration.fit_in_memory(prompts) else None
        read = partial(_read, policies=policies, look=look, options=options, builder=self.builder)

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
        arrays: Mapping[str, Floats],
        settings: Mapping[str, Any],
        even: Tensor,
        unseen: Tensor,
        judged: tuple[str, ...] = (),
    ) -> Profile:
        """Return what was fitted as a profile, with what is common to all fits among its settings.

        `judged` are the rankings whose losses are reported. `even` and `unseen` [L, Hkv] mark heads that are ranked
        evenly, and those that nothing which is asked looks at.
        """
        options = self.calibration.options
        layers = describe(self.calibration.loaded.model).full_layers
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
        metadata = self.calibration.describe(policy, {**common, **settings}, lengths, floor)
        return Profile(metadata, dict(arrays))


def _read(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    policies: Sequence[Policy],
    look: EntryLook | None,
    options: RankingOptions,
    builder: QuestionBuilder,
) -> ContextPass:
    """Read a context; the `item` is it with what is asked, and with the right answers."""
    return ContextPass(loaded, *item, options, builder, policies, look)


def _measured(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    measure: Measure,
    read: Callable[[LoadedModel, tuple[CalibrationPrompt, CalibrationPrompt]], ContextPass],
    held: dict[int, ContextPass] | None,
) -> Arrays:
    """Return what `measure` makes of a context, which is read unless it is `held`, by its number."""
    with torch.no_grad(), running(loaded.model):
        number = item[0].context
        context_pass = read(loaded, item) if held is None or number not in held else held[number]
        if held is not None:
            held[number] = context_pass
        return {name: values.cpu().numpy() for name, values in measure(context_pass).items()}


AnyRanking = TypeVar("AnyRanking", bound=RankingOptions)


class RankingCalibration(Calibration[AnyRanking]):
    """A ranking that is fitted, and compared with built-in policies."""

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
        return self.loaded.workers is None and held <= default_memory(self.loaded.device)

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the passes over contexts and over what is asked of them, and own replies."""
        builder = self.builder(prompts)
        fit, choose, report = split(prompts, self.options.seed)
        work = Work()
        if "answers" in builder.targets:
            work += reply_work(prompts, self.options)
        readings = (  # contexts, times that they are measured, and that what is judged is read in all
            (fit, 1, 0),
            (choose, CHOOSING, 1 + 2 * len(BUDGETS)),  # replies under the full cache and two rankings
            (report, REPORTING, 1 + 1 + len(COMPARED) + 1 + (RIVALS + 1) * len(BUDGETS)),
        )
        for some, measured, times in readings:
            readings_of = 1 if self.fit_in_memory(some) else measured
            for prompt in some:
                asked = builder.build(prompt, "cpu")
                judged = asked.get("answers") or evenly(asked["reconstruction"])
                work += Work.over([prompt.length], readings_of)
                read = chain.from_iterable(asked.values())
                work += Work.over((after.tokens.shape[1] for after in read), behind=prompt.length)
                work += Work.over((after.tokens.shape[1] for after in judged), times)
        return work
