"""kvsearch select, end to end on the bundled model and a made-up profile of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvsearch.budgets.plan_checks import check_plan
from kvsearch.cli.select import select
from kvsearch.jobs.select import SelectOptions
from kvsearch.models.loading import load
from kvsearch.plan import load_plan, save_profile
from kvsearch.plan.contexts import merkle_root
from kvsearch.report.integrity import verify_paths
from kvsearch.runs.contexts import read_contexts
from kvsearch.runs.sums import read_sums
from tests import tiny
from tests.cli.conftest import invoke
from tests.cli.test_bad_input import INCOMPATIBLE, USAGE, refused
from tests.plan.builders import make_profile
from tests.signals.profiles import make_signals, signal_metadata

PATTERNS: dict[str, dict[str, Any]] = {"snapkv": {"window": 8}, "streaming": {"sinks": 4}, "tova": {}}
RETRIEVING = 3  # the layer in which the bundled model retrieves
CONTEXTS, SAMPLES = 160, 32
FEW = ("--routes", "nll", "--allocators", "uniform,nll-chosen")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(select)


def choose(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one selection."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task file of short contexts in the bundled model's language."""
    return tiny.task_file(tmp_path_factory.mktemp("task") / "mine.jsonl", CONTEXTS, length=200, facts=4)


@pytest.fixture(scope="module")
def measured() -> bytes:
    """A profile that knows which layer needs its entries."""
    metadata = signal_metadata(load("bundled").fingerprint, PATTERNS, budgets=(16, 48, 128), length=512)
    losses = np.zeros((2, 3, 2, 6, 3))
    losses[:, :, :, RETRIEVING] = np.array([[2.0, 3, 2.5], [1, 2, 1.5], [0.3, 1, 0.6]])[:, None]
    full = np.ones(2)
    found = make_signals(metadata, 2, nll=losses + [0, 0.02, 0.01] + full[0], full_nll=full)
    return found.to_bytes()


def calibrated(directory: Path, profile: bytes) -> Path:
    """What a calibration leaves."""
    directory.mkdir(parents=True)
    (directory / "profile.safetensors").write_bytes(profile)
    (directory / "config.json").write_text(json.dumps({"model": "bundled", "recipe": {"method": "polykv"}, "seed": 0}))
    return directory


@pytest.fixture
def directory(tmp_path: Path, measured: bytes) -> Path:
    return calibrated(tmp_path / "polykv", measured)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, measured: bytes, questions: Path) -> tuple[Path, str, str]:
    """The directory of a calibration from which a strategy was chosen, with its plan beside it; what was printed."""
    directory = calibrated(tmp_path_factory.mktemp("chosen") / "polykv", measured)
    code, out, talk = choose(*command(directory, questions))
    assert code == 0, talk
    assert {one.state for one in verify_paths([directory, directory.parent / "plan.json"]).artefacts} == {"whole"}
    assert {"selection.json", "prefill/report/ledger.jsonl"} <= read_sums(run_of(directory)).keys()
    return directory, out, talk


def command(directory: Path, questions: Path, *more: object, plan: str = "plan.json") -> tuple[object, ...]:
    asked = ("--tasks", f"jsonl:{questions}", "--samples", SAMPLES)
    return (directory, "-o", directory.parent / plan, "--budget", 24, *asked, *FEW, *more)


def run_of(directory: Path, size: str = "24", phases: str = "prefill") -> Path:
    return directory / "selection" / f"{size}-question-agnostic-{phases}"


def lines(directory: Path) -> int:
    ledgers = (run_of(directory) / "prefill" / stage / "ledger.jsonl" for stage in ("first", "second", "report"))
    return sum(len(ledger.read_text().splitlines()) for ledger in ledgers)


# --- what is written -------------------------------------------------------------------------------------------------


