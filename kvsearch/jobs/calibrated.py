"""What a calibration left: the profile in its directory, and the model that it measured; options of jobs on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvsearch.calibration.steps import calibration_content
from kvsearch.config.options import Option, asked_by_name
from kvsearch.core.errors import UsageError
from kvsearch.jobs.groups import ASKED, MODEL, RATIO, Batches, WithTasks, WithWorkers
from kvsearch.plan.profile import Profile, load_profile
from kvsearch.plan.saved import PROFILE
from kvsearch.plan.schema import Protocol, find_protocol
from kvsearch.runs.identity import CONFIG
from kvsearch.signals.table import SignalTable

if TYPE_CHECKING:
    from kvsearch.jobs.reporter import Reporter
    from kvsearch.models.loading import LoadedModel


HOW = "run `kvsearch calibrate MODEL --method polykv -o DIR` first"


class OnSignals(WithTasks, WithWorkers, Batches):
    """A PolyKV calibration, and how questions are asked of its model."""

    recipes: ClassVar[str | None] = ""

    directory: Annotated[
        Path, Option("Directory that `calibrate --method polykv` wrote.", metavar="DIR", argument=True)
    ]
    model: Annotated[str | None, replace(MODEL, argument=False, metavar="MODEL", shown="as calibrated")] = None
    ratio: Annotated[float | None, RATIO] = None
    protocol: Annotated[
        Protocol | None,
        asked_by_name(find_protocol),
        Option("question-agnostic or question-aware; see `evaluate`.", panel=ASKED, shown="that of the calibration"),
    ] = None

    @property
    def measured(self) -> str | None:
        """The name of the model; None where it cannot be told."""
        return _stated(self.directory, "model") if self.model is None else self.model

    def protocol_of(self, profile: Profile) -> Protocol:
        """Return the protocol in which questions are asked, by default that of the calibration."""
        return self.protocol or find_protocol(SignalTable(profile).axes.protocol)

    def stated_loading(self) -> dict[str, Any]:
        """Return the dtype and revision that were measured, as far as no others are given."""
        dtype = _stated(self.directory, "dtype") if self.dtype == "auto" else None
        is_other = self.revision is not None or self.model is not None
        stated = {"dtype": dtype, "revision": None if is_other else _stated(self.directory, "revision")}
        return {name: value for name, value in stated.items() if value is not None}

    def load_calibrated(self, profile: Profile, reporter: Reporter) -> LoadedModel:
        """Load the model of the calibration, in the dtype and revision that were measured unless others are given.

        Raises:
            UsageError: which model it is cannot be told.
            IncompatibleError: it is another model than the one that was measured.
            EnvironmentFault: it cannot be loaded here.
        """
        if self.measured is None:
            raise UsageError(f"{self.directory / CONFIG} does not say which model was calibrated: give --model")
        loaded = self.load(self.measured, reporter, **self.stated_loading())
        profile.metadata.model.require(loaded.fingerprint, f"the profile in {self.directory}")
        return loaded


def _stated(directory: Path, name: str) -> str | None:
    """Return what the configuration of a calibration says of the model that was measured; None: nothing."""
    value = calibration_content(directory).get(name)
    return value if isinstance(value, str) else None


def load_signals(directory: Path) -> Profile:
    """Read the profile of a PolyKV calibration.

    Raises:
        UsageError: there is no such directory or no profile in it, or the profile is damaged or has no signals.
    """
    path = directory / PROFILE
    if not path.exists():
        what = "does not exist"
        if directory.exists():
            what = f"has no {PROFILE}" if directory.is_dir() else "is a file"
        raise UsageError(f"{directory} {what}: give the directory of a finished calibration, or {HOW}")
    return SignalTable(load_profile(path)).profile
