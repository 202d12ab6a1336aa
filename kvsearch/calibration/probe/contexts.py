"""The contexts of a fit: shared out, read one at a time, and without a kind of question for a second fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from kvsearch.calibration.lukv import reply_work
from kvsearch.calibration.methods import Calibration
from kvsearch.calibration.options import COMPARED, RankingOptions
from kvsearch.calibration.probe.context_pass import (
    BUDGETS,
    ContextPass,
    ContextSplit,
    QuestionBuilder,
    kind_to_leave_out,
    known_kinds,
    some_prompts,
    split,
    without_questions,
)
from kvsearch.calibration.probe.rankings import Measure
from kvsearch.calibration.prompts import CalibrationPrompt, check_lengths, parted_own_replies, prompts_of
from kvsearch.calibration.steps import StepCache
from kvsearch.core.arrays import Floats
from kvsearch.core.progress import Progress, counted
from kvsearch.models.loading import LoadedModel
from kvsearch.models.speed import Work
from kvsearch.plan import PolicySpec, Profile
from kvsearch.policies import Policy, create_policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.generic import SINKS
from kvsearch.runtime.attention import running
from kvsearch.runtime.cache import check_rotary
from kvsearch.runtime.replay.forced_answers import TOGETHER

if TYPE_CHECKING:
    from kvsearch.calibration.steps import Arrays

TIMES = 3  # that contexts to choose on are read: for what ranks best, for the spread, and for that in all heads


@dataclass(frozen=True, eq=False)
class FitContexts:
    """Contexts to fit on, to choose on and to report on, and how they are asked.

    `others` are those with a question of any kind but `left_out`, with these questions alone; None: none is left out.
    """

    calibration: RankingCalibration[Any]
    builder: QuestionBuilder
    prompts: Sequence[CalibrationPrompt]
    given: Mapping[int, CalibrationPrompt]  # with the right answers, by context
    parts: ContextSplit
    left_out: str | None
    steps: StepCache
    ticks: Iterator[int]

    @classmethod
    def of(
        cls,
        calibration: RankingCalibration[Any],
        prompts: Sequence[CalibrationPrompt],
        steps: StepCache,
        progress: Progress | None,
    ) -> FitContexts:
        """Share out the contexts, with own replies if options say so.

        Raises:
            UsageError: what is in `steps` is damaged, or of another fit.
        """
        options = calibration.options
        builder = calibration.builder(prompts)
        given = {prompt.context: prompt for prompt in prompts}
        if options.answers == "own" and "answers" in builder.targets:
            prompts = reply_in_steps(calibration.loaded, prompts, options.answer_tokens, steps)
        parts = split(prompts, options.seed)
        left_out = kind_to_leave_out(parts) if "answers" in builder.targets else None
        again = [] if left_out is None else without(parts, left_out).choose
        passes = len(parts.fit) + TIMES * (len(parts.choose) + len(again)) + len(parts.report)  # about
        ticks = counted(iter(range(passes)), passes, progress)
        next(ticks, None)  # the next one tells that the first is done
        return cls(calibration, builder, prompts, given, parts, left_out, steps, ticks)

    @property
    def others(self) -> ContextSplit | None:
        """The contexts of a second fit, which never sees the kind that is left out; None: none is."""
        return None if self.left_out is None else without(self.parts, self.left_out)

    def read(
        self, prompts: Sequence[CalibrationPrompt], measure: Measure, policies: Sequence[Policy] = ()
    ) -> Iterator[Arrays]:
        """Yield what `measure` makes of every context, which is read under the full cache; or what is kept of it."""
        options = self.calibration.options
        work = partial(_measured, measure=measure, policies=policies, options=options, builder=self.builder)

        def make(some: Sequence[CalibrationPrompt]) -> Iterator[Arrays]:
            return self.calibration.loaded.map(work, [(one, self.given[one.context].only(one.kinds)) for one in some])

        for arrays in self.steps.stage(prompts, make):
            yield arrays
            next(self.ticks, None)

    def profile(self, method: str, arrays: Mapping[str, Floats], settings: Mapping[str, Any]) -> Profile:
        """Return what was fitted as a profile, with what is common to all fits among its settings."""
        options = self.calibration.options
        common = {
            "data": self.calibration.data.name, **options.settings(), WRITTEN_FOR: VERSION,
            "rankings": (method, *COMPARED), "targets": self.builder.targets,
            "without_questions": without_questions(self.prompts), "at": BUDGETS,
            "contexts": tuple(map(len, self.parts)), **self._of_kinds(),
        }  # fmt: skip
        lengths = [prompt.length for prompt in self.prompts]
        policy = PolicySpec(name=method, params={"sinks": SINKS, "protect": options.protect})
        floor = SINKS + options.protect
        metadata = self.calibration.describe(policy, method, {**common, **settings}, lengths, floor)
        return Profile(metadata, dict(arrays))

    def _of_kinds(self) -> dict[str, Any]:
        """Return what the settings say of kinds of questions, and of the one that is left out of the second fit."""
        if "answers" not in self.builder.targets:
            return {}
        count = len(known_kinds(self.prompts))
        if self.left_out is None:
            return {"kinds": count}
        kinds = [after.kind for prompt in self.parts.report for after in prompt.continuations]
        return {"kinds": count, "left_out": self.left_out, "left_out_questions": kinds.count(self.left_out)}


def _measured(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    measure: Measure,
    policies: Sequence[Policy],
    options: RankingOptions,
    builder: QuestionBuilder,
) -> Arrays:
    """Return what `measure` makes of a context; the `item` is it with what is asked, and with the right answers."""
    with torch.no_grad(), running(loaded.model):
        context_pass = ContextPass.of(loaded, *item, options, builder, policies)
        return {name: values.cpu().numpy() for name, values in measure(context_pass).items()}


AnyRanking = TypeVar("AnyRanking", bound=RankingOptions)


class RankingCalibration(Calibration[AnyRanking]):
    """A ranking that is fitted, and compared with built-in policies.

    `reads_again`: a second fit, without a kind of question, reads the contexts to fit on again.
    """

    reads_again: ClassVar[bool]

    def prepare(self) -> list[CalibrationPrompt]:
        options = self.options
        check_rotary(self.loaded.model, self.policies)
        prompts = prompts_of(self.loaded, self.data, answer_tokens=options.answer_tokens, max_length=options.max_length)
        prompts = some_prompts(prompts, options)
        check_lengths(prompts, create_policy("snapkv", {"sinks": SINKS}), lambda _: SINKS + options.protect)
        split(prompts, options.seed)
        self.builder(prompts)
        return prompts

    def builder(self, prompts: Sequence[CalibrationPrompt]) -> QuestionBuilder:
        """Return how contexts are asked; errors as `QuestionBuilder.of`."""
        return QuestionBuilder.of(self.loaded, prompts, self.data.prompt, self.options.targets)

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the passes over contexts, their tokens and those of all that is asked, and those of replies."""
        builder = self.builder(prompts)
        parts = split(prompts, self.options.seed)
        work = Work(0, 0)
        fits = [*parts.fit]
        choices = [*parts.choose]
        if "answers" in builder.targets:
            work += reply_work(prompts, self.options)
            left_out = kind_to_leave_out(parts)
            if left_out is not None:
                second = without(parts, left_out)
                choices += second.choose
                fits += second.fit if self.reads_again else ()
        for prompt in fits:
            work += _reading_work(prompt, builder, 1, 1)
        for prompt in choices:  # replies are forced under the full cache, and under two rankings
            work += _reading_work(prompt, builder, TIMES, 1 + 2 * len(BUDGETS))
        for prompt in parts.report:
            work += _reading_work(prompt, builder, 1, 2 + (len(COMPARED) + 2) * len(BUDGETS))
        return work


