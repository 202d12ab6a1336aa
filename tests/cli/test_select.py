"""kvsearch select, end to end on the bundled model and a made-up profile of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.plan import load_plan
from kvsearch.report.integrity import Verification
from kvsearch.runs.run import read_sums
from tests import tiny
from tests.cli.conftest import invoke, polykv_in
from tests.cli.test_bad_input import USAGE, refused

RETRIEVING = 3  # the layer in which the bundled model retrieves
CONTEXTS, SAMPLES = 56, 20
pytestmark = pytest.mark.slow
choose = partial(invoke, "select")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task file of short contexts in the bundled model's language."""
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", CONTEXTS, length=140, facts=4)


def calibrated(directory: Path) -> Path:
    """What a calibration leaves; its profile knows which layer needs its entries."""
    losses = np.zeros((2, 3, 2, 6, 3))
    losses[:, :, :, RETRIEVING] = np.array([[2.0, 3, 2.5], [1, 2, 1.5], [0.3, 1, 0.6]])[:, None]
    made = {"samples": 2, "nll": losses + [0, 0.02, 0.01] + 1, "full_nll": np.ones(2)}
    return polykv_in(directory, made=made, budgets=(16, 48, 128), length=512)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return calibrated(tmp_path / "polykv")


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, questions: Path) -> tuple[Path, str, str]:
    """The directory of a calibration from which a strategy was chosen, with its plan beside it; what was printed."""
    directory = calibrated(tmp_path_factory.mktemp("chosen") / "polykv")
    code, out, talk = choose(*command(directory, questions))
    assert code == 0, talk
    assert {one.state for one in Verification([directory, directory.parent / "plan.json"]).artefacts} == {"whole"}
    assert {"selection.json", "prefill/report/ledger.jsonl"} <= read_sums(run_of(directory)).keys()
    return directory, out, talk


def command(directory: Path, questions: Path, *more: object, plan: str = "plan.json") -> tuple[object, ...]:
    asked = ("--tasks", f"jsonl:{questions}", "--samples", SAMPLES)
    return (directory, "-o", directory.parent / plan, "--budget", 24, *asked, *more)


def run_of(directory: Path) -> Path:
    return directory / "selection" / "24-question-agnostic-prefill"


def lines(directory: Path) -> int:
    ledgers = (run_of(directory) / "prefill").glob("*/ledger.jsonl")
    return sum(len(ledger.read_text().splitlines()) for ledger in ledgers)


def test_a_strategy_that_is_better_is_written(chosen: tuple[Path, str, str]) -> None:
    directory, out, talk = chosen
    plan = load_plan(directory.parent / "plan.json")
    check_plan(plan, "the plan")
    budgets = [budget[0] for budget in plan.budgets("prefill") if budget]
    assert plan.total == 24 * 24
    assert max(range(6), key=budgets.__getitem__) == RETRIEVING
    told = plan.provenance.settings
    assert (plan.provenance.method, told["fallback"], told["phases"]) == ("polykv", False, "prefill")
    assert told["strategy"].endswith(f" + {told['budget_signal']}")
    verb = "beats" if told["verdict"] == "beats" else "is likely better than"
    assert f"{told['strategy']} {verb} " in " ".join(out.split())
    assert f"wrote {directory.parent / 'plan.json'} and {run_of(directory) / 'selection.json'}" in talk


def test_a_search_does_not_choose_by_the_same_questions_again(
    chosen: tuple[Path, str, str], questions: Path, tmp_path: Path
) -> None:
    """The selection has asked all contexts of the split that a search chooses by."""
    directory, _, _ = chosen
    start = ("--start", directory.parent / "plan.json", "--tasks", f"jsonl:{questions}", "-o", tmp_path / "run")
    message = refused(
        lambda *arguments: invoke("evolve", *arguments), USAGE, "is fresh", "bundled", "--budget", 24, *start
    )
    assert f"task mine: none of its {SAMPLES} contexts of split select is fresh" in message
    assert f"({SAMPLES} in all)" in message


@pytest.mark.nightly
def test_how_sure_to_be_takes_no_other_replies(chosen: tuple[Path, str, str], questions: Path) -> None:
    directory, _, _ = chosen
    before = lines(directory)
    code, _, talk = choose(*command(directory, questions, "--sure", 0.95, plan="other.json"))
    assert code == 0
    assert "going on with" in talk
    assert lines(directory) == before
    other = directory.parent / "other.json"
    other.write_bytes(other.read_bytes() + b" ")
    words = "other.json is another plan than is chosen now: choose another file, or --force"
    refused(choose, USAGE, words, *command(directory, questions, "--sure", 0.95, plan="other.json"))
