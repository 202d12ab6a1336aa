"""Two writers of one directory never leave a mixture; `make races` does it by the hundred, in processes."""

from __future__ import annotations

import pkgutil
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest

import kvsearch.jobs
from kvsearch.config.options import JobOptions
from kvsearch.core.errors import InternalError, UsageError
from kvsearch.jobs.calibrate import CalibrateOptions, calibrate
from kvsearch.jobs.evaluate import EvaluateOptions, evaluate
from kvsearch.jobs.export import ExportOptions, export_to
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.models.loading import LoadedModel
from kvsearch.plan import save_plan
from kvsearch.runs.run import write_json
from tests import tiny
from tests.robustness.inputs import calibration_file
from tests.robustness.processes import timeless, tree_of
from tests.runs.guard import every_write_locked

RACES = 4
Call = Callable[[], object]
Pair = tuple[Call, Call]


@cache
def model() -> LoadedModel:
    """The model of all calls: two threads that make one draw from one generator."""
    return tiny.loaded()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    calibration_file(folder / "texts.json", 2, length=60)
    tiny.task_file(folder / "mine.jsonl", 4, length=60, facts=2)
    for name, budget in (("one", 8), ("other", 9)):
        (folder / name).mkdir()
        save_plan(tiny.plan_for(model(), [[budget] * 2] * 4), folder / name / "plan.json")
    return folder


def calibrations(inputs: Path, place: Path) -> Pair:
    def call(questions: int) -> object:
        given = {"data": str(inputs / "texts.json"), "method": "query_statistics", "questions": questions}
        return calibrate(CalibrateOptions.of(model="tiny", output=place, **given).with_model(model()))

    return lambda: call(1), lambda: call(3)


def evaluations(inputs: Path, place: Path) -> Pair:
    def call(methods: str) -> object:
        given = {"tasks": f"jsonl:{inputs / 'mine.jsonl'}", "budgets": "8", "samples": 2}
        options = EvaluateOptions.of(model="tiny", output=place, methods=methods, **given)
        return evaluate(options.with_model(model()))

    return lambda: call("tova"), lambda: call("streaming")


def exports(inputs: Path, place: Path) -> Pair:
    def call(name: str) -> object:
        return export_to(ExportOptions.of(profile=inputs / name / "plan.json", to="folder", output=place))

    return lambda: call("one"), lambda: call("other")


def ending(call: Call) -> str:
    """What a call that was refused says; nothing if it was not."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


@pytest.fixture
def _no_time() -> Iterator[None]:
    with timeless():
        yield


@pytest.mark.usefixtures("_no_time")
@pytest.mark.parametrize("commands", [calibrations, evaluations, exports])
def test_two_writers(commands: Callable[[Path, Path], Pair], inputs: Path, tmp_path: Path) -> None:
    """One is refused and the other's result is whole, or one is refused for what the other has left."""
    place, draw, alone, seconds = tmp_path / "run", random.Random(0), [], 0.0
    calls = commands(inputs, place)
    for call in calls:
        began = perf_counter()
        with every_write_locked() as outside:
            assert ending(call) == ""
        assert outside == []
        seconds = perf_counter() - began
        alone.append(tree_of(place))
        shutil.rmtree(place)
    assert alone[0] != alone[1]
    for _ in range(RACES):
        ends = ["", ""]
        delays = [0.0, draw.choice((0.0, draw.uniform(0, seconds)))]

        def work(which: int, ends: list[str] = ends, delays: list[float] = delays) -> None:
            sleep(delays[which])
            ends[which] = ending(calls[which])

        threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [which for which in (0, 1) if not ends[which]]
        assert tree_of(place) == alone[winner], ends
        assert not list(place.rglob(".kvsearch-*"))
        shutil.rmtree(place)


# --- every job, by construction ---------------------------------------------------------------------------------------


def option_models() -> Iterator[type[JobOptions]]:
    """The options of every job."""
    for module in pkgutil.iter_modules(kvsearch.jobs.__path__):
        found = vars(import_module(f"kvsearch.jobs.{module.name}")).values()
        yield from (
            one for one in found if isinstance(one, type) and issubclass(one, JobOptions)
            and one.__module__ == f"kvsearch.jobs.{module.name}"
        )  # fmt: skip


def test_a_directory_that_is_an_output_is_locked() -> None:
    """Whatever `-o` says is a directory is one that its job has the lock of."""
    checked = set()
    for options in option_models():
        _, option = options.offered().get("output", (None, None))
        if option is not None and ("Directory" in option.help or option.metavar == "DIR"):
            made = options.model_construct(output=Path("place"), model="tiny")
            assert made.directories == (Path("place"),), options
            checked.add(options.__name__)
    assert {"CalibrateOptions", "EvaluateOptions", "EvolveOptions", "RunOptions"} <= checked
    assert "ReproduceOptions" in checked


class MineOptions(JobOptions):
    output: Path


def test_a_job_without_a_lock_does_not_write(tmp_path: Path) -> None:
    """Whoever writes a new job and forgets its directory is told at its first file."""

    @job(MineOptions)
    def mine(options: MineOptions, reporter: Reporter) -> None:
        write_json(options.output / "report.json", {})

    def call(**given: Any) -> None:
        mine(MineOptions.model_validate(given))

    with pytest.raises(InternalError, match="is written without its lock"):
        call(output=tmp_path)
    assert list(tmp_path.iterdir()) == []