def test_a_strategy_that_is_better_is_written(chosen: tuple[Path, str, str]) -> None:
    directory, out, talk = chosen
    plan = load_plan(directory.parent / "plan.json")
    check_plan(plan, "the plan")
    budgets = [budget[0] for budget in plan.budgets("prefill") if budget]
    assert plan.total == 24 * 24
    assert max(range(6), key=budgets.__getitem__) == RETRIEVING
    told = plan.provenance.settings
    assert (plan.provenance.method, told["strategy"], told["fallback"]) == ("polykv", "nll + nll-chosen", False)
    assert (told["route"], told["budget_signal"], told["phases"]) == ("nll", "nll-chosen", "prefill")
    assert "nll + nll-chosen beats " in " ".join(out.split())
    assert "of the gap to the full cache is recovered" in " ".join(out.split())
    assert f"wrote {directory.parent / 'plan.json'} and {run_of(directory) / 'selection.json'}" in talk


def test_the_report_beside_it(chosen: tuple[Path, str, str]) -> None:
    directory, _, _ = chosen
    told = json.loads((run_of(directory) / "selection.json").read_text())
    assert (told["schema"], told["budget"], told["model"]) == ("kvsearch.selection/1", 24, "bundled")
    assert (told["written"]["name"], told["written"]["fallback"]) == ("nll + nll-chosen", False)
    (outcome,) = told["outcomes"]
    assert (outcome["first"]["contexts"], outcome["second"]["contexts"]) == (16, 16)
    winner = next(one for one in outcome["standings"] if one["name"] == told["written"]["name"])
    assert winner["accepted"]
    assert winner["chance"] <= 0.05
    assert winner["lead"]["low"] > 0
    report = told["report"]
    assert report["asked"]["contexts"] == SAMPLES
    parts = {"its policies, equal budgets", "its budgets, one policy"}
    assert {"full", "snapkv", report["baseline"], "nll + nll-chosen", *parts} <= set(report["scores"])
    assert report["by_budgets"] == {"equal": None, "own": "nll + nll-chosen", "gain": None}
    assert report["parts"]["strategy"] == "nll + nll-chosen"
    assert set(report["parts"]["budgets"]) == {"alone", "beside"}
    assert report["scores"]["nll + nll-chosen"]["mean"] > report["scores"][report["baseline"]]["mean"]
    entries = {name: held["entries"] for name, held in report["held"].items()}
    assert {entries[name] for name in entries if name != "full"} == {576}
    assert report["share"]["low"] <= report["share"]["mean"] <= report["share"]["high"]


def test_the_plan_says_what_it_was_chosen_and_reported_on(chosen: tuple[Path, str, str]) -> None:
    directory, _, _ = chosen
    record, told = load_plan(directory.parent / "plan.json").provenance.contexts, read_contexts(run_of(directory))
    assert record is not None
    for use in ("chosen", "reported"):
        found, hashes = getattr(record, use), getattr(told, use)
        assert (found.contexts, found.jobs[0].root) == (SAMPLES, merkle_root(hashes))
        assert all(map(found.has, hashes))
    report = json.loads((run_of(directory) / "selection.json").read_text())
    (outcome,) = report["outcomes"]
    assert record.chosen.questions == outcome["first"]["questions"] + outcome["second"]["questions"]
    assert record.reported.questions == report["report"]["asked"]["questions"]
    assert not set(told.chosen) & set(told.reported)
    assert not record.complete  # the made-up profile has no record


def test_a_search_does_not_choose_by_the_same_questions_again(
    chosen: tuple[Path, str, str], questions: Path, tmp_path: Path
) -> None:
    """The selection has asked all contexts of the split that a search chooses by."""
    directory, _, _ = chosen
    start = ("--start", directory.parent / "plan.json", "--tasks", f"jsonl:{questions}", "-o", tmp_path / "run")
    message = refused(evolve_command, USAGE, "is fresh", "bundled", "--budget", 24, *start)
    assert f"task mine: none of its {SAMPLES} contexts of split select is fresh" in message
    assert f"({SAMPLES} in all)" in message


