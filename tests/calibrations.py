"""Calibrations as jobs run them: prepared, then measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvsearch.budgets.dynamic import Allocation
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.dynamic import DynamicCalibration
from kvsearch.calibration.options import (
    CakeOptions,
    CalibrationOptions,
    DynamicOptions,
    LukvOptions,
    QueryStatisticsOptions,
)
from kvsearch.calibration.polykv.options import PolykvOptions
from kvsearch.calibration.steps import StepCache, hash_step_inputs
from kvsearch.core.items import Progress
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import Profile
from kvsearch.plan.methods import create_method
from kvsearch.policies import Policy


def calibrate(
    loaded: LoadedModel,
    data: CalibrationData,
    policies: Sequence[Policy],
    options: CalibrationOptions,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> Profile:
    calibration = create_method(options.method).create_calibration(loaded, data, policies, options)
    prompts = calibration.prepare()
    compared = [[policy.name, policy.parameters()] for policy in policies]
    identity = hash_step_inputs(loaded, data, prompts, {**options.model_dump(mode="json"), "policies": compared})
    calibration.steps = StepCache(directory, identity)
    return calibration.measure(prompts, progress)


def calibrate_lukv(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    options: LukvOptions | None = None,
    progress: Progress | None = None,
    compared_policies: Sequence[Policy] = (),
) -> Profile:
    return calibrate(loaded, data, [policy, *compared_policies], options or LukvOptions(), progress)


def calibrate_dynamic(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    allocation: Allocation,
    options: DynamicOptions | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Any allocation, with or without options of its own."""
    options = (options or DynamicOptions()).model_copy(update={"method": allocation.name})
    allocation.check(policy, f"method {allocation.name}")
    calibration = DynamicCalibration(loaded, data, [policy], options)
    with patch.object(DynamicOptions, "make_allocation", return_value=allocation):
        return calibration.measure(calibration.prepare(), progress)


def calibrate_cake(
    loaded: LoadedModel,
    data: CalibrationData,
    policy: Policy,
    options: CakeOptions | QueryStatisticsOptions,
    progress: Progress | None = None,
) -> Profile:
    return calibrate(loaded, data, [policy], options, progress)


calibrate_query_statistics = calibrate_cake


def calibrate_polykv(
    loaded: LoadedModel, data: CalibrationData, options: PolykvOptions, policies: Sequence[Policy], **more: Any
) -> Profile:
    return calibrate(loaded, data, policies, options, **more)


def calibrate_ranking(loaded: LoadedModel, data: CalibrationData, options: Any, *more: Any, **named: Any) -> Profile:
    return calibrate(loaded, data, options.policies(), options, *more, **named)


calibrate_probe = calibrate_query_bank = calibrate_ranking