def _reading_work(prompt: CalibrationPrompt, builder: QuestionBuilder, passes: int, times: int) -> Work:
    """Return some passes over a context, after which what is asked of it is read so many times."""
    asked = sum(continuation.tokens.shape[1] for continuation in builder.build(prompt, "cpu"))
    return Work(passes, passes * prompt.length + times * asked)


def reply_in_steps(
    loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], most: int, steps: StepCache
) -> list[CalibrationPrompt]:
    """Return what `with_own_replies` does, a few contexts a step."""
    parts = [prompts[first : first + TOGETHER] for first in range(0, len(prompts), TOGETHER)]

    def make(some: Sequence[Sequence[CalibrationPrompt]]) -> Iterator[Arrays]:
        for replied in parted_own_replies(loaded, some, most):
            yield {
                f"{number}.{place}": continuation.tokens.numpy()
                for number, prompt in enumerate(replied)
                for place, continuation in enumerate(prompt.continuations)
            }

    replied = list[CalibrationPrompt]()
    for part, arrays in zip(parts, steps.stage(parts, make), strict=True):
        for number, prompt in enumerate(part):
            continuations = (
                replace(continuation, tokens=torch.from_numpy(arrays[f"{number}.{place}"]))
                for place, continuation in enumerate(prompt.continuations)
            )
            replied.append(replace(prompt, continuations=tuple(continuations)))
    return replied


def without(parts: ContextSplit, kind: str) -> ContextSplit:
    """Return the contexts of which anything but questions of a kind is asked, with that alone."""
    return ContextSplit(
        *([prompt.only(prompt.kinds - {kind}) for prompt in part if prompt.kinds != {kind}] for part in parts)
    )
