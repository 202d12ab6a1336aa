"""The passes of a calibration method: prompts, work, and the profile that is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvsearch.calibration.options import CalibrationOptions
from kvsearch.calibration.steps import StepCache

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.calibration.prompts import CalibrationPrompt
    from kvsearch.core.items import Progress
    from kvsearch.models.loading import LoadedModel
    from kvsearch.models.work import Work
    from kvsearch.plan import PolicySpec, Profile, ProfileMetadata
    from kvsearch.policies import Policy

Options = TypeVar("Options", bound=CalibrationOptions)


class Calibration(ABC, Generic[Options]):
    """A method on a model and texts; `policies` are those that are measured, the first is what budgets are for.

    Slow methods store what is finished in `steps`, so that they can go on.
    """

    def __init__(
        self, loaded: LoadedModel, data: CalibrationData, policies: Sequence[Policy], options: Options
    ) -> None:
        self.loaded = loaded
        self.data = data
        self.policies = policies
        self.options = options
        self.steps = StepCache()

    @abstractmethod
    def prepare(self) -> list[CalibrationPrompt]:
        """Return the prompts.

        Raises:
            UsageError: one is too short for the entries that are always kept, or the options do not suit it.
            IncompatibleError: one does not fit the positions of the model, or the method the model.
        """

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the work that `measure` is: by default a pass over every prompt."""
        from kvsearch.models.work import Work

        return sum((prompt.work() for prompt in prompts), Work())

    @abstractmethod
    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        """Return the profile; what is finished in `steps` is not measured again.

        Raises:
            UsageError: a step is damaged, or of another calibration.
            IncompatibleError: the model computes NaN.
        """

    @classmethod
    def estimate_together(cls, calibrations: Sequence[Any], prompts: Sequence[CalibrationPrompt]) -> Work:
        """Return the work of `measure_together`."""
        (calibration,) = calibrations
        return calibration.estimate(prompts)  # type: ignore[no-any-return]

    @classmethod
    def measure_together(
        cls, calibrations: Sequence[Any], prompts: Sequence[CalibrationPrompt], progress: Progress | None = None
    ) -> list[Profile]:
        """Return the profiles of calibrations on the same prompts, by default of a single one; errors as `measure`."""
        (calibration,) = calibrations
        return [calibration.measure(prompts, progress)]

    def describe(
        self,
        policy: PolicySpec,
        settings: Mapping[str, Any],
        lengths: Sequence[int],
        floor: int,
        rivals: Sequence[PolicySpec] = (),
    ) -> ProfileMetadata:
        """Return the metadata of a profile of prompts of these `lengths`, whose heads keep at least `floor` entries.

        `rivals` are policies that were measured beside `policy`.
        """
        from kvsearch.models.architecture import describe
        from kvsearch.plan import ProfileMetadata
        from kvsearch.plan.origin import ContextRecord, make_provenance

        record = ContextRecord(fitted=self.data.asked)
        return ProfileMetadata(
            model=self.loaded.fingerprint,
            method=self.options.method,
            policy=policy,
            length=max(lengths),
            questions=len(lengths),
            layers=describe(self.loaded.model).full_layers,
            floor=floor,
            policies=(policy, *rivals) if rivals else None,
            provenance=make_provenance(self.options.method, self.options.seed, self.data.sha256, settings, record),
        )
