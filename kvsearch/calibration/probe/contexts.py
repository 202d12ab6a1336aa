"""The contexts of a fit: shared out, read one at a time, and without a kind of question for a second fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvsearch.arrays import Floats
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import COMPARED, RankingOptions
from kvsearch.calibration.probe.rankings import Measure
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
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.calibration.provenance import profile_metadata
from kvsearch.calibration.steps import Arrays, Steps, identity_of, kept_replies
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import PolicySpec, Profile
from kvsearch.policies import Policy
from kvsearch.policies.fitted import VERSION, WRITTEN_FOR
from kvsearch.policies.generic import SINKS
from kvsearch.progress import Progress, counted
from kvsearch.runtime.attention import running

TIMES = 3  # that contexts to choose on are read: for what ranks best, for the spread, and for that in all heads


@dataclass(frozen=True, eq=False)
class FitContexts:
    """Contexts to fit on, to choose on and to report on, and how they are asked.

    `others` are those with a question of any kind but `left_out`, with these questions alone; None: none is left out.
    """

    loaded: LoadedModel
    data: CalibrationData
    options: RankingOptions
    asking: Asking
    prompts: Sequence[CalibrationPrompt]
    given: Mapping[int, CalibrationPrompt]  # with the right answers, by context
    parts: Parts
    left_out: str | None
    done: Steps
    ticks: Iterator[int]

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        data: CalibrationData,
        options: RankingOptions,
        progress: Progress | None,
        directory: Path | None,
    ) -> FitContexts:
        """Prepare contexts, with own replies if options say so, and share them out; errors as `prepared`.

        What is finished is kept in `directory`; UsageError if what is there is damaged, or of another fit.
        """
        prompts, asking = prepared(loaded, data, options)
        given = {prompt.context: prompt for prompt in prompts}
        done = Steps(directory, identity_of(loaded, data, prompts, {"seed": options.seed, **options.settings()}))
        if options.answers == "own" and "answers" in asking.targets:
            prompts = kept_replies(loaded, prompts, options.answer_tokens, done)
        parts = split(prompts, options.seed)
        left_out = kind_to_leave_out(parts) if "answers" in asking.targets else None
        again = [] if left_out is None else without(parts, left_out).choose
        steps = len(parts.fit) + TIMES * (len(parts.choose) + len(again)) + len(parts.report)  # about
        ticks = counted(iter(range(steps)), steps, progress)
        next(ticks, None)  # the next one tells that the first is done
        return cls(loaded, data, options, asking, prompts, given, parts, left_out, done, ticks)

    @property
    def others(self) -> Parts | None:
        """The contexts of a second fit, which never sees the kind that is left out; None: none is."""
        return None if self.left_out is None else without(self.parts, self.left_out)

    def read(
        self, prompts: Sequence[CalibrationPrompt], measure: Measure, policies: Sequence[Policy] = ()
    ) -> Iterator[Arrays]:
        """Yield what `measure` makes of every context, which is read under the full cache; or what is kept of it."""
        work = partial(_measured, measure=measure, policies=policies, options=self.options, asking=self.asking)

        def make(some: Sequence[CalibrationPrompt]) -> Iterator[Arrays]:
            return self.loaded.map(work, [(one, self.given[one.context].only(one.kinds)) for one in some])

        for arrays in self.done.stage(prompts, make):
            yield arrays
            next(self.ticks, None)

    def profile(self, method: str, arrays: Mapping[str, Floats], settings: Mapping[str, Any]) -> Profile:
        """Return what was fitted as a profile, with what is common to all fits among its settings."""
        told = {
            "data": self.data.name, **self.options.settings(), WRITTEN_FOR: VERSION, "rankings": (method, *COMPARED),
            "targets": self.asking.targets, "without_questions": without_questions(self.prompts), "at": BUDGETS,
            "contexts": tuple(map(len, self.parts)), **self._of_kinds(), **settings,
        }  # fmt: skip
        lengths, protect = [prompt.length for prompt in self.prompts], self.options.protect
        policy = PolicySpec(name=method, params={"sinks": SINKS, "protect": protect})
        origin = profile_metadata(
            self.loaded, self.data, policy, method, self.options.seed, told, lengths, SINKS + protect
        )
        return Profile(origin, dict(arrays))

    def _of_kinds(self) -> dict[str, Any]:
        """Return what the settings say of kinds of questions, and of the one that is left out of the second fit."""
        if "answers" not in self.asking.targets:
            return {}
        told = {"kinds": len(known_kinds(self.prompts))}
        if self.left_out is None:
            return told
        kinds = [after.kind for prompt in self.parts.report for after in prompt.continuations]
        return {**told, "left_out": self.left_out, "left_out_questions": kinds.count(self.left_out)}


def _measured(
    loaded: LoadedModel,
    item: tuple[CalibrationPrompt, CalibrationPrompt],
    measure: Measure,
    policies: Sequence[Policy],
    options: RankingOptions,
    asking: Asking,
) -> Arrays:
    """Return what `measure` makes of a context; the `item` is it with what is asked, and with the right answers."""
    with torch.no_grad(), running(loaded.model):
        reading = Reading.of(loaded, *item, options, asking, policies)
        return {name: values.cpu().numpy() for name, values in measure(reading).items()}


def without(parts: Parts, kind: str) -> Parts:
    """Return the contexts of which anything but questions of a kind is asked, with that alone."""
    return Parts(*([prompt.only(prompt.kinds - {kind}) for prompt in part if prompt.kinds != {kind}] for part in parts))
