"""What every calibration method must do; a test class subclasses `CalibrationContract` and sets its `options`.

    class TestMyMethod(CalibrationContract):
        options = MyOptions(answer_tokens=2)

It is run on the bundled model and a few short contexts of the synthetic tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import pytest

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.calibration.base import Calibration
from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.options import CalibrationOptions
from kvsearch.calibration.prompts import make_task_data
from kvsearch.calibration.steps import StepCache, hash_step_inputs
from kvsearch.cli.verbs import MAIN_VERBS
from kvsearch.core.errors import UsageError
from kvsearch.methods.base import CalibratedRun, CalibrationMethod
from kvsearch.models.loading import LoadedModel, load
from kvsearch.plan import Profile, Size
from kvsearch.plan.methods import create_method
from kvsearch.plan.profile import read_profile
from kvsearch.plan.profile_arrays import find_misfits
from kvsearch.report.table import Table
from kvsearch.runtime import Program
from kvsearch.tasks.catalog import find_tasks

TEST_MODEL: Final = "bundled"
CONTEXT_LENGTH: Final = 512  # tokens of a context


@lru_cache
def load_bundled() -> LoadedModel:
    """Load the bundled model once for all contracts."""
    return load(TEST_MODEL)


@lru_cache
def make_texts(contexts: int) -> CalibrationData:
    """Make calibration data of a synthetic task: `contexts` contexts with questions and answers."""
    tasks = find_tasks("synthetic:single", {"length": (CONTEXT_LENGTH,), "split": "train"})
    return make_task_data(load_bundled(), tasks, contexts, 0)


class CalibrationContract:
    """Subclasses set small `options`; profiles are measured on `contexts` contexts, and plans made at all `sizes`."""

    options: ClassVar[CalibrationOptions]
    contexts: ClassVar[int] = 6
    sizes: ClassVar[Sequence[Size]] = (Size(ratio=0.5), Size(budget=70), Size(ratio=0.3, length=300))

    @property
    def method(self) -> CalibrationMethod:
        method: CalibrationMethod = create_method(self.options.method)
        return method

    def calibration(self) -> Calibration[CalibrationOptions]:
        policies = self.options.policies()
        return self.method.create_calibration(load_bundled(), make_texts(self.contexts), policies, self.options)

    def measure(self, directory: Path | None = None) -> Profile:
        """Measure a profile; finished steps are stored in `directory`, and read if they are there."""
        calibration = self.calibration()
        prompts = calibration.prepare()
        identity = hash_step_inputs(calibration.loaded, calibration.data, prompts, self.options.resolved())
        calibration.steps = StepCache(directory, identity)
        return calibration.measure(prompts)

    @pytest.fixture(scope="class")
    @classmethod
    def profile(cls) -> Profile:
        return cls().measure()

    def test_it_is_registered_with_its_options(self) -> None:
        method = self.method
        assert method.name == self.options.method
        assert method.summary
        assert "\n" not in method.summary
        assert isinstance(self.options, method.options)

    def test_options_go_through_json(self) -> None:
        kind = type(self.options)
        assert kind.model_validate(json.loads(self.options.model_dump_json())) == self.options
        assert json.loads(json.dumps(self.options.resolved()))["method"] == self.method.name
        with pytest.raises(UsageError):
            kind.check_given({"no_such_option": 1})

    def test_the_same_again(self, profile: Profile) -> None:
        assert self.measure().to_bytes() == profile.to_bytes()

    def test_a_stopped_calibration_ends_the_same(self, profile: Profile, tmp_path: Path) -> None:
        """Each finished step may be the last: stored steps are read, the others are measured."""
        assert self.measure(tmp_path).to_bytes() == profile.to_bytes()
        stored = sorted(tmp_path.rglob("*.safetensors"))  # as if it had been stopped halfway
        for path in stored[len(stored) // 2 :]:
            path.unlink()
        assert self.measure(tmp_path).to_bytes() == profile.to_bytes()

    def test_arrays_are_those_that_are_declared(self, profile: Profile) -> None:
        declared = self.method.arrays
        assert profile.metadata.method == self.method.name
        assert set(profile.arrays) <= set(declared), "some are not declared"
        assert list(find_misfits(profile.arrays, declared, profile.metadata)) == []
        again = read_profile(profile.to_bytes(), "the profile")
        assert again.metadata == profile.metadata
        assert all(np.array_equal(again.arrays[name], array) for name, array in profile.arrays.items())

    def test_plans_have_exactly_the_size(self, profile: Profile) -> None:
        for size in self.sizes:
            if not self.method.makes_plans:
                with pytest.raises(UsageError) as caught:
                    self.method.to_plan(profile, size)
                assert "\n" not in str(caught.value)
                continue
            plan = self.method.to_plan(profile, size).plan
            assert plan.total == size.pool(profile.metadata).total
            assert plan.provenance.method == self.method.name or profile.metadata.policies
            check_plan(plan, "the plan")
            Program.from_plan(load_bundled().model, plan)
            assert self.method.to_plan(profile, size).plan == plan

    def test_it_describes_its_profile(self, profile: Profile) -> None:
        parts = list(self.method.describe(profile, 0.8))
        assert parts, "show has nothing to say"
        assert any(isinstance(part, Table) or hasattr(part, "title") for part in parts)
        assert all("\n" not in line for line in self.method.remarks(profile))

    def test_what_is_suggested_next_is_a_command(self, profile: Profile, tmp_path: Path) -> None:
        run = CalibratedRun(self.options, TEST_MODEL, tmp_path)
        for verb, *words in self.method.next_commands(profile, run):
            assert verb in MAIN_VERBS
            assert words
            assert all(isinstance(word, str) for word in words)