def evolve_command(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one search."""
    return invoke("evolve", *arguments)


def test_the_same_command_goes_on_with_its_replies(chosen: tuple[Path, str, str], questions: Path) -> None:
    directory, out, _ = chosen
    before = lines(directory)
    files = {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()}
    code, again, talk = choose(*command(directory, questions))
    assert (code, again) == (0, out)
    assert "this run was finished: nothing was left to do" in talk
    assert {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()} == files
    for other in (("--top", 1), ("--seed", 1)):
        changed = command(directory, questions, *other)
        refused(choose, USAGE, "plan.json exists: choose another file, or --force", *changed)
    code, again, talk = choose(*command(directory, questions, "--force"))
    assert (code, again) == (0, out)
    assert talk.count("going on with") == 3
    code, _, _ = choose(*command(directory, questions, "--top", 1, plan="other.json"))
    assert code == 0
    assert lines(directory) == before


def test_the_evidence_is_there_before_the_plan(
    directory: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = command(directory, questions, "--samples", 2)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvsearch.plan.save_plan", killed)
        assert choose(*asked)[0] == 130
    assert not (directory.parent / "plan.json").exists()
    evidence = (run_of(directory) / "selection.json").read_bytes()
    code, _, talk = choose(*asked)
    assert code == 0, talk
    assert "was finished" not in talk
    assert (run_of(directory) / "selection.json").read_bytes() == evidence
    (directory.parent / "plan.json").write_bytes((directory.parent / "plan.json").read_bytes() + b" ")
    refused(choose, USAGE, "plan.json is another plan than is chosen now: choose another file, or --force", *asked)
    assert (run_of(directory) / "selection.json").read_bytes() == evidence


def test_replies_to_other_questions_are_kept_unless_forced(directory: Path, questions: Path, tmp_path: Path) -> None:
    small = ("--samples", 2)
    code, out, talk = choose(*command(directory, questions, *small))
    assert code == 0, talk
    assert "fallback to" in out
    assert "so few contexts cannot show any lead" in " ".join(out.split())
    other = command(directory, questions, "--samples", 3, plan="other.json")
    refused(choose, USAGE, "has replies to other questions", *other)
    code, _, talk = choose(*other, "--run", tmp_path / "elsewhere")
    assert code == 0, talk
    assert (tmp_path / "elsewhere" / "selection.json").exists()
    ledger = run_of(directory) / "prefill" / "first" / "ledger.jsonl"
    ledger.write_text("nonsense\n" + ledger.read_text())
    refused(choose, USAGE, "line 1 is damaged", *command(directory, questions, *small, plan="third.json"))
    code, _, talk = choose(*command(directory, questions, *small, "--force", "--json"))
    assert code == 0, talk
    assert talk.count("going on with") == 2
    assert "nonsense" not in ledger.read_text()


def test_a_fallback_says_so(directory: Path, questions: Path) -> None:
    code, out, talk = choose(*command(directory, questions, "--samples", 4, "--json", "--quiet"))
    assert (code, talk) == (0, "")
    told = json.loads(out)
    assert told["written"]["fallback"]
    assert (told["report"]["gain"], told["report"]["share"]) == (None, None)
    settings = load_plan(told["plan"]).provenance.settings
    assert (settings["fallback"], settings["baseline"]) == (True, told["written"]["name"])
    assert "strategy" not in settings


def test_all_phases(directory: Path, questions: Path) -> None:
    more = ("--phases", "all", "--samples", 2, "--allocators", "nll-chosen", "--ratio", 0.8)
    arguments = [one for one in command(directory, questions) if one not in ("--budget", 24)]
    code, out, talk = choose(*arguments, *more)
    assert code == 0, talk
    told = json.loads((run_of(directory, "0.8", "all") / "selection.json").read_text())
    assert [one["phases"] for one in told["outcomes"]] == ["prefill", "decode", "both"]
    assert [one["level"] for one in told["outcomes"]] == [0.05 / 3] * 3
    assert "hold the full cache at the end of prefill" in " ".join(out.split())
    assert load_plan(directory.parent / "plan.json").scaling == "proportional"
    assert out.count("first stage: ") == 3


def test_several_budgets_are_reported_on_the_same_questions(directory: Path, questions: Path) -> None:
    asked = [one for one in command(directory, questions, "--samples", 2) if one not in ("--budget", 24)]
    code, out, talk = choose(*asked, "--budgets", "24,32")
    assert code == 0, talk
    shown = " ".join(out.split())
    for words in ("report split: the best candidates", "report split: what budgets bring", "gains in points over the"):
        assert shown.count(words) == 1
    assert shown.count("first stage: ") == 2
    found = {size: json.loads((run_of(directory, size) / "selection.json").read_text()) for size in ("24", "32")}
    for size, told in found.items():
        plan = load_plan(directory.parent / f"plan-{size}.json")
        assert plan.total == told["written"]["total"] == 24 * int(size)
    assert len({json.dumps(told["report"]["scores"]["full"]) for told in found.values()}) == 1
    assert not (directory.parent / "plan.json").exists()
    code, again, talk = choose(*asked, "--budgets", "24,32", "--force", "--json")
    assert code == 0, talk
    told = json.loads(again)
    assert (told["schema"], list(told["budgets"])) == ("kvsearch.selections/1", ["24", "32"])
    assert talk.count("going on with") == 6
    code, out, talk = choose(*asked, "--budgets", "48", "--dry-run", "--run", directory.parent / "runs")
    assert code == 0, talk
    assert json.loads(out)["budgets"]["48"]["run"].endswith("runs/48-question-agnostic-prefill")


def test_what_would_be_done(directory: Path, questions: Path) -> None:
    code, out, talk = choose(*command(directory, questions, "--dry-run", "--top", 1))
    assert code == 0, talk
    told = json.loads(out)
    assert told["phases"]["prefill"]["candidates"] == 1
    entrants = 1 + len(told["phases"]["prefill"]["baselines"])
    assert told["most_replies"] == {"first": (entrants + 1) * 32, "second": 5 * 32, "report": 8 * 64}
    assert told["run"] == str(run_of(directory))
    assert not (directory.parent / "plan.json").exists()
    assert not (directory / "selection").exists()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--routes", "cosin"), "unknown route 'cosin'; did you mean 'cosine'"),
        (("--allocators", "curve"), "unknown allocator 'curve'; did you mean 'curves'"),
        (("--allocators", "uniform,,ppl"), "--allocators takes names with commas between them"),
        (("--explore", "fill"), "unknown level to explore 'fill'; did you mean 'full'"),
        (("--phases", "decoding"), "unknown phases 'decoding'; did you mean 'decode'"),
        (("--margin", "-0.1"), "--margin -0.1 is outside [0, 1)"),
        (("--top", "0"), "--top 0 lets no candidate through"),
        (("--protocol", "aware"), "unknown protocol 'aware'; did you mean 'question-aware'"),
        (("--ratio", "0.5"), "give either a ratio"),
        (("--budgets", "16,24"), "--budgets: is in place of budget and ratio: give one of them"),
        (("--tasks", "gsm"), "unknown task 'gsm'"),
        (("--max-memory", "0"), "--max-memory: must be above 0 GB"),
        (("-o", "/no/such/plan.json"), "its folder does not exist"),
    ],
)
def test_requests_that_cannot_be_met(directory: Path, questions: Path, more: tuple[str, ...], words: str) -> None:
    refused(choose, USAGE, words, *command(directory, questions, *more))
    assert not (directory / "selection").exists()


def test_replies_cannot_be_kept_in_a_file(
    directory: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out before the model is loaded."""
    monkeypatch.setattr(SelectOptions, "load_calibrated", None)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        refused(choose, USAGE, "file is a file, name a directory", *command(directory, questions, "--run", place))


def test_a_size_has_to_be_given_if_several_were_measured(directory: Path, questions: Path) -> None:
    arguments = [one for one in command(directory, questions) if one not in ("--budget", 24)]
    refused(choose, USAGE, "measured at 16, 48, 128 entries per kv head: say how many to keep", *arguments)


def test_tasks_without_the_splits(directory: Path, tmp_path: Path, questions: Path) -> None:
    row = json.loads(questions.read_text().splitlines()[0])
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    refused(choose, USAGE, "split 'select' of one is empty", *command(directory, tmp_path / "one.jsonl"))


def test_directories_that_are_no_calibration(tmp_path: Path, questions: Path) -> None:
    refused(choose, USAGE, "does not exist", *command(tmp_path / "none", questions))
    lukv = tmp_path / "lukv"
    lukv.mkdir()
    save_profile(make_profile(), lukv / "profile.safetensors")
    refused(choose, USAGE, "has no signals to route by", *command(lukv, questions))


def test_another_model(tmp_path: Path, questions: Path) -> None:
    metadata = signal_metadata(None, PATTERNS, budgets=(16, 48))
    other = calibrated(tmp_path / "other", make_signals(metadata).to_bytes())
    refused(choose, INCOMPATIBLE, "was made for another model", *command(other, questions))
